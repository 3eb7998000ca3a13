"""pyxrt.kernel and pyxrt.run: a kernel and its executions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import SupportsIndex

from . import ert
from . import xclbin as container
from .command import Chain, Command, Packet, ShimError
from .enums import PybindEnum, cu_access_mode, ert_cmd_state
from .pyxrt_bo import bo
from .pyxrt_device import hw_context
from .pyxrt_xclbin import INVALID_ARGUMENT

SCALAR_GROUP = 0xFFFF
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

# What the driver reports of the firmware's health beside the operation; not emulated, so zero.
_HEALTH_REGISTERS = (
    "ctx_pc",
    "fatal_error_type",
    "fatal_error_exception_type",
    "fatal_error_exception_pc",
    "fatal_error_app_module",
)


def _is_instr(argument: container.Argument) -> bool:
    """Whether the argument is the instruction buffer: `instr` here, `instruct` in AMD's files."""
    return argument.qualifier == 1 and argument.name.startswith("instr")


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
        if index not in context._context.arrays:  # no PDI: XRT makes no compute unit of it
            raise RuntimeError(f"No compute units matching '{name}'")
        info = context._parsed.kernels[index]
        if instance and instance.strip("{}") not in info.instances:
            raise RuntimeError(f"No compute units matching '{name}'")
        self._hw_context = context
        self._index = index
        self._info = info
        # Argument index -> bank it is connected to; resolved by the compute unit's name, since
        # kernels and compute units need not stand in the same order.
        self._banks = {a.index: a.connections[0] for a in info.args if a.connections}

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

        Buffers at the end that the kernel does not use may be left out. Real pyxrt skips
        arguments of other types in silence; here they raise.
        """
        wanted = self._info.args
        missing = [a.name for a in wanted[len(args) :] if a.qualifier == 0 or _is_instr(a)]
        if len(args) > len(wanted) or missing:
            raise TypeError(
                f"emulated NPU: {len(args)} kernel arguments, {self._info.name} takes "
                f"{', '.join(a.name for a in wanted)}; only trailing buffers may be left out, "
                "hardware runs with garbage"
            )
        started = run(self)
        for index, value in enumerate(args):
            started.set_arg(index, value)
        started.start()
        return started


class run:
    """One execution of a kernel; may be started again once it has ended."""

    def __init__(self, of: kernel | None = None) -> None:
        if of is not None and not isinstance(of, kernel):
            raise TypeError("__init__(): incompatible constructor arguments.")
        self._kernel = of
        self._values: dict[int, int] = {}
        self._buffers: dict[int, bo] = {}
        # Made by the first start after a change of the arguments.
        self._packet: Packet | None = None
        self._command: Command | None = None
        self._in_runlist = False

    def _of(self) -> kernel:
        if self._kernel is None:
            raise RuntimeError("emulated NPU: an empty run; on hardware this call crashes")
        return self._kernel

    def set_arg(self, index: int, value: object) -> None:
        """Set argument `index` to a buffer or an int32."""
        owner = self._of()
        index = operator.index(index)
        if self._running():
            raise RuntimeError(
                "emulated NPU: set_arg while the command runs; on hardware either value may be used"
            )
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
        if _is_instr(argument) and not value._in_heap:
            raise RuntimeError(
                f"emulated NPU: argument {index} ({argument.name}) is not a bo.cacheable; the "
                "firmware fetches instructions from the device heap only"
            )
        self._buffers[index] = value
        self._values[index] = value._window.address

    def start(self) -> None:
        """Submit; with four commands in flight in the context this waits for the oldest."""
        if self._in_runlist:
            raise RuntimeError(
                "Run object belongs to a runlist and cannot be explicitly started: "
                f"{INVALID_ARGUMENT}"
            )
        self._submit(None)

    def _submit(self, chain: Chain | None) -> None:
        owner = self._of()
        if self._running():
            raise RuntimeError("bad command state, can't launch")
        context = owner._hw_context._context
        assert context is not None
        if self._packet is None:
            words = ert.encode_start(owner._info.args, self._values)
            self._packet = Packet(words, {index: b._window for index, b in self._buffers.items()})
        command = Command(context, owner._index, owner._info, self._packet, chain)
        # Before it is submitted: what an interrupt leaves in the queue can be waited for.
        before, self._command = self._command, command
        try:
            context.npu.submit(command)
        except ShimError as error:
            self._command = before
            raise RuntimeError(str(error)) from None

    def _running(self) -> bool:
        return self._command is not None and self._command.in_flight

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        """The state once the command ended; 0 waits for ever.

        After timeout_ms without an end it returns TIMEOUT while the command goes on, as real
        pyxrt does; ask state() to tell this from the device's own timeout.
        """
        timeout_ms = operator.index(timeout_ms)
        if timeout_ms < 0:
            raise TypeError("wait(): incompatible function arguments.")
        self._of()
        if self._command is None:
            return ert_cmd_state(ert.NEW)
        try:
            ended = self._command.context.npu.finish(self._command, timeout_ms)
        except ShimError as error:
            raise RuntimeError(str(error)) from None
        if not ended:
            return ert_cmd_state(ert.TIMEOUT)
        return ert_cmd_state(self._command.state)

    def wait2(self) -> None:
        """Wait for ever; raises where the command did not complete."""
        state = self.wait()
        command = self._command
        if int(state) == ert.COMPLETED or command is None:
            return
        lines = [f"Command failed to complete successfully ({state.name})"]
        if int(state) in (ert.TIMEOUT, ert.ERROR):
            lines.append(f"txn_op_idx = 0x{command.txn_op_index & 0xFFFFFFFF:08X}")
            lines += [f"{name} = 0x00000000" for name in _HEALTH_REGISTERS]
        raise RuntimeError("\n".join(lines))

    def state(self) -> ert_cmd_state:
        """The command's state now."""
        self._of()
        if self._command is None:
            return ert_cmd_state(ert.NEW)
        try:
            return ert_cmd_state(self._command.context.npu.poll(self._command))
        except ShimError as error:
            raise RuntimeError(str(error)) from None

    def add_callback(self, *_: object) -> None:
        """Fail as the real call does from Python."""
        raise TypeError("add_callback(): incompatible function arguments.")

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # at the end of the process modules are gone, and the driver cleans up
            return
        command = getattr(self, "_command", None)
        # A forked child's copy is not the run.
        if command is not None and command.in_flight and command.context.usable:
            command.context.npu.abandon(command)
            raise RuntimeError(
                "emulated NPU: a run was dropped while its command runs; hardware would abort the "
                "process"
            )
