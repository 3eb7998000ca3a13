"""Readers of files of lines: txt, a text a line, and jsonl, an object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from .row import Names, Row, bad_row, make_row

MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 200  # of JSON that is kept: what walks it does so on Python's stack
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def open_text(path: Path, name: str) -> BinaryIO:
    """The file, open behind its byte order mark.

    Raises:
        InputError: it is UTF-16.
    """
    file = path.open("rb")
    start = file.read(len(_BOM))
    if start.startswith(_UTF16):
        file.close()
        raise InputError(f"{name}: UTF-16, wanted UTF-8; convert it, as with iconv -t utf-8.")
    file.seek(len(_BOM) if start == _BOM else 0)
    return file


def read_lines(path: Path, name: str) -> Iterator[tuple[str, str | None, str]]:
    r"""(file:line, the line without its \n or \r\n, "") of each; or None and what is wrong.

    A line longer than MAX_LINE_BYTES is never held.
    """
    with open_text(path, name) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            where = f"{name}:{number}"
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            if len(line) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield where, None, f"a line of over {MAX_LINE_BYTES} bytes, wanted a shorter one"
                continue
            try:
                yield where, line.decode("utf-8"), ""
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
                yield where, None, f"{byte}, wanted UTF-8"


def read_txt(path: Path, name: str, names: Names) -> Iterator[Row]:
    """The lines, each a text, also where it is empty."""
    if names.id is not None:
        raise InputError(
            f"{name}: text lines have no column {names.id!r}, wanted none; leave --id-column out."
        )
    for where, line, problem in read_lines(path, name):
        if line is None:
            yield bad_row(where, problem)
        else:
            yield make_row(where, {names.text: line}, line, names, len(line))


def read_jsonl(path: Path, name: str, names: Names) -> Iterator[Row]:
    """The objects, a line each; blank lines are none."""
    for where, line, problem in read_lines(path, name):
        if line is None:
            yield bad_row(where, problem)
        elif line.strip():
            yield _json_row(where, line, names)


def _json_row(where: str, line: str, names: Names) -> Row:
    try:
        columns = json.loads(line)
    except json.JSONDecodeError as error:
        at = f"{error.msg} at character {error.pos + 1}"
        return bad_row(where, f"broken JSON ({at}), wanted an object a line")
    except (RecursionError, ValueError) as error:  # nested too deeply, an integer too long
        return bad_row(where, f"JSON that cannot be read ({error}), wanted an object a line")
    if _deeper(columns, MAX_DEPTH):
        return bad_row(where, f"JSON nested more than {MAX_DEPTH} deep, wanted it flatter")
    if not isinstance(columns, dict):
        kind = type(columns).__name__
        return bad_row(where, f"a JSON {kind}, wanted an object with {names.text!r}")
    if names.text not in columns:
        has = ", ".join(columns) or "nothing"
        problem = f"no column {names.text!r}, it has {has[:200]}"
        return bad_row(where, problem, "pass --column NAME")
    row = make_row(where, columns, columns[names.text], names, len(line))
    # Only an escape can bring a lone surrogate into decoded UTF-8.
    if not row.problem and "\\ud" in line.lower():
        try:
            json.dumps(columns, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return bad_row(where, "a lone surrogate in a column, wanted text UTF-8 can hold")
    return row


def _deeper(value: object, depth: int) -> bool:
    """Whether lists and objects in a JSON value are nested more than depth deep."""
    level = [value]
    for _ in range(depth):
        level = [item for one in level for item in _items(one)]
        if not level:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    """What a list or an object directly holds, lists and objects only."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [item for item in inner if isinstance(item, dict | list)]
    return ()
