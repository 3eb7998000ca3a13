"""Machine code kept from one process to the next: making it takes half a second, reading it none.

It lies in the user's cache folder, as numba's does, named by everything it depends on. Whoever
may write there may have this process run what he likes; see docs/security.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ... import settings

log = logging.getLogger("npu_embed")

FOLDER = "code"


def kept(depends_on: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """What make() gives, or what it gave before to one who depended on the same.

    The sources of this package are always depended on.
    """
    digest = hashlib.sha256("\0".join(depends_on).encode())
    here = Path(__file__).parent
    for file in sorted([*here.glob("*.py"), here.parent / "erf.py"]):
        digest.update(file.read_bytes())
    folder = settings.cache_dir() / FOLDER
    file = folder / f"{digest.hexdigest()[:32]}.o"
    try:
        found = file.read_bytes()
        code, checksum = found[:-32], found[-32:]
        if hashlib.sha256(code).digest() == checksum:
            return code
        log.debug("%s: not what was written there; made again", file)
    except OSError:
        pass  # none yet
    code = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
            made.write(code + hashlib.sha256(code).digest())
        os.replace(made.name, file)
    except OSError as error:
        log.debug("%s: machine code is not kept: %s", folder, error)
    return code
