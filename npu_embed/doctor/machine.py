"""The machine as the doctor sees it: files below a root, and probes that a test can replace."""

from __future__ import annotations

import contextlib
import grp
import os
import platform
import pwd
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .ioctls import get_info
from .probe import PyxrtProbe, probe_pyxrt

MAX_FILE_BYTES = 4 << 20
KERNEL_LOG_TIMEOUT_S = 5

# (node, what is asked for, bytes of the answer) -> the answer; raises OSError.
Query: TypeAlias = Callable[[Path, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may use a device node: owner, group, and the mode's permission bits."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class Group:
    """A group of users and the names of its members, as far as they are listed."""

    name: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything the doctor reads.

    root: system files are read below it. kernel: its release. memlock: the soft and the hard limit
    of locked memory in bytes, None where there is none. pyxrt: what an import of pyxrt in another
    process gave.
    """

    root: Path
    kernel: str
    environ: Mapping[str, str]
    user: str
    groups: frozenset[int]
    memlock: tuple[int | None, int | None]
    python: tuple[int, int]
    import_path: tuple[Path, ...]
    usable: Callable[[Path], bool]
    owner: Callable[[Path], Owner]
    group: Callable[[int], Group]
    query: Query
    kernel_log: Callable[[], str | None]
    pyxrt: Callable[[], PyxrtProbe]

    def path(self, absolute: str) -> Path:
        """A file of the system, below the root."""
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """What a small text file holds, without white space around it; None if it cannot be read.

        Of a longer one the beginning.
        """
        return read_text(self.path(absolute))

    def process(self, pid: int) -> str:
        """A process for people: `npu-embed serve (4711)`."""
        raw = read_text(self.path(f"/proc/{pid}/cmdline")) or ""
        words = [word for word in raw.split("\0") if word]
        name = " ".join([Path(words[0]).name, *words[1:4]]) if words else ""
        name = name or self.text(f"/proc/{pid}/comm") or "not visible from here"
        return f"{name[:60]} ({pid})"


def read_text(path: Path) -> str | None:
    """What a small text file holds, stripped; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def this_machine() -> Machine:
    """The machine this process runs on."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container that is run with a bare user id
        user = str(os.getuid())
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return Machine(
        root=Path("/"),
        kernel=platform.release(),
        environ=os.environ,
        user=user,
        groups=frozenset((*os.getgroups(), os.getegid())),
        memlock=(soft, hard),
        python=sys.version_info[:2],
        import_path=tuple(Path(folder or ".") for folder in sys.path),
        usable=lambda path: os.access(path, os.R_OK | os.W_OK),
        owner=_owner,
        group=_group,
        query=get_info,
        kernel_log=_kernel_log,
        pyxrt=probe_pyxrt,
    )


def _owner(path: Path) -> Owner:
    found = path.stat()
    return Owner(found.st_uid, found.st_gid, found.st_mode & 0o777)


def _group(gid: int) -> Group:
    try:
        found = grp.getgrgid(gid)
    except KeyError:
        return Group(str(gid))
    return Group(found.gr_name, tuple(found.gr_mem))


def _kernel_log() -> str | None:
    """The kernel's messages since boot, None where this user may not read them."""
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=KERNEL_LOG_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0 and done.stdout:
                return done.stdout.decode("utf-8", "replace")
    return None
