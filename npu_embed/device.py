"""Session, Buffer, Context, Kernel: the one seam between the engine and a device.

Everything here works over any module with pyxrt's API, the system's pyxrt or the emulated one,
with the calls every pyxrt from XRT 2.16 on has, positionally. Above this file nothing knows
which of the two it is.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import settings
from .emulator import program, xclbin
from .errors import BundleError, DeviceError, NoFreeContext, RunFailed

log = logging.getLogger("npu_embed")

TXN_OPCODE = 3
HOST_GROUP = 0  # bank 0 (HOST) and no context: a data buffer may outlive any context
WAIT_SLICE_MS = 100  # pyxrt's wait holds the GIL: other threads run between slices
MAX_CACHED_RUNS = 512  # of one kernel; a text at another row of a pack is another run
MAX_CACHED_VIEWS = 2048  # of one buffer

# Creation errors that mean "no slot now": by driver and firmware it is any of these, and the
# shim has printed them with either sign.
_NO_SLOT = {errno.ENOENT, errno.EINVAL, errno.ENODEV, errno.ENOSPC, errno.EBUSY}
_CREATE_FAILED = re.compile(r"CREATE_HWCTX IOCTL failed \(err=(-?\d+)\)")

# What get_info(name) says -> the generation a bundle's `target` names.
_GENERATIONS = {"npu1": ("phoenix", "hawk", "npu1"), "npu2": ("strix", "krackan", "npu2")}

# pyxrt's objects: its own stub files are wrong in places, so nothing is promised about them.
Xrt: TypeAlias = Any

_ids = itertools.count(1)
_said: set[str] = set()


@dataclass(slots=True)
class Counters:
    """What a session did since it was opened; every field only grows."""

    runs: int = 0
    switches: int = 0
    swaps: int = 0
    loads: int = 0
    patches: int = 0
    syncs: int = 0
    bytes_to_device: int = 0
    bytes_from_device: int = 0

    def copy(self) -> Counters:
        """The counts of now."""
        return Counters(*(getattr(self, f.name) for f in fields(self)))

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class Session:
    """An opened NPU, real or emulated; the owner of every buffer and context.

    kind is "npu" or "emulated"; generation is "npu1", "npu2" or None where the device's name is
    unknown.
    """

    def __init__(self, kind: Literal["npu", "emulated"], xrt: ModuleType) -> None:
        self.kind = kind
        self.xrt: Xrt = xrt
        self.counters = Counters()
        self.timeout_ms = settings.timeout_ms()
        self.abandoned: list[Xrt] = []  # runs that never ended: dropping one aborts the process
        try:
            self.device = self.xrt.device(0)
            self.device_name = str(self.device.get_info(self.xrt.xrt_info_device.name))
        except RuntimeError as error:
            raise DeviceError(
                f"device 0: could not be opened, wanted an NPU; run `xrt-smi examine` to see what "
                f"is wrong. XRT said: {error}"
            ) from error
        name = self.device_name.lower()
        self.generation = next(
            (g for g, words in _GENERATIONS.items() if any(w in name for w in words)), None
        )

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
        if device == "emulated":
            return cls("emulated", _emulator())
        if array_programs:
            reason = "its kernels are array programs, which no hardware can run"
            if device == "npu":
                raise DeviceError(
                    f'device="npu": {reason}, wanted kernels compiled for the NPU; use '
                    'device="emulated" or a bundle with compiled kernels.'
                )
            return cls._emulate(reason)
        try:
            return cls("npu", _real_pyxrt())
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
        return cls("emulated", _emulator())

    def buffer(self, size_bytes: int) -> Buffer:
        """A new data buffer, zero on both sides.

        Raises:
            DeviceError: the device has no memory left for it.
        """
        flags = self.xrt.bo.host_only
        try:
            bo = self.xrt.bo(self.device, size_bytes, flags, HOST_GROUP)
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"buffer of {size_bytes} bytes: not allocated; check `ulimit -l` (wanted: "
                f"unlimited). XRT said: {error}"
            ) from error
        buffer = Buffer(self, bo, size_bytes)
        buffer.host[:] = 0
        buffer.to_device(0, size_bytes)
        return buffer

    def context(self, path: Path, kernel_name: str) -> Context:
        """A new hardware context for the xclbin at `path`.

        Raises:
            BundleError: the file is missing, no xclbin, or has no such kernel.
            NoFreeContext: every hardware context is taken.
            DeviceError: any other failure to create it.
        """
        layout = argument_layout(path, kernel_name)
        try:
            container = self.xrt.xclbin(str(path))
            identity = self.device.register_xclbin(container)
        except RuntimeError as error:
            raise BundleError(
                f"{path.name}: not accepted as an xclbin; re-export the bundle. XRT said: {error}"
            ) from error
        try:
            hw_context = self.xrt.hw_context(self.device, container.get_uuid())
        except RuntimeError as error:
            found = _CREATE_FAILED.search(str(error))
            if found and abs(int(found[1])) in _NO_SLOT:
                raise NoFreeContext(str(error)) from error
            raise DeviceError(
                f"{path.name}: no hardware context could be created; see XRT's words and `dmesg`. "
                f"XRT said: {error}"
            ) from error
        try:
            kernel = self.xrt.kernel(hw_context, kernel_name)
        except RuntimeError as error:
            raise BundleError(
                f"{path.name}: no kernel {kernel_name}, wanted it; re-export the bundle. "
                f"XRT said: {error}"
            ) from error
        del identity
        return Context(self, path, hw_context, kernel, layout)


def _emulator() -> ModuleType:
    return importlib.import_module("npu_embed.emulator.pyxrt")


def _real_pyxrt() -> ModuleType:
    """The system's pyxrt with a device behind it.

    Raises:
        DeviceError: it is missing, too old, or sees no NPU.
    """
    try:
        module = importlib.import_module("pyxrt")
    except Exception as error:  # a pyxrt of another Python can fail in many ways
        raise DeviceError(
            f"pyxrt: not importable ({type(error).__name__}: {error}), wanted XRT's Python module; "
            "install XRT with its amdxdna plugin and put its python folder on PYTHONPATH"
        ) from error
    missing = [n for n in ("hw_context", "device", "bo", "run") if not hasattr(module, n)]
    if missing:
        raise DeviceError(
            f"pyxrt: has no {missing[0]}, wanted XRT 2.16 or later; install a newer XRT"
        )
    try:
        found = int(module.enumerate_devices()) if hasattr(module, "enumerate_devices") else 1
    except RuntimeError as error:
        raise DeviceError(f"pyxrt: no device can be listed. XRT said: {error}") from error
    if found == 0:
        raise DeviceError("pyxrt: sees no device, wanted an NPU; is the amdxdna driver loaded?")
    return module


@dataclass(frozen=True, slots=True)
class ArgumentLayout:
    """Where an xclbin's kernel takes what; positions from its XML, never assumed."""

    opcode: int
    instr: int
    ninstr: int
    buffers: tuple[int, ...]


def argument_layout(path: Path, kernel_name: str) -> ArgumentLayout:
    """The argument positions of a kernel.

    Raises:
        BundleError: the file is missing, no xclbin, has no such kernel, or its kernel takes no
        instructions.
    """
    parsed = read_xclbin(path)
    kernel = next((k for k in parsed.kernels if k.name == kernel_name), None)
    if kernel is None:
        known = ", ".join(k.name for k in parsed.kernels) or "none"
        raise BundleError(
            f"{path.name}: has kernels {known}, wanted {kernel_name}; re-export the bundle."
        )
    scalars = {a.name: a.index for a in kernel.args if a.qualifier == 0}
    pointers = {a.name: a.index for a in kernel.args if a.qualifier == 1}
    instr = next((i for name, i in pointers.items() if name.startswith("instr")), None)
    ninstr = next((i for name, i in scalars.items() if name.startswith("ninstr")), None)
    if instr is None or ninstr is None or "opcode" not in scalars:
        raise BundleError(
            f"{path.name}: kernel {kernel_name} takes {', '.join(a.name for a in kernel.args)}, "
            "wanted opcode, instr and ninstr among them; this xclbin runs no instruction streams."
        )
    buffers = tuple(sorted(i for i in pointers.values() if i != instr))
    return ArgumentLayout(scalars["opcode"], instr, ninstr, buffers)


def read_xclbin(path: Path) -> xclbin.Xclbin:
    """The parsed container at `path`.

    Raises:
        BundleError: missing, unreadable or no xclbin.
    """
    try:
        return xclbin.read(path)
    except xclbin.XclbinError as error:
        raise BundleError(f"{path.name}: no xclbin ({error}); re-export the bundle.") from error
    except OSError as error:
        raise BundleError(f"{path.name}: cannot be read ({error.strerror}).") from error


def holds_array_program(path: Path) -> bool:
    """Whether an xclbin names an array program of the emulated NPU rather than real code."""
    partition = read_xclbin(path).partition
    for pdi in partition.pdis if partition is not None else ():
        try:
            program.read_constants(pdi.image)
        except program.NoArrayProgram:
            continue
        return True
    return False


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

    def __init__(self, session: Session, bo: Xrt, size_bytes: int) -> None:
        self.size = size_bytes
        self.host: NDArray[np.uint8] = np.frombuffer(bo.map(), dtype=np.uint8)[:size_bytes]
        self._session = session
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
        bo = self._bo if whole else self._session.xrt.bo(self._bo, size, offset)
        if len(self._views) >= MAX_CACHED_VIEWS:
            self._views.popitem(last=False)
        view = self._views[key] = View(bo, offset, size)
        return view

    def to_device(self, offset: int, size: int) -> None:
        """Make the device see the host's bytes of a range."""
        self._bo.sync(self._session.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, size, offset)
        self._session.counters.syncs += 1
        self._session.counters.bytes_to_device += size

    def from_device(self, offset: int, size: int) -> None:
        """Make the host see the device's bytes of a range."""
        direction = self._session.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE
        self._bo.sync(direction, size, offset)
        self._session.counters.syncs += 1
        self._session.counters.bytes_from_device += size


class Context:
    """A hardware context with its kernel; freed when the last kernel loaded into it is released."""

    def __init__(
        self, session: Session, path: Path, hw_context: Xrt, kernel: Xrt, layout: ArgumentLayout
    ) -> None:
        self.session = session
        self.path = path
        self.layout = layout
        self._hw_context = hw_context
        self._kernel = kernel

    def load(self, name: str, stream: bytes) -> Kernel:
        """An instruction stream made ready to run in this context.

        Raises:
            DeviceError: the device heap has no room for it.
        """
        session = self.session
        try:
            bo = session.xrt.bo(
                session.device,
                len(stream),
                session.xrt.bo.cacheable,
                self._kernel.group_id(self.layout.instr),
            )
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"{name}: no instruction buffer of {len(stream)} bytes; close other NPU programs. "
                f"XRT said: {error}"
            ) from error
        buffer = Buffer(session, bo, len(stream))
        buffer.host[:] = np.frombuffer(stream, dtype=np.uint8)
        buffer.to_device(0, len(stream))
        session.counters.loads += 1
        return Kernel(self, name, self._kernel, bo, buffer)

    def release(self) -> None:
        """Free kernel, then context; the kernels loaded into it must be released before."""
        self._kernel = None
        self._hw_context = None


class Kernel:
    """A loaded instruction stream: patched, run, released."""

    def __init__(
        self, context: Context, name: str, kernel: Xrt, insts_bo: Xrt, insts: Buffer
    ) -> None:
        self.name = name
        self._context = context
        self._kernel = kernel
        self._insts_bo = insts_bo
        self._insts = insts
        self._runs: OrderedDict[tuple[int, ...], tuple[Xrt, tuple[View, ...]]] = OrderedDict()

    def patch(self, words: Mapping[int, int]) -> None:
        """Write 32-bit words into the instruction stream; later runs execute them. One sync.

        Raises:
            ValueError: an index past the stream or a value past 32 bits; nothing is written then.
        """
        stream = self._insts.host.view(np.uint32)
        for index, value in words.items():
            if not 0 <= index < len(stream) or not 0 <= value < 1 << 32:
                raise ValueError(
                    f"{self.name}: word {index} = {value}, the stream has {len(stream)} u32 words"
                )
        for index, value in words.items():
            stream[index] = value
        self._insts.to_device(0, self._insts.size)
        self._context.session.counters.patches += 1

    def run(self, views: Sequence[View]) -> None:
        """Run with these buffer arguments and wait for the end.

        Raises:
            RunFailed: the run did not complete, or not in time; nothing it wrote may be used.
        """
        session = self._context.session
        run = self._prepared(views)
        try:
            run.start()
        except RuntimeError as error:
            raise RunFailed(
                f"{self.name}: could not be started; run `npu-embed check`. XRT said: {error}"
            ) from error
        session.counters.runs += 1
        state = self._wait(run)
        completed = session.xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
        if state != completed:
            raise RunFailed(
                f"{self.name}: the run ended in {_state_name(state)}, wanted COMPLETED; its "
                "results are not used. Check the bundle (`npu-embed check`) and the driver's log "
                "(`dmesg`)."
            )

    def _prepared(self, views: Sequence[View]) -> Xrt:
        """A run with its arguments set, kept for the next time the same views are asked for."""
        key = tuple(view.id for view in views)
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
            return found[0]
        layout = self._context.layout
        if len(views) > len(layout.buffers):
            raise BundleError(
                f"{self._context.path.name}: {self.name} takes {len(layout.buffers)} buffers, "
                f"wanted {len(views)}; re-export the bundle."
            )
        run = self._context.session.xrt.run(self._kernel)
        run.set_arg(layout.opcode, TXN_OPCODE)
        run.set_arg(layout.instr, self._insts_bo)
        run.set_arg(layout.ninstr, self._insts.size)  # bytes, as current compilers' hosts pass
        for index, view in zip(layout.buffers, views, strict=False):
            run.set_arg(index, view.bo)
        if len(self._runs) >= MAX_CACHED_RUNS:
            self._runs.popitem(last=False)
        self._runs[key] = (run, tuple(views))
        return run

    def _wait(self, run: Xrt) -> Xrt:
        """The state the run ended in, or TIMEOUT; a run that goes on is kept from being freed."""
        session = self._context.session
        states = session.xrt.ert_cmd_state
        deadline = time.monotonic() + session.timeout_ms / 1000
        try:
            while True:
                state = run.wait(min(WAIT_SLICE_MS, session.timeout_ms))
                if state != states.ERT_CMD_STATE_TIMEOUT:
                    return state
                # TIMEOUT is either ours (the run goes on) or the device's own: state() tells.
                if run.state() == states.ERT_CMD_STATE_TIMEOUT:
                    return state
                if time.monotonic() > deadline:
                    self._abandon(run)
                    return state
        except BaseException:  # Ctrl-C: a run in flight must not be freed, so let it end
            if not self._ended(run, deadline):
                self._abandon(run)
            raise

    def _ended(self, run: Xrt, deadline: float) -> bool:
        """Whether the run ends before the deadline."""
        timeout = self._context.session.xrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT
        while time.monotonic() < deadline:
            if run.wait(WAIT_SLICE_MS) != timeout or run.state() == timeout:
                return True
        return False

    def _abandon(self, run: Xrt) -> None:
        self._context.session.abandoned.append((run, self._kernel, self._insts_bo))
        self._runs = OrderedDict((k, v) for k, v in self._runs.items() if v[0] is not run)

    def release(self) -> None:
        """Free the runs, the instruction buffer, then the kernel's reference, in this order."""
        self._runs.clear()
        self._insts_bo = None
        del self._insts
        self._kernel = None


def _state_name(state: Xrt) -> str:
    return str(getattr(state, "name", state)).replace("ERT_CMD_STATE_", "")
