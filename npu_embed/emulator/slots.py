"""Hardware-context slots, shared by every process of the machine.

A slot is one byte of a lock file, held with a POSIX record lock: the kernel drops it the moment
its process ends, SIGKILL included, and a forked child does not inherit it. The file's first bytes
also name the context that ran last, so that a switch between processes costs a context its tile
memory as one within a process does.

Record locks belong to a process, not to a file descriptor, so one descriptor a process is opened
and never closed, and the slots this process holds itself are noted beside it. Where a cleaner of
temporary files has removed the table, the next slot is taken in the new one that others use by
then; the old descriptor stays open while slots are held through it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

NAME = "slots"
FILE_BYTES = 4096
LAST_RUNNER_OFFSET = 0  # u64 pid, u64 context serial
FIRST_SLOT_OFFSET = 1024
MAX_SLOTS = FILE_BYTES - FIRST_SLOT_OFFSET

_RUNNER = struct.Struct("=QQ")
# struct flock of Linux on 64-bit machines: short l_type, short l_whence, off_t start, off_t len,
# pid_t
_FLOCK = struct.Struct("hhqqi")


def open_shared(folder: Path, name: str) -> int:
    """A descriptor of a lock file in a folder, both made if missing; any user may share them.

    Raises:
        OSError: they cannot be made or used, or something else is in their place.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise OSError(f"{folder} is not a folder; set NPU_EMBED_EMU_DIR to one you own")
    path = folder / name
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # made by another user in the meantime
            os.fchmod(fd, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file; set NPU_EMBED_EMU_DIR to a folder you own")
    if os.fstat(fd).st_size < FILE_BYTES:
        os.ftruncate(fd, FILE_BYTES)
    return fd


def lock_holder(fd: int, start: int, size: int) -> int | None:
    """A process that holds a record lock within a range; size 0 reaches to infinity.

    None if nobody does: this process's own locks are not seen.
    """
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
    lock_type, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request)[: _FLOCK.size])
    return None if lock_type == fcntl.F_UNLCK else int(pid)


class SlotTable:
    """The slots of the emulated NPU whose table lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Reentrant: the garbage collector may free a context while this thread takes a slot.
        self._lock = threading.RLock()
        self._fd = open_shared(folder, NAME)
        self._held: dict[int, int] = {}  # slot -> the descriptor it is held through
        self._pid = os.getpid()

    def unlock_after_fork(self) -> None:
        """Make the table usable in a forked child, whose other threads are gone."""
        self._lock = threading.RLock()

    def _forget_the_parents(self) -> None:
        """After a fork the noted slots are the parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._held = {}

    def _follow_the_file(self) -> None:
        """Move to the file that now has the table's name, if that is another."""
        ours = os.fstat(self._fd)
        try:
            found = os.lstat(self._folder / NAME)
            same = (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
        except FileNotFoundError:
            same = False
        if same:
            return
        before, self._fd = self._fd, open_shared(self._folder, NAME)
        if before not in self._held.values():
            os.close(before)

    def acquire(self, limit: int) -> int | None:
        """A free slot below `limit`, now held by this process; None if there is none.

        Raises:
            OSError: the table was removed and cannot be made again.
        """
        with self._lock:
            self._forget_the_parents()
            self._follow_the_file()
            for slot in range(min(limit, MAX_SLOTS)):
                if slot in self._held:
                    continue
                try:
                    fcntl.lockf(
                        self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, FIRST_SLOT_OFFSET + slot
                    )
                except (BlockingIOError, PermissionError):
                    continue
                self._held[slot] = self._fd
                return slot
            return None

    def release(self, slot: int) -> None:
        """Free a slot of this process; a slot it does not hold is left alone."""
        with self._lock:
            self._forget_the_parents()
            if slot in self._held:
                fd = self._held.pop(slot)
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, FIRST_SLOT_OFFSET + slot)
                if fd != self._fd and fd not in self._held.values():
                    os.close(fd)

    def holders(self, limit: int) -> dict[int, int]:
        """Slot -> process id of whoever holds it, for every taken slot below `limit`."""
        with self._lock:
            self._forget_the_parents()
            found = dict.fromkeys(sorted(s for s in self._held if s < limit), os.getpid())
            for slot in range(min(limit, MAX_SLOTS)):
                if slot in found:
                    continue
                pid = lock_holder(self._fd, FIRST_SLOT_OFFSET + slot, 1)
                if pid is not None:
                    found[slot] = pid
            return dict(sorted(found.items()))

    def take_the_array(self, context_serial: int) -> bool:
        """Note that this process's context runs now; True if another one ran last."""
        mine = _RUNNER.pack(os.getpid(), context_serial)
        # Not mapped: where another process cuts the file short, a mapped page is a bus error.
        with self._lock:
            if os.pread(self._fd, _RUNNER.size, LAST_RUNNER_OFFSET) == mine:
                return False
            os.pwrite(self._fd, mine, LAST_RUNNER_OFFSET)
            return True


_tables: dict[Path, SlotTable] = {}
_tables_lock = threading.RLock()


def table(folder: Path) -> SlotTable:
    """The slot table in `folder`; one object a process, however the folder is spelled.

    Raises:
        OSError: the folder or the table in it cannot be made or used.
    """
    # The folder's own name is not followed: it must not be a symbolic link.
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    with _tables_lock:
        if folder not in _tables:
            _tables[folder] = SlotTable(folder)
        return _tables[folder]


def _unlock_after_fork() -> None:
    """In a forked child: a lock that another thread of the parent held would never be freed."""
    global _tables_lock
    _tables_lock = threading.RLock()
    for known in _tables.values():
        known.unlock_after_fork()


os.register_at_fork(after_in_child=_unlock_after_fork)
