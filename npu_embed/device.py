"""Session and Context: the one seam between the engine and a device.

Everything here works over any module with pyxrt's API, the system's pyxrt or the emulated one,
with the calls every pyxrt from XRT 2.16 on has, positionally. Above this file nothing knows
which of the two it is. Its parts are in driver, buffers and kernels.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from . import events, seeing, settings
from .buffers import Buffer, View
from .containers import ArgumentLayout, argument_layout
from .driver import Counters, Driver, Xrt, emulated_pyxrt, system_pyxrt
from .emulator import slots
from .errors import BundleError, DeviceError, NoFreeContext
from .kernels import Kernel
from .runlists import Launch, RunList

__all__ = ["Buffer", "Context", "Counters", "Kernel", "Session", "View"]

log = logging.getLogger("npu_embed")

HOST_GROUP = 0  # bank 0 (HOST) and no context: a data buffer may outlive any context

# Creation errors that mean "no slot now": by driver and firmware it is any of these, and the
# shim has printed them with either sign.
_NO_SLOT = {errno.ENOENT, errno.EINVAL, errno.ENODEV, errno.ENOSPC, errno.EBUSY}
_CREATE_FAILED = re.compile(r"CREATE_HWCTX IOCTL failed \(err=(-?\d+)\)")

# What get_info(name) says -> the generation a bundle's `target` names.
_GENERATIONS = {"npu1": ("phoenix", "hawk", "npu1"), "npu2": ("strix", "krackan", "npu2")}
_CONTEXTS = {"npu1": 6, "npu2": 16}  # hardware contexts of a generation
_COLUMNS = {"npu1": 4, "npu2": 8}

_said: set[str] = set()


class Session:
    """An opened NPU, real or emulated; the owner of every buffer and context.

    kind is "npu" or "emulated"; generation is "npu1", "npu2" or None where the device's name is
    unknown.
    """

    def __init__(self, kind: Literal["npu", "emulated"], xrt: Xrt) -> None:
        self.kind = kind
        self.driver = Driver(xrt, settings.timeout_ms())
        try:
            self.device = xrt.device(0)
            self.device_name = str(self.device.get_info(xrt.xrt_info_device.name))
        except RuntimeError as error:
            raise DeviceError(
                f"device 0: could not be opened, wanted an NPU; run `xrt-smi examine` to see what "
                f"is wrong. XRT said: {error}"
            ) from error
        name = self.device_name.lower()
        self.generation = next(
            (g for g, words in _GENERATIONS.items() if any(w in name for w in words)), None
        )

    @property
    def counters(self) -> Counters:
        """What was done since it was opened; live."""
        return self.driver.counters

    @classmethod
    def open(cls, device: str | None = None, *, array_programs: bool = False) -> Session:
        """The NPU, or the emulated one.

        device: "npu" fails rather than emulate, "emulated" emulates, "auto" takes the NPU if
        there is one and else says in one line that it emulates and why; None is what
        NPU_EMBED_DEVICE says. array_programs: the kernels to run are array programs, which only
        the emulated NPU can run.

        Raises:
            SettingError: no such device name.
            DeviceError: device "npu" without a usable NPU.
        """
        if device is None:
            device = settings.device()
        settings.check_choice("device", "device", device, settings.DEVICES)
        seeing.start_from_settings()
        if device == "emulated":
            return cls("emulated", emulated_pyxrt())
        if array_programs:
            reason = "the bundle's kernels are array programs, which no hardware can run"
            if device == "npu":
                raise DeviceError(
                    f'device="npu": {reason}, wanted kernels compiled for the NPU; use '
                    'device="emulated" or a bundle with compiled kernels.'
                )
            return cls._emulate(reason)
        try:
            return cls("npu", system_pyxrt())
        except DeviceError as error:
            if device == "npu":
                raise
            return cls._emulate(str(error))

    @classmethod
    def _emulate(cls, reason: str) -> Session:
        """The emulated NPU, said once a process and reason."""
        if reason not in _said:
            _said.add(reason)
            log.warning("running on the emulated NPU: %s", reason.rstrip("."))
        return cls("emulated", emulated_pyxrt())

    def buffer(self, size_bytes: int) -> Buffer:
        """A new data buffer, zero on both sides.

        Raises:
            DeviceError: the device has no memory left for it.
        """
        xrt = self.driver.xrt
        try:
            bo = xrt.bo(self.device, size_bytes, xrt.bo.host_only, HOST_GROUP)
        except (RuntimeError, MemoryError, OSError) as error:
            raise DeviceError(
                f"buffer of {size_bytes} bytes: not allocated; check `ulimit -l` (wanted: "
                f"unlimited). XRT said: {error}"
            ) from error
        buffer = Buffer(self.driver, bo, size_bytes)
        buffer.host[:] = 0
        buffer.to_device(0, size_bytes)
        return buffer

    def context(self, path: Path, kernel_name: str) -> Context:
        """A new hardware context for the xclbin at `path`.

        Raises:
            BundleError: the file is missing, no xclbin, for another NPU, or has no such kernel.
            NoFreeContext: every hardware context is taken.
            DeviceError: the device is gone, or any other failure to create it.
        """
        begin = perf_counter()
        layout = argument_layout(path, kernel_name, _COLUMNS.get(self.generation or ""))
        xrt = self.driver.xrt
        try:
            container = xrt.xclbin(str(path))
            identity = self.device.register_xclbin(container)
        except RuntimeError as error:
            raise BundleError(
                f"{path.name}: not accepted as an xclbin; re-export the bundle. XRT said: {error}"
            ) from error
        try:
            hw_context = xrt.hw_context(self.device, container.get_uuid())
        except RuntimeError as error:
            found = _CREATE_FAILED.search(str(error))
            if found and abs(int(found[1])) == errno.ENODEV:
                self._check_there(path.name, error)
            if found and abs(int(found[1])) in _NO_SLOT:
                raise NoFreeContext(str(error)) from error
            raise DeviceError(
                f"{path.name}: no hardware context could be created; see XRT's words and `dmesg`. "
                f"XRT said: {error}"
            ) from error
        try:
            kernel = xrt.kernel(hw_context, kernel_name)
        except RuntimeError as error:
            raise BundleError(
                f"{path.name}: no kernel {kernel_name}, wanted it; re-export the bundle. "
                f"XRT said: {error}"
            ) from error
        del identity
        if events.listeners:
            events.note(events.ContextMade(path.name, begin, perf_counter()))
        return Context(self, path, hw_context, kernel, layout)

    def _check_there(self, where: str, error: RuntimeError) -> None:
        """ENODEV is said of an array without a free column, and of a device that is no more."""
        try:
            self.device.get_info(self.driver.xrt.xrt_info_device.name)
        except RuntimeError:
            raise DeviceError(
                f"{where}: the device is gone, wanted {self.device_name}; see `dmesg`, reload the "
                f"driver or restart the machine, then open another Embedder. XRT said: {error}"
            ) from error

    @property
    def has_runlists(self) -> bool:
        """Whether this pyxrt has runlists: since XRT 2.20."""
        return hasattr(self.driver.xrt, "runlist")

    @property
    def context_limit(self) -> int | None:
        """How many hardware contexts the NPU has for all processes together, None if unknown."""
        limit = _CONTEXTS.get(self.generation or "")
        if limit is None or self.kind != "emulated":
            return limit
        return settings.emulator_slots(limit)

    @property
    def lock_folder(self) -> Path:
        """Where engines of all processes on this NPU meet to take turns."""
        return settings.emulator_dir() if self.kind == "emulated" else settings.npu_dir()

    def slots_text(self) -> str:
        """The limit of hardware contexts and, where it can be known, who holds them; for errors."""
        limit = self.context_limit
        if limit is None:
            return "shared by all processes"
        if self.kind != "emulated":
            return f"{limit} on this NPU, shared by all processes"
        holders = slots.table(settings.emulator_dir()).holders(limit).values()
        held = ", ".join(str(pid) for pid in sorted(set(holders)))
        who = f"held by process {held}" if held else "none held now"
        return f"{limit} on this emulated NPU, shared by all processes; {who}"


class Context:
    """A hardware context with its kernel; freed when the last kernel loaded into it is released."""

    def __init__(
        self, session: Session, path: Path, hw_context: Xrt, kernel: Xrt, layout: ArgumentLayout
    ) -> None:
        self._session = session
        self.path = path
        self.layout = layout
        self._hw_context = hw_context
        self._kernel = kernel

    def load(self, name: str, stream: bytes) -> Kernel:
        """An instruction stream made ready to run in this context.

        Raises:
            DeviceError: the device heap has no room for it.
        """
        begin = perf_counter()
        driver = self._session.driver
        try:
            bo = driver.xrt.bo(
                self._session.device,
                len(stream),
                driver.xrt.bo.cacheable,
                self._kernel.group_id(self.layout.instr),
            )
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"{name}: no instruction buffer of {len(stream)} bytes; close other NPU programs. "
                f"XRT said: {error}"
            ) from error
        buffer = Buffer(driver, bo, len(stream))
        buffer.host[:] = np.frombuffer(stream, dtype=np.uint8)
        buffer.to_device(0, len(stream))
        driver.counters.loads += 1
        if events.listeners:
            loaded = events.StreamLoaded(name, self.path.name, stream, begin, perf_counter())
            events.note(loaded)
        return Kernel(driver, name, self.path.name, self.layout, self._kernel, bo, buffer)

    def runlist(self, launches: Sequence[Launch]) -> RunList:
        """Kernels loaded into this context, with their views, as one list of runs."""
        return RunList(self._session.driver, self._hw_context, launches)

    def release(self) -> None:
        """Free kernel, then context; the kernels loaded into it must be released before."""
        self._kernel = None
        self._hw_context = None
