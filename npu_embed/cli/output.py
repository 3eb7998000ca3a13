"""What the commands share: JSON lines, tables, and the log on stderr."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..progress import is_terminal

if TYPE_CHECKING:
    from rich.console import Console

# Messages are worded for Python callers; what they call an argument is an option here.
_FLAG = re.compile(r"\b(force|truncate)=(True|False)")
_DEVICE = re.compile(r"\bdevice=[\"'](\w+)[\"']")
_COLUMNS = re.compile(r"[1-9][0-9]{0,4}")
PIPED_COLUMNS = 120  # where no terminal and no COLUMNS says how wide a line may be


class _LineHandler(logging.Handler):
    """Writes a record as one line, `warning: ...`, to whatever stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = in_options(" ".join(record.getMessage().split()))
            click.echo(f"{record.levelname.lower()}: {visible(message)}", err=True)
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Send the package's warnings to stderr; more than one call changes nothing."""
    logger = logging.getLogger("npu_embed")
    if not any(isinstance(handler, _LineHandler) for handler in logger.handlers):
        logger.addHandler(_LineHandler(logging.WARNING))


def in_options(message: str) -> str:
    """A message with the options in the place of the arguments of the same meaning."""
    named = _FLAG.sub(lambda m: ("--" if m[2] == "True" else "--no-") + m[1], message)
    return _DEVICE.sub(r"--device \1", named)


def replace_unencodable() -> None:
    """Have stdout show "?" for what its encoding has no character for, instead of raising.

    JSON and paths are written as bytes, so nothing that a program reads is changed by it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def visible(text: str, *, keep_lines: bool = False) -> str:
    """The text with what would move a terminal's cursor replaced; files come from strangers."""
    kept = "\n" if keep_lines else ""
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """A text as a table shows it: white space as single spaces, `""` where nothing is left."""
    return visible(" ".join(text.split())) or '""'


def echo_json(value: object) -> None:
    """One line of JSON on stdout, in UTF-8 whatever the locale; no number in it is NaN."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    click.echo(text.encode("utf-8", "backslashreplace"))


def echo_path(path: Path) -> None:
    """A line on stdout with a path, byte for byte as the file system has it."""
    click.echo(os.fsencode(path))


def _finite(value: object) -> object:
    """The value with null for every number JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout or stderr."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this where it has caught it, and would end the program with 1

    stream = sys.stderr if stderr else sys.stdout
    width = _width(is_terminal(stream))
    height = None if width is None else 25  # without one, rich reads COLUMNS all the same
    return _Console(file=stream, width=width, height=height, highlight=False)


def _width(terminal: bool) -> int | None:
    """The columns of a line; None for what COLUMNS or the terminal says, as rich finds it."""
    said = os.environ.get("COLUMNS")
    if said is None:
        return None if terminal else PIPED_COLUMNS
    if _COLUMNS.fullmatch(said):
        return None
    return shutil.get_terminal_size().columns  # where COLUMNS is 0, rich would print nothing


def print_table(
    out: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print a title and a table; columns of integers are set to the right.

    Columns without names are shown without a head.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    body = [tuple(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        integers = bool(body) and all(isinstance(row[index], int) for row in body)
        table.add_column(column, justify="right" if integers else "left", overflow="fold")
    for row in body:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    out.print(Text(visible(title), "bold"))
    out.print(table)
    out.print()
