"""pyxrt.bo: a buffer with a host side and a device side."""

from __future__ import annotations

import errno
import operator
import os
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .enums import bo_flags, xclBOSyncDirection
from .hardware import EmulatedNpu, ShimError, Window
from .pyxrt_device import device, hw_context
from .pyxrt_xclbin import INVALID_ARGUMENT

_TO_DEVICE = 0
_FROM_DEVICE = 1


class bo:
    """A buffer: bo(device, size, flags, group), or a part of one: bo(parent, size, offset)."""

    flags = bo_flags
    normal: ClassVar[bo_flags] = bo_flags.normal
    cacheable: ClassVar[bo_flags] = bo_flags.cacheable
    svm: ClassVar[bo_flags] = bo_flags.svm
    device_only: ClassVar[bo_flags] = bo_flags.device_only
    host_only: ClassVar[bo_flags] = bo_flags.host_only
    p2p: ClassVar[bo_flags] = bo_flags.p2p

    def __init__(self, owner: device | hw_context | bo, size: int, *rest: SupportsIndex) -> None:
        self._parent: bo | None = None
        self._npu: EmulatedNpu | None = None
        if isinstance(owner, bo) and len(rest) == 1:
            self._part_of(owner, operator.index(size), operator.index(rest[0]))
            return
        if isinstance(owner, hw_context) and len(rest) == 1:
            rest = (bo_flags.host_only, rest[0])  # newer spelling: host memory is the default
        if not isinstance(owner, device | hw_context) or len(rest) != 2:
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.bo(arg0: pyxrt.device, arg1: int, arg2: pyxrt.bo.flags, "
                "arg3: int)\n    2. pyxrt.bo(arg0: pyxrt.bo, arg1: int, arg2: int)"
            )
        kind, group = rest
        if not isinstance(kind, bo_flags):
            raise TypeError("__init__(): incompatible constructor arguments: flags is no bo.flags.")
        target = owner if isinstance(owner, device) else owner._device
        self._allocate(target._npu, operator.index(size), kind, operator.index(group))

    def _allocate(self, npu: EmulatedNpu, size: int, kind: bo_flags, group: int) -> None:
        if size < 0:
            raise TypeError(f"__init__(): incompatible constructor arguments: size is {size}.")
        if kind.name == "normal":
            raise RuntimeError(
                f"unsupported buffer type: none flag (err=95): {os.strerror(errno.EOPNOTSUPP)}"
            )
        if kind.name not in ("host_only", "cacheable"):
            raise RuntimeError(f"Bad BO type. (err=22): {INVALID_ARGUMENT}")
        self._in_heap = kind.name == "cacheable"
        self._bank = group & 0xFFFF
        try:
            self._window = npu.allocate(size, self._in_heap)
        except ShimError as error:
            raise RuntimeError(str(error)) from None
        self._npu = npu

    def _part_of(self, parent: bo, size: int, offset: int) -> None:
        if parent._parent is not None:
            raise RuntimeError(
                "emulated NPU: sub-buffer of a sub-buffer; on hardware its host and device "
                "addresses disagree, derive it from the root buffer"
            )
        whole = parent._window
        if size < 1 or offset < 0 or offset + size > whole.size:
            raise RuntimeError(f"sub buffer size and offset: {INVALID_ARGUMENT}")
        self._parent = parent
        self._bank = parent._bank
        self._window = Window(whole.memory, whole.address + offset, offset, size)

    def __del__(self) -> None:
        if getattr(self, "_parent", None) is None and getattr(self, "_npu", None) is not None:
            assert self._npu is not None
            self._npu.free(self._window, self._in_heap)

    def size(self) -> int:
        """Its size in bytes."""
        return self._window.size

    def address(self) -> int:
        """Its device address."""
        return self._window.address

    def map(self) -> memoryview:
        """The host's side as writable bytes; keep the buffer, without it the view dangles."""
        w = self._window
        return memoryview(w.memory.host.data)[w.offset : w.offset + w.size]

    def write(self, data: ArrayLike, seek: int) -> None:
        """Copy a C-contiguous buffer to the host's side at byte `seek`."""
        source = memoryview(data)  # type: ignore[arg-type]
        if not source.c_contiguous:
            raise RuntimeError(
                "emulated NPU: bo.write of a strided array; on hardware the wrong bytes are written"
            )
        seek = operator.index(seek)
        w = self._window
        if seek < 0 or seek + source.nbytes > w.size:
            raise RuntimeError(f"attempting to write past buffer size: {INVALID_ARGUMENT}")
        if source.nbytes:
            start = w.offset + seek
            w.memory.host[start : start + source.nbytes] = np.frombuffer(source, np.uint8)

    def read(self, size: int, skip: int) -> NDArray[np.int8]:
        """A copy of `size` bytes of the host's side from byte `skip`, as int8."""
        size, skip = operator.index(size), operator.index(skip)
        w = self._window
        if size < 0 or skip < 0 or skip + size > w.size:
            raise RuntimeError(f"attempting to read past buffer size: {INVALID_ARGUMENT}")
        start = w.offset + skip
        copied: NDArray[np.int8] = w.memory.host[start : start + size].copy().view(np.int8)
        return copied

    def sync(self, direction: xclBOSyncDirection, *span: int) -> None:
        """Make one side of the buffer current, whole or `size` bytes from byte `offset`."""
        if not isinstance(direction, xclBOSyncDirection) or len(span) not in (0, 2):
            raise TypeError("sync(): incompatible function arguments.")
        w = self._window
        size, offset = (operator.index(s) for s in span) if span else (w.size, 0)
        if size < 0 or offset < 0 or offset + size > w.size:
            if self._parent is not None:
                raise RuntimeError(
                    f"Invalid offset and size when syncing sub buffer: {INVALID_ARGUMENT}"
                )
            raise RuntimeError(
                f"Invalid BO offset and size for sync'ing: {offset}, {size} (err=22): "
                f"{INVALID_ARGUMENT}"
            )
        if int(direction) == _TO_DEVICE:
            w.memory.sync_to_device(w.offset + offset, size)
        elif int(direction) == _FROM_DEVICE:
            w.memory.sync_from_device(w.offset + offset, size)
        else:
            raise RuntimeError(f"Invalid sync direction: {INVALID_ARGUMENT}")
