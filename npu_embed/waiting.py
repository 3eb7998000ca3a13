"""The line in which engines wait for a hardware context, whichever process they are of.

Only an engine that holds no context stands in it, so nobody waits for somebody who waits. An engine
that has run for a while looks whether anybody stands there, and if so gives its contexts up
and stands at the end: first come, first served, so that nobody waits longer than the turns of
those before it take, and nobody starves. Programs that are not of this package know nothing of
the line; they are only waited for.

A place in the line is one byte of a lock file, at the time of arrival, held with a POSIX record
lock: the kernel drops it the moment its process ends, SIGKILL included, and a forked child does
not inherit it. Such locks belong to a process, so its own places are kept in a set beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .emulator.slots import lock_holder, open_shared

log = logging.getLogger("npu_embed")

LINE = "line"


class Line:
    """The line of an NPU, whose file lies in `folder`.

    Where the file cannot be used, it is a line of this process only.
    """

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = None
        try:
            # Never closed: closing any descriptor of the file would drop all its locks.
            self._fd = open_shared(folder, LINE)
        except OSError as error:
            log.info("%s: not usable, taking no turns with other processes: %s", folder, error)
        self._mine: set[int] = set()
        self._pid = os.getpid()

    def _places(self) -> tuple[int, ...]:
        """The places of this process; after a fork those in the set are the parent's."""
        if self._pid != os.getpid():
            self._pid, self._mine = os.getpid(), set()
        return tuple(self._mine)  # a copy: other threads come and go

    @contextlib.contextmanager
    def stand(self) -> Iterator[int]:
        """Stand in line, at the place that is handed out."""
        place = time.monotonic_ns()
        while place in self._places() or not self._lock(place):
            place += 1
        self._mine.add(place)
        try:
            yield place
        finally:
            self._mine.discard(place)
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, place)

    def _lock(self, place: int) -> bool:
        if self._fd is not None:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):
                return False
        return True

    def anyone(self, before: int = 0) -> bool:
        """Whether anybody stands in line, before this place if one is given."""
        if any(not before or place < before for place in self._places()):
            return True
        return self._fd is not None and lock_holder(self._fd, 0, before) is not None


_lines: dict[Path, Line] = {}


def line(folder: Path) -> Line:
    """The line whose file lies in `folder`, one object a process."""
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    if folder not in _lines:
        _lines.setdefault(folder, Line(folder))
    return _lines[folder]
