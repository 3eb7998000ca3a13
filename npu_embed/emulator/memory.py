"""Buffer memory as two sides, host and device, that agree only after a sync.

On a non-coherent NPU a host write sits in the CPU's cache until it is flushed, and a device write
is invisible behind a stale cache line until that is dropped. Neither is certain, which is why
the bug survives testing. Here it is certain:

strict   device memory that was never synced is poison (0xFF: a NaN in bf16 and in float32), and
so is the
         host's side of what the device wrote, until the sync from the device.
loose    before each run, random 64-byte lines do what a real cache may do at any time: dirty
ones are
         written back to the device, clean ones are dropped and read anew.
"""

from __future__ import annotations

import mmap
import random

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

POISON = 0xFF
LINE_BYTES = 64
PAGE_BYTES = 4096


def _pages(size_bytes: int) -> U8:
    """size_bytes zeroed bytes on a page boundary."""
    return np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=np.uint8)[:size_bytes]


class Memory:
    """The two sides of one allocation; `version` grows whenever the device's side changes.

    `derived` is for whoever computes something from the device's side and wants it kept as long
    as the allocation lives: key -> (version it was computed from, value).

    `stale_lines`: byte offset of a cache line -> what the host goes on seeing there at the next
    sync from the device, by a planned fault.
    """

    __slots__ = (
        "_loose",
        "_seen",
        "_stale_views",
        "derived",
        "device",
        "elements",
        "host",
        "size",
        "stale_lines",
        "version",
    )

    def __init__(self, size_bytes: int, loose: random.Random | None) -> None:
        self.size = size_bytes
        self.host = _pages(size_bytes)
        self.device = _pages(size_bytes)
        self.elements = self.device[: size_bytes // 2 * 2].view(np.uint16)  # the same, as bf16
        self.version = 0
        self.derived: dict[object, tuple[int, object]] = {}
        self.stale_lines: dict[int, bytes] = {}
        self._loose = loose
        self._stale_views: set[tuple[object, ...]] = set()
        # loose: the host's bytes when last in step with memory, to tell dirty lines from clean.
        self._seen = self.host.copy() if loose is not None else None
        if loose is None:
            self.device[:] = POISON

    @staticmethod
    def _lines(offset: int, size: int, limit: int) -> slice:
        """The range widened to whole cache lines: CLFLUSH knows nothing smaller."""
        start = offset // LINE_BYTES * LINE_BYTES
        stop = min(limit, -(-(offset + size) // LINE_BYTES) * LINE_BYTES)
        return slice(start, stop)

    def sync_to_device(self, offset: int, size: int) -> None:
        """Make the device see the host's bytes, whatever the device wrote there before."""
        lines = self._lines(offset, size, self.size)
        self.device[lines] = self.host[lines]
        self.version += 1
        self._in_step(lines)

    def sync_from_device(self, offset: int, size: int) -> None:
        """Make the host see the device's bytes, whatever the host wrote there before."""
        lines = self._lines(offset, size, self.size)
        self.host[lines] = self.device[lines]
        if self.stale_lines:
            for line in [at for at in self.stale_lines if lines.start <= at < lines.stop]:
                before = np.frombuffer(self.stale_lines.pop(line), np.uint8)
                self.host[line : line + len(before)] = before
        self._in_step(lines)

    def _in_step(self, lines: slice) -> None:
        self._stale_views.clear()
        if self._seen is not None:
            self._seen[lines] = self.host[lines]

    def device_wrote(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        """The device wrote a view (offset and strides in bytes): the host's copy is stale."""
        self.version += 1
        if self._loose is not None:
            return
        key = (offset, shape, strides)
        if key in self._stale_views:
            return  # poisoned already and not synced since
        self._stale_views.add(key)
        dtype, poison = (np.uint16, 0xFFFF) if itemsize == 2 else (np.uint32, 0xFFFFFFFF)
        np.ndarray(shape, dtype, self.host, offset, strides).fill(poison)

    def evict_lines(self) -> None:
        """Loose mode: let a random half of the cache lines do what a cache may do at any time."""
        if self._loose is None or self._seen is None or self.size == 0:
            return
        whole = self.size // LINE_BYTES * LINE_BYTES
        for start, stop in ((0, whole), (whole, self.size)):
            if stop == start:
                continue
            width = LINE_BYTES if start == 0 else stop - start
            host = self.host[start:stop].reshape(-1, width)
            seen = self._seen[start:stop].reshape(-1, width)
            device = self.device[start:stop].reshape(-1, width)
            moved = np.frombuffer(self._loose.randbytes(len(host)), np.uint8) < 128
            dirty = (host != seen).any(axis=1)
            written_back = moved & dirty
            if written_back.any():
                device[written_back] = host[written_back]
                self.version += 1
            dropped = moved & ~dirty
            host[dropped] = device[dropped]
            seen[moved] = host[moved]
