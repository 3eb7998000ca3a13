"""The emulated NPU behind the pyxrt API: memory, contexts, command queues, and their failures.

Commands run when somebody waits for them (or needs a place in the queue), in order. Time is
virtual: a stream that waits for ever costs no wall time, yet a bounded wait returns first and
the device's own timeout second, as on hardware.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import settings
from . import ert, slots
from .array import Array, PlanCache, load_program
from .controller import Fault, Stall
from .flows import Argument, Scratch
from .memory import PAGE_BYTES, Memory
from .profile import Profile, current
from .xclbin import KernelInfo, Xclbin

log = logging.getLogger(__name__)

HEAP_BASE = 0x4000000
HOST_BASE = 0x1_0000_0000
TXN_OPCODE = 3

_UNSET = Memory(0, None)  # an argument nobody set: any access is out of its range
_serials = itertools.count(1)


class ShimError(Exception):
    """An ioctl of the driver failed: `<name> IOCTL failed (err=<n>): <strerror>`."""

    def __init__(self, ioctl: str, errno_value: int, sign: int = -1) -> None:
        super().__init__(
            f"DRM_IOCTL_AMDXDNA_{ioctl} IOCTL failed (err={sign * errno_value}): "
            f"{os.strerror(errno_value)}"
        )


@dataclass(slots=True, eq=False)
class Window:
    """A buffer or sub-buffer: a range of an allocation, at a device address."""

    memory: Memory
    address: int
    offset: int
    size: int


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


@dataclass(slots=True, eq=False)
class Command:
    """A submitted packet and the buffers its ioctl names."""

    context: Context
    kernel_index: int
    kernel: KernelInfo
    packet: bytes
    windows: Sequence[Window]
    state: int = ert.QUEUED
    detail: str = ""
    txn_op_index: int = -1
    hung_since_ms: int | None = None


@dataclass(slots=True, eq=False)
class Context:
    """A hardware context: a slot, a partition of the array, a queue."""

    npu: EmulatedNpu
    handle: int
    slot: int
    serial: int
    arrays: dict[int, Array]  # by the kernel's position in the xclbin
    queue: deque[Command] = field(default_factory=deque)
    destroyed: bool = False

    def destroy(self) -> None:
        """Give the slot back; queued commands are aborted."""
        if self.destroyed:
            return
        self.destroyed = True
        for command in self.queue:
            command.state = ert.ABORT
        self.queue.clear()
        self.npu.table.release(self.slot)
        self.npu.contexts.discard(self)


class EmulatedNpu:
    """One emulated NPU as this process sees it; its slots are shared with every other process."""

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile = profile or current()
        self.slots = settings.emulator_slots(self.profile.slots)
        self.mode = settings.emulator_mode()
        self.table = slots.table(settings.emulator_dir())
        self.contexts: set[Context] = set()
        self.clock_ms = 0
        self.switches = 0
        self.lock = threading.RLock()
        self._scratch = Scratch()
        self._plans = PlanCache()
        self._handles = itertools.count(1)
        self._random = random.Random(settings.emulator_seed()) if self.mode == "loose" else None
        self._heap = Heap(HEAP_BASE, self.profile.heap_bytes, self.profile.heap_alignment_bytes)
        self._host = Heap(HOST_BASE, None, PAGE_BYTES)

    # -- memory -------------------------------------------------------------------------------

    def allocate(self, size: int, in_heap: bool) -> Window:
        """A new buffer in the device heap or in host memory.

        Raises:
            ShimError: size 0, or the heap is full.
        """
        if size < 1:
            raise ShimError("CREATE_BO", 22, self.profile.errno_sign)
        with self.lock:
            address = (self._heap if in_heap else self._host).take(-(-size // 4096) * 4096)
            if address is None:
                raise ShimError("CREATE_BO", 28, self.profile.errno_sign)
            return Window(Memory(size, self._random), address, 0, size)

    def free(self, window: Window, in_heap: bool) -> None:
        """Free an allocation's address; its memory lives as long as somebody maps it."""
        with self.lock:
            (self._heap if in_heap else self._host).give_back(window.address)

    # -- contexts -----------------------------------------------------------------------------

    def create_context(self, xclbin: Xclbin) -> Context:
        """A context for an xclbin, with its array programs loaded.

        Raises:
            ShimError: no slot is free, or the partition is wider than the array.
            NoArrayProgram: the xclbin's PDI is nothing the emulator can run.
        """
        partition = xclbin.partition
        if partition is None or not partition.pdis:
            raise ValueError("No valid DPU kernel found in xclbin")
        if not 1 <= partition.column_width <= self.profile.columns:
            raise ShimError("CREATE_HWCTX", 22, self.profile.errno_sign)
        arrays: dict[int, Array] = {}
        for index, kernel in enumerate(xclbin.kernels):
            for pdi in partition.pdis:
                if kernel.dpu_kernel_id in pdi.dpu_kernel_ids:
                    load_program(pdi.image)  # refused before a slot is taken
                    arrays[index] = Array(pdi.image, self.profile.dev_gen, self._plans)
                    break
        if not arrays:
            raise ValueError("No valid DPU kernel found in xclbin")
        with self.lock:
            slot = self.table.acquire(self.slots)
            if slot is None:
                raise ShimError("CREATE_HWCTX", self.profile.no_slot_errno, self.profile.errno_sign)
            context = Context(self, next(self._handles), slot, next(_serials), arrays)
            self.contexts.add(context)
            return context

    # -- commands -----------------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Queue a command; with the queue full, the oldest one runs first, as the ioctl blocks."""
        context = command.context
        with self.lock:
            if context.destroyed:
                raise ShimError("EXEC_CMD", 2, self.profile.errno_sign)
            while len(context.queue) >= self.profile.max_commands:
                self.finish(context.queue[0])
            command.state = ert.QUEUED
            context.queue.append(command)

    def finish(self, command: Command, timeout_ms: int = 0) -> bool:
        """Let the queue run until the command ends, or some virtual time; True if it ended."""
        with self.lock:
            deadline_ms = self.clock_ms + timeout_ms if timeout_ms else None
            context = command.context
            while command.state in (ert.QUEUED, ert.RUNNING):
                head = context.queue[0]
                if head.hung_since_ms is None:
                    self._execute(head)
                if head.hung_since_ms is not None:
                    reset_ms = head.hung_since_ms + self.profile.tdr_ms
                    if deadline_ms is not None and deadline_ms < reset_ms:
                        self.clock_ms = deadline_ms
                        return False
                    self.clock_ms = max(self.clock_ms, reset_ms)
                    self._time_out(context)
                else:
                    context.queue.popleft()
            return True

    def poll(self, command: Command) -> int:
        """The command's state; looking takes a virtual millisecond and lets one command run."""
        with self.lock:
            if command.state in (ert.QUEUED, ert.RUNNING):
                self.finish(command, timeout_ms=1)
            return command.state

    def _time_out(self, context: Context) -> None:
        """The watchdog: the head timed out, the rest is aborted, the context rebuilt."""
        head = context.queue.popleft()
        head.state = ert.TIMEOUT
        head.hung_since_ms = None
        for later in context.queue:
            later.state = ert.ABORT
        context.queue.clear()
        for array in context.arrays.values():
            array.reset()

    def _execute(self, command: Command) -> None:
        """Run the head of a queue to its end, or to the point where it hangs."""
        context = command.context
        if self.table.take_the_array(context.serial):
            self.switches += 1
            for array in context.arrays.values():
                array.reset()
        command.state = ert.RUNNING
        try:
            self._run(command)
        except Stall as stall:
            command.hung_since_ms = self.clock_ms
            self._note(command, stall)
        except Fault as fault:
            command.state = ert.ERROR
            self._note(command, fault)
        else:
            command.state = ert.COMPLETED

    @staticmethod
    def _note(command: Command, failure: Fault | Stall) -> None:
        command.detail, command.txn_op_index = str(failure), failure.op_index
        log.warning("emulated NPU: op %d: %s", failure.op_index, failure)

    def _run(self, command: Command) -> None:
        values = ert.decode_start(command.kernel.args, command.packet)
        windows = {w.address: w for w in command.windows}
        arguments: list[Argument] = []
        stream: bytes | None = None
        for a in command.kernel.args:
            value = values[a.index]
            if a.qualifier == 0:
                if a.name == "opcode" and value != TXN_OPCODE:
                    raise Fault(-1, f"opcode {value} is not emulated, wanted {TXN_OPCODE}")
                continue
            window = windows.get(value)
            if a.name in ("instr", "instruct"):
                if window is None:
                    raise Fault(-1, f"instruction address 0x{value:X} is no buffer of this run")
                stream = self._stream(window)
            elif window is not None:
                if self.mode == "loose":
                    window.memory.evict_lines()
                arguments.append(Argument(window.memory, window.offset, window.size))
            elif value == 0:
                arguments.append(Argument(_UNSET, 0, 0))
            else:
                raise Fault(-1, f"address 0x{value:X} of {a.name} is no buffer of this run")
        if stream is None:
            raise Fault(-1, "the kernel has no instruction argument")
        command.context.arrays[command.kernel_index].run(stream, arguments, self._scratch)

    def _stream(self, window: Window) -> bytes:
        """The instruction words the device sees, as bytes; kept while the buffer is unchanged."""
        memory = window.memory
        if self.mode == "loose":
            memory.evict_lines()
        key = ("stream", window.offset, window.size)
        kept = memory.derived.get(key)
        if kept is not None and kept[0] == memory.version:
            return kept[1]  # type: ignore[return-value]
        words = memory.device[window.offset : window.offset + window.size].tobytes()
        memory.derived[key] = (memory.version, words)
        return words

    def abandon(self, command: Command) -> None:
        """Take a command out of its queue: nobody will ever wait for it."""
        with self.lock:
            if command in command.context.queue:
                command.context.queue.remove(command)
            command.state = ert.ABORT
