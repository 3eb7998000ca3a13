"""The work folder beside an output: OUTPUT.partial, which one process at a time works in."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import filelock

from ..errors import InputError, OutputError

log = logging.getLogger("npu_embed")

SUFFIX = ".partial"
_JOB, _LOCK = "job.json", "lock"
# Everything that is ever written here, so that nothing else is ever removed.
_SHARDS = "shard-*.safetensors"
_OURS = (_SHARDS, "shard.tmp", "spool-*", "output*", f"{_JOB}*")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says where a file cannot be written, as an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: {error.strerror or error}, wanted to write it; make room or give access. "
            "What is finished is kept: the same command goes on with it."
        ) from error


def new_file(path: Path) -> BinaryIO:
    """A file that is made now, in the place of one that may be left; no link is ever followed.

    Others may write to the folder: a name that one of them puts a link behind, even between the
    two steps here, is an error.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlive the machine's power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or, after a kill, not at all.

    Raises:
        OutputError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        with new_file(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


class WorkFolder:
    """An output's work folder, locked by this process; make one with `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def locked(cls, output: Path) -> Iterator[WorkFolder]:
        """The work folder of an output, made if need be.

        Raises:
            InputError: another process works in it; it is a link, or has one in it.
            OutputError: it cannot be made.
        """
        path = output.with_name(f"{output.name}{SUFFIX}")
        if not output.parent.is_dir():
            raise OutputError(f"{output.parent}: no such folder, wanted one; make it first.")
        lock = _lock(output, path)
        work = cls(path)
        try:
            _check_no_links(path)
        except BaseException:  # and nothing is touched
            (path / _LOCK).unlink(missing_ok=True)
            lock.release()
            raise
        try:
            yield work
        finally:
            if work.job() is None:  # nothing was begun: a pipe's copy is of no use
                work.clear()
            # Before the release: whoever gets a lock on a removed file sees that it is not there.
            (path / _LOCK).unlink(missing_ok=True)
            if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()
            lock.release()

    def job(self) -> dict[str, str] | None:
        """The job that was begun here, None where there is none."""
        try:
            found = json.loads((self.path / _JOB).read_bytes())
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError):
            return None

    def begin(self, job: Mapping[str, str]) -> None:
        """Note which job is done here; shards without a note are of who knows which, and go.

        Raises:
            OutputError: it cannot be written.
        """
        if self.job() is None:
            self._remove(_SHARDS)
        write_whole(self.path / _JOB, json.dumps(dict(job), indent=1).encode())

    def has_shards(self) -> bool:
        """Whether any shard is finished."""
        return any(self.path.glob(_SHARDS))

    def clear(self) -> None:
        """Remove what a job left here, the job's own note last; files of others stay."""
        for pattern in _OURS:
            self._remove(pattern)

    def _remove(self, pattern: str) -> None:
        with writing(self.path):
            for left in sorted(self.path.glob(pattern)):
                left.unlink()


def _check_no_links(folder: Path) -> None:
    """Check that nothing in a work folder leads elsewhere: no job puts a link there.

    Raises:
        InputError: something does.
    """
    with writing(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise _link_error(folder / entry.name)


def _link_error(path: Path) -> InputError:
    return InputError(
        f"{path}: a link, wanted none, since what is written behind it may be anybody's; remove "
        "it, or name another output."
    )


def _lock(output: Path, folder: Path) -> filelock.BaseFileLock:
    """The lock of a work folder, taken, both made if need be."""
    file = folder / _LOCK
    while True:
        lock = filelock.FileLock(file)
        with writing(folder):
            try:
                if folder.is_symlink():
                    raise _link_error(folder)
                folder.mkdir(exist_ok=True)
                if file.is_symlink():
                    raise _link_error(file)
                os.close(
                    os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                )
                before = file.stat().st_ino
                lock.acquire(timeout=0)
                if file.stat().st_ino == before:
                    return lock
            except filelock.Timeout as error:
                raise InputError(
                    f"{output}: another process is writing it, wanted one at a time; wait for its "
                    "end, or name another output."
                ) from error
            except FileNotFoundError:  # another process has just finished and removed it
                if not output.parent.is_dir():
                    raise
        lock.release()
