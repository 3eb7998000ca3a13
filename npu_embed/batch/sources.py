"""The inputs of a job: globs resolved, pipes kept in a file, their rows one after another."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from ..manifest import sha256_file
from .delimited import read_delimited
from .formats import CSV, JSONL, TSV, TXT, input_format
from .lines import read_jsonl, read_txt
from .row import Names, Row
from .tables import read_table

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """An input file; name is what errors call it, path where its bytes are."""

    name: str
    path: Path
    format_name: str

    def rows(self, names: Names) -> Iterator[Row]:
        """Its rows, as they are read.

        Raises:
            InputError: it is no file of its format, or lacks a column.
        """
        if self.format_name == TXT:
            return read_txt(self.path, self.name, names)
        if self.format_name == JSONL:
            return read_jsonl(self.path, self.name, names)
        if self.format_name in (CSV, TSV):
            delimiter = "," if self.format_name == CSV else "\t"
            return read_delimited(self.path, self.name, names, delimiter)
        return read_table(self.path, self.name, names, self.format_name)

    def state(self) -> tuple[int, ...]:
        """What is another number once the file was written or another took its name.

        Programs can set the time of a file's content, but not that of its inode. () where there
        is no file any more.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def all_rows(sources: Iterable[Source], names: Names) -> Iterator[Row]:
    """The rows of all sources, in order."""
    for source in sources:
        yield from source.rows(names)


def content_hash(sources: Sequence[Source]) -> str:
    """The SHA-256 of what the sources hold, in order; their names and times are not in it."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.format_name} {sha256_file(source.path)}\n".encode())
    return digest.hexdigest()


def expand(inputs: Iterable[str], output: Path) -> list[str]:
    """The paths that inputs stand for: globs as the sorted names they match.

    Raises:
        InputError: no such file, a folder, a device, a glob without a match, stdin twice, the
            output.
    """
    paths: list[str] = []
    for name in inputs:
        if name == STDIN and STDIN in paths:
            raise InputError("-: twice, wanted once; stdin can be read only once.")
        if name == STDIN or os.path.lexists(name):
            paths.append(name)
            continue
        found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []
        if not found:
            raise InputError(f"{name}: no such file, wanted an input, a glob, or - for stdin.")
        paths += [path for path in found if not os.path.isdir(path)]
    if not paths:
        raise InputError("no inputs, wanted files, globs, or - for stdin.")
    for path in paths:
        _check_input(path, output)
    return paths


def _check_input(path: str, output: Path) -> None:
    if path == STDIN:
        return
    if os.path.isdir(path):
        raise InputError(f"{path}: a folder, wanted files; pass '{path.rstrip('/')}/*'.")
    if not os.path.exists(path):
        raise InputError(f"{path}: a link to nothing, wanted a file.")
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # /dev/zero has no end
        what = "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise InputError(
            f"{path}: {what}, wanted a regular file or a pipe; copy what is wanted of it to "
            "a file, or pass - and pipe it in."
        )
    if output.exists() and os.path.samefile(path, output):
        raise InputError(f"{path}: is the output too, wanted another file; name the inputs apart.")


def is_regular(path: str) -> bool:
    """Whether an input can be read again: no pipe, no stdin."""
    return path != STDIN and stat.S_ISREG(os.stat(path).st_mode)


def make_source(path: str, format_name: str | None, spooled: Path | None) -> Source:
    """The source of a path; spooled is the file that holds what a pipe gave.

    Raises:
        InputError: the ending does not tell its format.
    """
    name = "stdin" if path == STDIN else path
    if format_name is None:
        format_name = TXT if path == STDIN else input_format(Path(path))
    return Source(name, spooled or Path(path), format_name)


def open_pipe(path: str, stdin: BinaryIO | None) -> AbstractContextManager[BinaryIO]:
    """What an input that can be read only once gives; stdin stays open behind it.

    Raises:
        InputError: stdin is closed.
    """
    if path != STDIN:
        return open(path, "rb")
    if stdin is None:
        raise InputError("stdin: closed, wanted rows; name a file, or < FILE.")
    return nullcontext(stdin)
