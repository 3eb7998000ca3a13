"""Reader of csv and tsv, whose first line names the columns."""

from __future__ import annotations

import csv
from collections import Counter
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
        lines = _Lines(file)
        records = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(records, None)
        except csv.Error as error:
            raise InputError(f"{name}:1: {error}, wanted a line of column names.") from error
        if header is None:
            return
        check_columns(header, f"{name}:1", names)
        text_at = header.index(names.text)
        while True:
            where = f"{name}:{lines.number + 1}"
            lines.left = MAX_LINE_BYTES
            try:
                fields = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                yield bad_row(where, f"broken ({error}), wanted a record of {len(header)} fields")
                continue
            if fields:  # a blank line is none
                yield _row(where, fields, header, text_at, names)


class _Lines:
    """A file's lines, as csv.reader asks for them: number is that of the last one.

    left: the characters that the record may still have; the reader itself would hold any number.
    """

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file
        self.number = 0
        self.left = MAX_LINE_BYTES

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        """The next line.

        Raises:
            csv.Error: it is too long, and was passed over.
        """
        line = self._file.readline(self.left + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.left -= len(line)
        if self.left >= 0:
            return line
        while line and not line.endswith(("\n", "\r")):
            line = self._file.readline(1 << 20)
        raise csv.Error(f"over {MAX_LINE_BYTES} characters")


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
    return make_row(where, columns, fields[text_at], names, sum(map(len, fields)))


def check_columns(found: Sequence[str], name: str, names: Names) -> None:
    """Check that a file has each of its columns once, and those that are asked for.

    Raises:
        InputError: one is there twice or missing; the message lists those there are.
    """
    counts = Counter(found)
    if twice := [column for column in counts if counts[column] > 1]:
        raise InputError(f"{name}: column {twice[0]!r} twice, wanted each once; rename one.")
    for wanted, option in ((names.text, "--column"), (names.id, "--id-column")):
        if wanted is not None and wanted not in found:
            has = ", ".join(repr(column) for column in found[:20]) or "none"
            has += f" and {len(found) - 20} more" if len(found) > 20 else ""
            raise InputError(f"{name}: no column {wanted!r}, it has {has}; pass {option} NAME.")
