"""pyxrt, on the emulated NPU: `import npu_embed.emulator.pyxrt as pyxrt`.

The calls that every pyxrt from XRT 2.16 on has, positionally, and the later ones the engine
detects (runlist, wait2, a buffer or context from newer arguments). Errors are plain
RuntimeError, IndexError and TypeError with XRT's words, as Python sees them from the real
module.

Where the real module is silent and the result is garbage, this one raises, and says "emulated
NPU" in the text: an argument that is no buffer and no int, a buffer in a bank its argument is
not connected to, more buffers than the firmware takes, a sub-buffer of a sub-buffer, a strided
write. docs/emulator.md lists what is not modelled.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import ert
from . import xclbin as container
from .enums import (
    PybindEnum,
    access_mode,
    bo_flags,
    cu_access_mode,
    ert_cmd_state,
    xclBOSyncDirection,
    xrt_info_device,
    xrt_msg_level,
)
from .hardware import Command, Context, EmulatedNpu, ShimError, Window
from .program import NoArrayProgram

__all__ = [
    "XCL_BO_FLAGS_NONE",
    "access_mode",
    "bo",
    "cu_access_mode",
    "device",
    "enumerate_devices",
    "ert_cmd_state",
    "hw_context",
    "kernel",
    "log_message",
    "run",
    "runlist",
    "uuid",
    "xclBOSyncDirection",
    "xclbin",
    "xrt_info_device",
    "xrt_msg_level",
]

log = logging.getLogger(__name__)

XCL_BO_FLAGS_NONE = 0
INVALID_ARGUMENT = "Invalid argument"
SRAM_BANK = 1
SCALAR_GROUP = 0xFFFF
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
CHAIN_RUNS = 24
_TO_DEVICE = 0
_FROM_DEVICE = 1


def enumerate_devices() -> int:
    """How many devices there are: one, the emulated NPU."""
    return 1


def log_message(level: xrt_msg_level, tag: str, message: str) -> None:
    """Write to the log, as XRT's message interface does."""
    severity = {0: 50, 1: 50, 2: 50, 3: 40, 4: 30, 5: 20, 6: 20}.get(int(level), 10)
    log.log(severity, "[%s] %s", tag, message)


class uuid:
    """An xclbin's identity. Without equality, as in the real module: compare to_string()."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str) -> None:
        self._text = str(text)

    def to_string(self) -> str:
        """The uuid's text, lower case with hyphens."""
        return self._text


class _Kernel:
    """xclbin.xclbinkernel."""

    def __init__(self, info: container.KernelInfo) -> None:
        self._info = info

    def get_name(self) -> str:
        """The kernel's name in the xclbin's XML."""
        return self._info.name

    def get_num_args(self) -> int:
        """How many arguments it takes."""
        return len(self._info.args)

    def __repr__(self) -> str:
        return f"<xclbinkernel {self._info.name}>"


class _Mem:
    """xclbin.xclbinmem."""

    def __init__(self, memory: container.Memory) -> None:
        self._memory = memory

    def get_tag(self) -> str:
        """Its name, HOST or SRAM."""
        return self._memory.tag

    def get_base_address(self) -> int:
        """Its first address."""
        return self._memory.base_address

    def get_size_kb(self) -> int:
        """Its size in KiB."""
        return self._memory.size_kb

    def get_used(self) -> bool:
        """Whether a kernel is connected to it."""
        return bool(self._memory.used)

    def get_index(self) -> int:
        """Its index, the bank of a buffer's group."""
        return self._memory.index


class xclbin:
    """A kernel container read from a file."""

    xclbinkernel = _Kernel
    xclbinmem = _Mem

    def __init__(self, path: str) -> None:
        if not isinstance(path, str):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.xclbin(arg0: str)"
            )
        file = Path(path)
        if not file.is_file():
            raise RuntimeError(f"No such file '{path}'")
        try:
            self._parsed = container.parse(file.read_bytes())
        except container.XclbinError as error:
            raise RuntimeError(str(error)) from error
        except OSError as error:
            raise RuntimeError(f"Failed to open file '{path}' for reading: {error}") from error

    def get_kernels(self) -> list[_Kernel]:
        """The kernels of its metadata."""
        return [_Kernel(k) for k in self._parsed.kernels]

    def get_mems(self) -> list[_Mem]:
        """The memories of its topology."""
        return [_Mem(m) for m in self._parsed.memories]

    def get_uuid(self) -> uuid:
        """Its uuid."""
        return uuid(self._parsed.uuid)

    def get_xsa_name(self) -> str:
        """The platform's name."""
        return self._parsed.vbnv

    def get_axlf(self) -> None:
        """Fail as the real call does, which has no converter for its result."""
        raise TypeError("Unable to convert function return value to a Python type!")


class device:
    """The emulated NPU."""

    def __init__(self, index: int | str = 0) -> None:
        if isinstance(index, str):
            raise RuntimeError(f"Invalid device string '{index}': {INVALID_ARGUMENT}")
        if operator.index(index) != 0:
            raise RuntimeError(f"No such device with index '{index}'")
        self._npu = EmulatedNpu()
        self._registered: dict[str, container.Xclbin] = {}

    def register_xclbin(self, file: xclbin) -> uuid:
        """Make an xclbin known; its uuid names it from then on."""
        if not isinstance(file, xclbin):
            raise TypeError("register_xclbin(): incompatible function arguments.")
        self._registered[file._parsed.uuid] = file._parsed
        return file.get_uuid()

    def load_xclbin(self, file: xclbin | str) -> uuid:
        """Fail as the NPU's driver does: a whole-device load is for other devices."""
        raise RuntimeError(f"load_axlf: {os.strerror(errno.EOPNOTSUPP)}")

    def get_xclbin_uuid(self) -> uuid:
        """The null uuid: no xclbin is loaded device-wide on an NPU."""
        return uuid("00000000-0000-0000-0000-000000000000")

    def get_info(self, key: xrt_info_device) -> str:
        """A fact about the device as text."""
        profile = self._npu.profile
        facts = {"name": profile.device_name, "bdf": "emulated", "offline": "false"}
        return facts.get(key.name, "")


class hw_context:
    """A hardware context: one of the NPU's slots, for one xclbin.

    hw_context(device, uuid), or in the newer spellings hw_context(device, xclbin) and
    hw_context(device, path), each with an optional mode or configuration that an NPU ignores.
    """

    access_mode = access_mode

    def __init__(self, *args: object) -> None:
        self._context: Context | None = None
        self._kernels: tuple[container.KernelInfo, ...] = ()
        if not args:
            return
        if len(args) not in (2, 3) or not isinstance(args[0], device):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.hw_context()\n    2. pyxrt.hw_context(arg0: pyxrt.device"
                ", arg1: pyxrt.uuid)"
            )
        owner, what = args[0], args[1]
        if isinstance(what, str):
            what = xclbin(what)
        if isinstance(what, xclbin):
            what = owner.register_xclbin(what)
        if not isinstance(what, uuid):
            raise TypeError("__init__(): incompatible constructor arguments.")
        parsed = owner._registered.get(what.to_string())
        if parsed is None:
            raise RuntimeError(f"No xclbin with uuid '{what.to_string()}': {INVALID_ARGUMENT}")
        try:
            self._context = owner._npu.create_context(parsed)
        except ShimError as error:
            raise RuntimeError(str(error)) from None
        except NoArrayProgram as error:
            raise RuntimeError(f"emulated NPU: {error}") from error
        except ValueError as error:
            raise RuntimeError(f"{error}: {INVALID_ARGUMENT}") from error
        self._device = owner
        self._parsed = parsed

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context is not None:
            context.destroy()


class kernel:
    """A kernel of a context's xclbin; calling it builds and starts a run."""

    cu_access_mode = cu_access_mode

    def __init__(self, context: hw_context, name: str) -> None:
        if not isinstance(context, hw_context) or not isinstance(name, str):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.kernel(arg0: pyxrt.hw_context, arg1: str)"
            )
        if context._context is None:
            raise RuntimeError("emulated NPU: kernel of an empty hw_context; it would crash")
        base, _, instance = name.partition(":")
        names = [k.name for k in context._parsed.kernels]
        if base not in names:
            raise RuntimeError(f"No such kernel '{name}': {INVALID_ARGUMENT}")
        index = names.index(base)
        info = context._parsed.kernels[index]
        if instance and instance.strip("{}") not in info.instances:
            raise RuntimeError(f"No compute units matching '{name}'")
        self._hw_context = context
        self._index = index
        self._info = info
        # Argument index -> bank it is connected to.
        self._banks = {a: mem for a, ip, mem in context._parsed.connectivity if ip == index}

    def group_id(self, index: int) -> int:
        """Bank, and the context's handle in bits 16 up, for a buffer of argument `index`."""
        index = operator.index(index)
        if not 0 <= index < len(self._info.args):
            raise IndexError(
                f"vector::_M_range_check: __n (which is {index}) >= this->size() "
                f"(which is {len(self._info.args)})"
            )
        assert self._hw_context._context is not None
        return self._hw_context._context.handle << 16 | self._banks.get(index, SCALAR_GROUP)

    def __call__(self, *args: object) -> run:
        """A started run with these arguments.

        Real pyxrt skips arguments of other types in silence; here they raise.
        """
        if len(args) != len(self._info.args):
            wanted = f"{self._info.name} takes {len(self._info.args)}"
            raise TypeError(
                f"emulated NPU: {len(args)} kernel arguments, {wanted}; hardware runs with garbage"
            )
        started = run(self)
        for index, value in enumerate(args):
            started.set_arg(index, value)
        started.start()
        return started


class bo:
    """A buffer: bo(device, size, flags, group), or a part of one: bo(parent, size, offset)."""

    flags = bo_flags
    normal: ClassVar[bo_flags] = bo_flags(0)
    cacheable: ClassVar[bo_flags] = bo_flags(1 << 24)
    svm: ClassVar[bo_flags] = bo_flags(1 << 27)
    device_only: ClassVar[bo_flags] = bo_flags(1 << 28)
    host_only: ClassVar[bo_flags] = bo_flags(1 << 29)
    p2p: ClassVar[bo_flags] = bo_flags(1 << 30)

    def __init__(self, owner: device | hw_context | bo, size: int, *rest: SupportsIndex) -> None:
        self._parent: bo | None = None
        self._npu: EmulatedNpu | None = None
        if isinstance(owner, bo) and len(rest) == 1:
            self._part_of(owner, operator.index(size), operator.index(rest[0]))
            return
        if isinstance(owner, hw_context) and len(rest) == 1:
            rest = (bo_flags(1 << 29), rest[0])  # newer spelling: host memory is the default
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
        source = source.cast("B") if source.nbytes else memoryview(b"")
        seek = operator.index(seek)
        w = self._window
        if seek < 0 or seek + source.nbytes > w.size:
            raise RuntimeError(f"attempting to write past buffer size: {INVALID_ARGUMENT}")
        w.memory.host[w.offset + seek : w.offset + seek + source.nbytes] = np.frombuffer(
            source, np.uint8
        )

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


class run:
    """One execution of a kernel; may be started again once it has ended."""

    def __init__(self, of: kernel | None = None) -> None:
        if of is not None and not isinstance(of, kernel):
            raise TypeError("__init__(): incompatible constructor arguments.")
        self._kernel = of
        self._values: dict[int, int] = {}
        self._buffers: dict[int, bo] = {}
        self._packet: bytes | None = None
        self._command: Command | None = None
        self._list: runlist | None = None

    def _of(self) -> kernel:
        if self._kernel is None:
            raise RuntimeError("emulated NPU: an empty run; on hardware this call crashes")
        return self._kernel

    def set_arg(self, index: int, value: object) -> None:
        """Set argument `index` to a buffer or an int32."""
        owner = self._of()
        index = operator.index(index)
        args = owner._info.args
        if isinstance(value, bo):
            if not 0 <= index < len(args):
                raise IndexError(f"bitset::test: __position (which is {index}) >= _Nb")
            self._set_buffer(owner, index, value)
        else:
            if isinstance(value, bool | PybindEnum) or not isinstance(value, SupportsIndex):
                raise TypeError("set_arg(): incompatible function arguments.")
            number = operator.index(value)
            if not INT32_MIN <= number <= INT32_MAX:
                raise TypeError("set_arg(): incompatible function arguments: no int32.")
            if not 0 <= index < len(args):
                raise IndexError(
                    f"vector::_M_range_check: __n (which is {index}) >= this->size() "
                    f"(which is {len(args)})"
                )
            if args[index].qualifier == 1:
                raise RuntimeError(
                    f"emulated NPU: argument {index} ({args[index].name}) is a buffer, got an int; "
                    "hardware takes it in silence"
                )
            self._values[index] = number
        self._packet = None

    def _set_buffer(self, owner: kernel, index: int, value: bo) -> None:
        argument = owner._info.args[index]
        if argument.qualifier != 1:
            raise RuntimeError(
                f"emulated NPU: argument {index} ({argument.name}) is a scalar, got a buffer; "
                "hardware takes it in silence"
            )
        bank = owner._banks.get(index)
        if bank is not None and value._bank != bank:
            raise RuntimeError(
                f"emulated NPU: buffer of argument {index} ({argument.name}) is in bank "
                f"{value._bank}, connected is bank {bank}; XRT would copy it in silence, "
                "allocate it with kernel.group_id of that argument"
            )
        if index not in self._buffers and len(self._buffers) >= self._limit(owner):
            raise RuntimeError(
                f"DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-22): {INVALID_ARGUMENT}"
            )
        self._buffers[index] = value
        self._values[index] = value._window.address

    @staticmethod
    def _limit(owner: kernel) -> int:
        context = owner._hw_context._context
        assert context is not None
        return context.npu.profile.max_buffers

    def start(self) -> None:
        """Submit; with four commands in flight in the context this waits for the oldest."""
        if self._list is not None:
            raise RuntimeError(
                "Run object belongs to a runlist and cannot be explicitly started: "
                f"{INVALID_ARGUMENT}"
            )
        self._submit()

    def _submit(self) -> None:
        owner = self._of()
        if self._running():
            raise RuntimeError("bad command state, can't launch")
        context = owner._hw_context._context
        assert context is not None
        if self._packet is None:
            self._packet = ert.encode_start(owner._info.args, self._values)
        self._command = Command(
            context,
            owner._index,
            owner._info,
            self._packet,
            [b._window for b in self._buffers.values()],
        )
        try:
            context.npu.submit(self._command)
        except ShimError as error:
            self._command = None
            raise RuntimeError(str(error)) from None

    def _running(self) -> bool:
        return self._command is not None and self._command.state in (ert.QUEUED, ert.RUNNING)

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        """The state once the command ended; 0 waits for ever.

        After timeout_ms without an end it returns TIMEOUT while the command goes on, as real
        pyxrt does; ask state() to tell this from the device's own timeout.
        """
        timeout_ms = operator.index(timeout_ms)
        self._of()
        if self._command is None:
            return ert_cmd_state(ert.NEW)
        if not self._command.context.npu.finish(self._command, max(0, timeout_ms)):
            return ert_cmd_state(ert.TIMEOUT)
        return ert_cmd_state(self._command.state)

    def wait2(self) -> None:
        """Wait for ever; raises where the command did not complete."""
        state = self.wait()
        if int(state) != ert.COMPLETED:
            command = self._command
            lines = [f"Command failed to complete successfully ({state.name})"]
            if command is not None and int(state) == ert.TIMEOUT:
                lines.append(f"txn_op_idx = 0x{command.txn_op_index & 0xFFFFFFFF:08X}")
                lines.append("ctx_pc = 0x00000000")
            raise RuntimeError("\n".join(lines))

    def state(self) -> ert_cmd_state:
        """The command's state now."""
        self._of()
        if self._command is None:
            return ert_cmd_state(ert.NEW)
        return ert_cmd_state(self._command.context.npu.poll(self._command))

    def add_callback(self, *_: object) -> None:
        """Fail as the real call does from Python."""
        raise TypeError("add_callback(): incompatible function arguments.")

    def __del__(self) -> None:
        command = getattr(self, "_command", None)
        if command is not None and command.state in (ert.QUEUED, ert.RUNNING):
            command.context.npu.abandon(command)
            raise RuntimeError(
                "emulated NPU: a run was dropped while its command runs; hardware would abort the "
                "process"
            )


class runlist:
    """Runs of one context, executed in order of add and waited for as one."""

    def __init__(self, context: hw_context | None = None) -> None:
        if context is not None and not isinstance(context, hw_context):
            raise TypeError("__init__(): incompatible constructor arguments.")
        self._hw_context = context
        self._runs: list[run] = []
        self._executing = False

    def _idle(self, doing: str) -> None:
        if self._hw_context is None:
            raise RuntimeError(
                f"cannot add run object to uninitialized runlist: {INVALID_ARGUMENT}"
            )
        if self._executing:
            raise RuntimeError(
                f"runlist must be idle before {doing}, current state: running: {INVALID_ARGUMENT}"
            )

    def add(self, member: run) -> None:
        """Append a run; it belongs to this list from now on."""
        self._idle("adding run objects")
        if not isinstance(member, run):
            raise TypeError("add(): incompatible function arguments.")
        if member._of()._hw_context is not self._hw_context:
            raise RuntimeError(f"runlist hwctx does not match run hwctx: {INVALID_ARGUMENT}")
        if member._list is not None:
            raise RuntimeError(f"Run object already added: {INVALID_ARGUMENT}")
        member._list = self
        self._runs.append(member)

    def execute(self) -> None:
        """Submit all runs."""
        self._idle("submitting for execution")
        if not self._runs:
            raise RuntimeError(f"No runs to execute: {INVALID_ARGUMENT}")
        self._executing = True

    def wait(self) -> None:
        """Wait for all; raises if one fails, and those after it are aborted."""
        if not self._executing:
            return
        self._executing = False
        for position, member in enumerate(self._runs):
            member._submit()
            state = member.wait()
            if int(state) == ert.COMPLETED:
                continue
            for later in self._runs[position + 1 :]:
                later._command = None
            raise RuntimeError(f"runlist failed execution ({state.name})")

    def __del__(self) -> None:
        for member in getattr(self, "_runs", ()):
            member._list = None


def _export_levels() -> Sequence[str]:
    """The levels at module level, as pybind11's export_values() puts them."""
    globals().update(xrt_msg_level.__members__)
    return tuple(xrt_msg_level.__members__)


__all__ += _export_levels()
