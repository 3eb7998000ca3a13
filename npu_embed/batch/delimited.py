"""Reader of csv and tsv, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path

from ..errors import InputError
from .lines import MAX_LINE_BYTES, open_text
from .row import Names, Row, bad_row, make_row


def read_delimited(path: Path, name: str, names: Names, delimiter: str) -> Iterator[Row]:
    """The records below the header; every column is a string, an empty field the empty string.

    Raises:
        InputError: no header, a column in it twice, or the text or id is not in it.
    """
    if csv.field_size_limit() < MAX_LINE_BYTES:  # of the process, and by default 128 KiB
        csv.field_size_limit(MAX_LINE_BYTES)
    # What is not UTF-8 becomes lone surrogates, which are a problem of their row, not of the file.
    raw = open_text(path, name)
    with TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline="") as file:
        records = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(records, None)
        except csv.Error as error:
            raise InputError(f"{name}:1: {error}, wanted a line of column names.") from error
        if header is None:
            return
        _check_header(header, name, names)
        text_at = header.index(names.text)
        while True:
            where = f"{name}:{records.line_num + 1}"
            try:
                fields = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                yield bad_row(where, f"broken ({error}), wanted a record of {len(header)} fields")
                continue
            if fields:  # a blank line is none
                yield _row(where, fields, header, text_at, names)


def _row(where: str, fields: list[str], header: list[str], text_at: int, names: Names) -> Row:
    if len(fields) != len(header):
        return bad_row(where, f"{len(fields)} fields, wanted {len(header)} as the header has")
    for column, field in zip(header, fields, strict=True):
        try:
            field.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(field[error.start]) - 0xDC00
            return bad_row(where, f"byte 0x{byte:02x} in {column}, wanted UTF-8")
    columns = dict(zip(header, fields, strict=True))
    return make_row(where, columns, fields[text_at], names)


def _check_header(header: Sequence[str], name: str, names: Names) -> None:
    twice = [column for column in header if header.count(column) > 1]
    if twice:
        raise InputError(f"{name}:1: column {twice[0]!r} twice, wanted each once; rename one.")
    check_columns(header, name, names)


def check_columns(found: Sequence[str], name: str, names: Names) -> None:
    """Check that a file has the columns that are asked for.

    Raises:
        InputError: one is missing; the message lists those there are.
    """
    for wanted, option in ((names.text, "--column"), (names.id, "--id-column")):
        if wanted is not None and wanted not in found:
            has = ", ".join(repr(column) for column in found) or "none"
            raise InputError(f"{name}: no column {wanted!r}, it has {has}; pass {option} NAME.")
