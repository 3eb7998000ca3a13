"""What the amdxdna driver says of itself: columns, firmware, limit and holders of contexts.

Source: the driver's user interface, include/uapi/drm/amdxdna_accel.h (in Linux since 6.14, and in
AMD's own driver): DRM_IOCTL_AMDXDNA_GET_INFO and the structs it fills.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GET_INFO = 0xC0106447  # _IOWR('d', 0x47, 16 bytes)

AIE_METADATA = 1
HW_CONTEXTS = 5
RESOURCE_INFO = 12

_ARGUMENTS = struct.Struct("=IIQ")  # what, bytes of the answer, where the answer goes
_METADATA = struct.Struct("=IHH")  # bytes of a column, columns, rows; more follows
METADATA_BYTES = 64
_RESOURCES = struct.Struct("=5Q")  # clock, TOPS and tasks at most; TOPS and tasks now
RESOURCE_BYTES = _RESOURCES.size
_CONTEXT = struct.Struct("=IIIIq5Q")  # id, first column, columns, pad, process; counters
CONTEXT_BYTES = _CONTEXT.size
MAX_CONTEXTS = 256  # of all processes


@dataclass(frozen=True, slots=True)
class HeldContext:
    """A hardware context that is held: by which process, in how many columns from which on."""

    pid: int
    first_column: int
    columns: int


def get_info(node: Path, what: int, size: int) -> bytes:
    """What the driver of a device node answers, `size` bytes that were zero before.

    Raises:
        OSError: the node cannot be opened, or the driver does not know the question.
    """
    answer = ctypes.create_string_buffer(size)
    arguments = bytearray(_ARGUMENTS.pack(what, size, ctypes.addressof(answer)))
    fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, GET_INFO, arguments)
    finally:
        os.close(fd)
    return answer.raw


def read_columns(ask: Callable[[int, int], bytes]) -> int:
    """How many columns the array has."""
    return int(_METADATA.unpack_from(ask(AIE_METADATA, METADATA_BYTES))[1])


def read_context_limit(ask: Callable[[int, int], bytes]) -> int:
    """How many contexts there may be, of all processes together."""
    return int(_RESOURCES.unpack_from(ask(RESOURCE_INFO, RESOURCE_BYTES))[2])


def read_contexts(ask: Callable[[int, int], bytes]) -> tuple[HeldContext, ...]:
    """The contexts that are held now.

    How much of the answer was filled is told in two ways by drivers of different age, so it ends
    at the first entry without a process.
    """
    found = []
    for entry in _CONTEXT.iter_unpack(ask(HW_CONTEXTS, MAX_CONTEXTS * CONTEXT_BYTES)):
        _, first_column, columns, _, pid = entry[:5]
        if pid == 0:
            break
        found.append(HeldContext(pid, first_column, columns))
    return tuple(found)
