"""The kernel's permission to use tile registers: a process has to ask, since they make it larger.

Source: Linux' Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

_SYS_ARCH_PRCTL = 158  # of x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def granted() -> bool:
    """Whether this process, its threads and its forks may use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
