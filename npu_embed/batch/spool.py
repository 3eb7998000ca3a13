"""Pipes kept in a file, since an unfinished job must be able to read them again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from ..manifest import sha256_file
from .folder import WorkFolder, writing
from .sources import STDIN, Source, is_regular, make_source, open_pipe


def spooled_sources(
    paths: Sequence[str], input_format: str | None, work: WorkFolder, stdin: BinaryIO | None
) -> list[Source]:
    """The sources of paths; what can be read only once is copied into the work folder first.

    Raises:
        InputError: a format is unknown; a pipe gives something else than in the run that is
            taken up again.
        OutputError: there is no room for the copy.
    """
    sources = []
    for index, path in enumerate(paths):
        copy = None if is_regular(path) else _spool(path, work.path / f"spool-{index}", stdin)
        sources.append(make_source(path, input_format, copy))
    return sources


def _spool(path: str, copy: Path, stdin: BinaryIO | None) -> Path:
    """The copy of what a pipe gives; one that is there already stands for a pipe that is empty."""
    name = "stdin" if path == STDIN else path
    if copy.is_file() and path == STDIN and (stdin is None or stdin.isatty()):
        return copy
    temporary = copy.with_name(f"{copy.name}.tmp")
    with open_pipe(path, stdin) as pipe, writing(copy):
        with temporary.open("wb") as file:
            shutil.copyfileobj(pipe, file, 1 << 20)
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
    return copy
