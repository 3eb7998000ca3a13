"""Device addresses: where a buffer lies in the device heap, or in host memory mapped for it."""

from __future__ import annotations

import bisect


class Heap:
    """First-fit addresses of the device heap, or of host memory mapped for the device."""

    def __init__(self, base: int, limit_bytes: int | None, alignment_bytes: int) -> None:
        self._base, self._limit, self._alignment = base, limit_bytes, alignment_bytes
        self._taken: list[tuple[int, int]] = []  # (start, end), sorted

    def take(self, size: int) -> int | None:
        """The address of a free range, or None if the heap is full."""
        start = self._base
        for low, high in self._taken:
            if low - start >= size:
                break
            start = -(-high // self._alignment) * self._alignment
        if self._limit is not None and start + size > self._base + self._limit:
            return None
        bisect.insort(self._taken, (start, start + size))
        return start

    def give_back(self, address: int) -> None:
        """Free the range that starts at address."""
        at = bisect.bisect_left(self._taken, (address, 0))
        if at < len(self._taken) and self._taken[at][0] == address:
            del self._taken[at]
