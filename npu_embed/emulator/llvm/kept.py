"""Machine code kept from one process to the next: making it takes half a second, reading it none.

It lies in the user's cache folder, as numba's does, named by everything it depends on. Whoever
writes there has this process run what he likes, so it is used only where nobody but this user and
root may write: neither another user's folder nor one that is open to others, no link, no file of
somebody else's. The checksum is no defence against them: it tells damage, and a file that has
another's name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ... import settings

log = logging.getLogger("npu_embed")

FOLDER = "code"
MAX_BYTES = 16 << 20  # of one piece of code, which is some 30 KB

_HERE = Path(__file__).parent
_SHARED_SOURCES = "erf.py", "epilogue_numbers.py"  # what the code takes from elsewhere


def kept(depends_on: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """What make() gives, or what it gave before to one who depended on the same.

    The sources of this package are always depended on.
    """
    key = _key(depends_on)
    folder = _open_folder(settings.cache_dir() / FOLDER)
    if folder is None:
        return make()
    try:
        code = _read(folder, key)
        if code is None:
            code = make()
            _write(folder, key, code)
        return code
    finally:
        os.close(folder)


def sources() -> list[Path]:
    """The files that decide what is compiled, beside what depends_on names."""
    return sorted([*_HERE.glob("*.py"), *(_HERE.parent / name for name in _SHARED_SOURCES)])


def _key(depends_on: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(depends_on).encode())
    for file in sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _name(key: str) -> str:
    return f"{key[:32]}.o"


def _checksum(key: str, code: bytes) -> bytes:
    """Of the code under this key: under another name, it is another's code."""
    return hashlib.sha256(key.encode() + code).digest()


def _open_folder(path: Path) -> int | None:
    """A descriptor of the folder, made if missing; None where nothing is to be kept there.

    Files are opened by it, so that what was looked at and what is used are the same folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o755, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(path, flags)
    except OSError as error:
        log.debug("%s: machine code is not kept: %s", path, error)
        return None
    found = os.fstat(folder)
    if _is_ours(found):
        return folder
    os.close(folder)
    log.warning(
        "%s: mode %03o, owner %d, wanted a folder that only user %d may write to; machine code is "
        "made anew at each start. Remove the folder, or set NPU_EMBED_CACHE to one of your own.",
        *(path, stat.S_IMODE(found.st_mode), found.st_uid, os.geteuid()),
    )
    return None


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user and root could have written to it."""
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(folder: int, key: str) -> bytes | None:
    """The code kept in the folder; None where there is none, or not what was written there."""
    name = _name(key)
    try:
        content = _content(folder, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.debug("%s: %s; made again", name, error)
        return None
    code, checksum = content[:-32], content[-32:]
    if len(content) > MAX_BYTES or _checksum(key, code) != checksum:
        log.debug("%s: not what was written there; made again", name)
        return None
    return code


def _content(folder: int, name: str) -> bytes:
    """What a file of this user's alone holds, up to a byte more than it may.

    Raises:
        OSError: there is none, or it is something else.
    """
    # Not waited for, should it be a FIFO.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not _is_ours(found):
            raise PermissionError("no file of this user's alone")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(MAX_BYTES + 1)
    finally:
        os.close(file)


def _write(folder: int, key: str, code: bytes) -> None:
    """Keep the code, whole or not at all, whoever else writes the same."""
    name, made = _name(key), f".{_name(key)}.{os.urandom(8).hex()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(made, flags, 0o644, dir_fd=folder), "wb") as file:
                file.write(code + _checksum(key, code))
            os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(made, dir_fd=folder)
            raise
    except OSError as error:
        log.debug("%s: machine code is not kept: %s", name, error)
