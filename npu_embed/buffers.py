"""Buffer: device memory and its host side; View: a part of it as a kernel's argument."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from .driver import Driver, Xrt
from .errors import DeviceError

MAX_CACHED_VIEWS = 2048  # of one buffer

_ids = itertools.count(1)


class View:
    """A part of a buffer, to be a kernel's argument."""

    __slots__ = ("bo", "id", "offset", "size")

    def __init__(self, bo: Xrt, offset: int, size: int) -> None:
        self.bo = bo
        self.offset = offset
        self.size = size
        self.id = next(_ids)


class Buffer:
    """Device memory and its host side.

    host is uint8 [size] over the mapping: write it, then to_device; from_device, then read it. A
    buffer the device has written must not be synced to the device, which would destroy the
    results.
    """

    def __init__(self, driver: Driver, bo: Xrt, size_bytes: int) -> None:
        self.size = size_bytes
        self.host: NDArray[np.uint8] = np.frombuffer(bo.map(), dtype=np.uint8)[:size_bytes]
        self._driver = driver
        self._bo = bo
        self._views: OrderedDict[tuple[int, int], View] = OrderedDict()

    def view(self, offset: int, size: int) -> View:
        """The bytes [offset, offset + size) as an argument; the same object each time.

        Raises:
            ValueError: it leaves the buffer.
        """
        key = (offset, size)
        found = self._views.get(key)
        if found is not None:
            self._views.move_to_end(key)
            return found
        if offset < 0 or size < 1 or offset + size > self.size:
            raise ValueError(
                f"view [{offset}, {offset + size}) of a buffer of {self.size} bytes leaves it"
            )
        whole = offset == 0 and size == self.size
        # Always of the root: a sub-buffer of a sub-buffer has wrong addresses on hardware.
        bo = self._bo if whole else self._driver.xrt.bo(self._bo, size, offset)
        if len(self._views) >= MAX_CACHED_VIEWS:
            self._views.popitem(last=False)
        view = self._views[key] = View(bo, offset, size)
        return view

    def to_device(self, offset: int, size: int) -> None:
        """Make the device see the host's bytes of a range.

        Raises:
            DeviceError: the driver refuses, as when the device is gone.
        """
        self._sync("XCL_BO_SYNC_BO_TO_DEVICE", offset, size)
        self._driver.counters.bytes_to_device += size

    def from_device(self, offset: int, size: int) -> None:
        """Make the host see the device's bytes of a range.

        Raises:
            DeviceError: the driver refuses, as when the device is gone.
        """
        self._sync("XCL_BO_SYNC_BO_FROM_DEVICE", offset, size)
        self._driver.counters.bytes_from_device += size

    def _sync(self, direction: str, offset: int, size: int) -> None:
        try:
            self._bo.sync(getattr(self._driver.xrt.xclBOSyncDirection, direction), size, offset)
        except RuntimeError as error:
            raise DeviceError(
                f"buffer of {self.size} bytes: bytes {offset} to {offset + size} not synced; see "
                f"the driver's log (`dmesg`). XRT said: {error}"
            ) from error
        self._driver.counters.syncs += 1
