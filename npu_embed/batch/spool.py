"""Pipes kept in a file, since an unfinished job must be able to read them again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from ..manifest import sha256_file
from .folder import WorkFolder, new_file, writing
from .formats import TABLES
from .lines import MAX_LINE_BYTES
from .sources import STDIN, Source, is_regular, make_source, open_pipe

MAX_LINELESS_BYTES = 16 * MAX_LINE_BYTES  # of a pipe: what goes on so is no file of lines
_BLOCK_BYTES = 1 << 20


def spooled_sources(
    paths: Sequence[str], input_format: str | None, work: WorkFolder, stdin: BinaryIO | None
) -> list[Source]:
    """The sources of paths; what can be read only once is copied into the work folder first.

    Raises:
        InputError: a format is unknown; a pipe gives something else than in the run that is
            taken up again, or goes on and on without the end of a line.
        OutputError: there is no room for the copy.
    """
    sources = []
    for index, path in enumerate(paths):
        copy = None if is_regular(path) else work.path / f"spool-{index}"
        source = make_source(path, input_format, copy)
        if copy is not None:
            _spool(source, path, copy, stdin)
        sources.append(source)
    return sources


def _spool(source: Source, path: str, copy: Path, stdin: BinaryIO | None) -> None:
    """Copy what a pipe gives; a copy that is there already stands for a pipe that is empty."""
    name = source.name
    if copy.is_file() and path == STDIN and (stdin is None or stdin.isatty()):
        return
    temporary = copy.with_name(f"{copy.name}.tmp")
    with open_pipe(path, stdin) as pipe, writing(copy):
        try:
            with new_file(temporary) as file:
                if source.format_name in TABLES:
                    shutil.copyfileobj(pipe, file, _BLOCK_BYTES)
                else:
                    _copy_lines(pipe, file, name)
        except InputError:
            temporary.unlink()
            raise
    if not copy.is_file():
        temporary.replace(copy)
    elif temporary.stat().st_size:
        if sha256_file(temporary) != sha256_file(copy):
            temporary.unlink()
            raise InputError(
                f"{name}: gives something else than in the unfinished run {copy.parent}, wanted "
                "the same; pass --restart to begin anew."
            )
        temporary.unlink()


def _copy_lines(pipe: BinaryIO, file: BinaryIO, name: str) -> None:
    """Copy a pipe of lines.

    Raises:
        InputError: one has no end, as where /dev/zero is read: the disk would be full of it.
    """
    line_bytes = 0
    while block := pipe.read(_BLOCK_BYTES):
        file.write(block)
        end = block.rfind(b"\n")
        line_bytes = line_bytes + len(block) if end < 0 else len(block) - end - 1
        if line_bytes > MAX_LINELESS_BYTES:
            raise InputError(
                f"{name}: {line_bytes} bytes without the end of a line, wanted lines of at most "
                f"{MAX_LINE_BYTES}; say what it is with --input-format, or name a regular file."
            )
