"""The emulated NPU behind the pyxrt API: memory, contexts, command queues, and their failures.

Commands run when somebody waits for them (or needs a place in the queue), in order. Time is
virtual: a stream that waits for ever costs no wall time, yet a bounded wait returns first and
the device's own timeout second, as on hardware.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from .. import settings
from . import ert, slots
from .array import Array, Bound, PlanCache, compute
from .binding import bindings_of, stream_of
from .command import Chain, Command, Context, ShimError, Window
from .controller import Fault, Stall
from .faults import Aborted, Faults, NotLocked, Planned, Wound, parse
from .heap import Heap
from .memory import PAGE_BYTES, Memory
from .profile import Profile, current
from .xclbin import Xclbin

log = logging.getLogger(__name__)

ATTENTION = "mha"  # the array program whose runs in a list are computed together
Computable: TypeAlias = tuple[Command, Array, Bound]

__all__ = ["Chain", "Command", "Context", "EmulatedNpu", "ShimError", "Window"]

HEAP_BASE = 0x4000000
HOST_BASE = 0x1_0000_0000
SLOT_HANDLE_BITS = 8  # of a buffer's group, which carries the context's handle

_serials = itertools.count(1)
_npus: weakref.WeakSet[EmulatedNpu] = weakref.WeakSet()


def _unlock_after_fork() -> None:
    """In a forked child: a lock that another thread of the parent held would never be freed."""
    for npu in _npus:
        npu.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_after_fork)


def _host_limit_bytes() -> int:
    """The most a single buffer may take: both its sides must fit in the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


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
        self.busy_seconds: dict[str, float] = {}  # real time in each array program, failures too
        self.lock = threading.RLock()
        self._plans = PlanCache()
        self._handles = itertools.count(1)
        self._random = random.Random(settings.emulator_seed()) if self.mode == "loose" else None
        self._heap = Heap(HEAP_BASE, self.profile.heap_bytes, self.profile.heap_alignment_bytes)
        self._host = Heap(HOST_BASE, None, PAGE_BYTES)
        self._freed: deque[tuple[Heap, int]] = deque()
        self._progress_ms = 0  # when a command was last submitted or completed
        self.gone = False
        self.faults: Faults | None = None  # what is planned to go wrong
        self.plan_faults(parse(settings.emulator_faults()))
        _npus.add(self)

    def plan_faults(self, planned: Sequence[Planned]) -> Faults | None:
        """Have faults happen from now on, in the place of those planned before."""
        self.faults = Faults(planned, settings.emulator_seed()) if planned else None
        return self.faults

    # -- memory -------------------------------------------------------------------------------

    def allocate(self, size: int, in_heap: bool) -> Window:
        """A new buffer in the device heap or in host memory.

        Raises:
            ShimError: size 0, or the heap is full.
        """
        sign = self.profile.errno_sign
        if size < 1:
            raise ShimError("CREATE_BO", errno.EINVAL, sign)
        if size > _host_limit_bytes():
            raise ShimError("CREATE_BO", errno.ENOMEM, sign)
        with self.lock:
            self._check_here("CREATE_BO")
            if self.faults is not None and self.faults.of_buffer(in_heap):
                raise ShimError("CREATE_BO", errno.ENOSPC, sign) if in_heap else NotLocked(size)
            while self._freed:
                heap, address = self._freed.popleft()
                heap.give_back(address)
            heap = self._heap if in_heap else self._host
            taken = heap.take(-(-size // PAGE_BYTES) * PAGE_BYTES)
            if taken is None:
                raise ShimError("CREATE_BO", errno.ENOSPC, sign)
            try:
                memory = Memory(size, self._random)
            except (OSError, MemoryError):
                heap.give_back(taken)
                raise ShimError("CREATE_BO", errno.ENOMEM, sign) from None
            return Window(memory, taken, 0, size)

    def free(self, window: Window, in_heap: bool) -> None:
        """Free an allocation's address; its memory lives as long as somebody maps it.

        Called by the garbage collector at any moment, even within allocate: so without a lock, and
        the address is given back at the next allocation.
        """
        self._freed.append((self._heap if in_heap else self._host, window.address))

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
            raise ShimError("CREATE_HWCTX", errno.EINVAL, self.profile.errno_sign)
        arrays: dict[int, Array] = {}
        for index, kernel in enumerate(xclbin.kernels):
            for pdi in partition.pdis:
                if kernel.dpu_kernel_id in pdi.dpu_kernel_ids:
                    # A program that cannot be run is refused before a slot is taken.
                    arrays[index] = Array(
                        pdi.image, self.profile.dev_gen, self._plans, partition.column_width
                    )
                    break
        if not arrays:
            raise ValueError("No valid DPU kernel found in xclbin")
        with self.lock:
            self._check_here("CREATE_HWCTX")
            refusal = self.faults.of_context() if self.faults is not None else None
            if refusal is not None:
                raise ShimError("CREATE_HWCTX", *refusal)
            slot = self.table.acquire(self.slots)
            if slot is None:
                raise ShimError("CREATE_HWCTX", self.profile.no_slot_errno, self.profile.errno_sign)
            handle = next(self._handles) & (1 << SLOT_HANDLE_BITS) - 1
            context = Context(self, handle, slot, next(_serials), arrays)
            self.contexts.add(context)
            return context

    # -- commands -----------------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Queue a command; with the queue full, the oldest one runs first, as the ioctl blocks.

        Raises:
            ShimError: the context is gone or another process's, or the packet holds more buffers
                than the firmware's message.
        """
        context = command.context
        with self.lock:
            self._check_here("EXEC_CMD")
            if ert.payload_words(command.packet.words) > self.profile.payload_words:
                raise ShimError("EXEC_CMD", errno.EINVAL, self.profile.errno_sign)
            # The commands of a chain are one submission: they take one place together.
            last = context.queue[-1].chain if context.queue else None
            if last is None or last is not command.chain:
                while context.submissions() >= self.profile.max_commands:
                    self.finish(context.queue[0])
            if not context.usable:
                raise ShimError("EXEC_CMD", errno.ENOENT, self.profile.errno_sign)
            command.state = ert.QUEUED
            context.queue.append(command)
            self._progress_ms = self.clock_ms

    def finish(self, command: Command, timeout_ms: int = 0) -> bool:
        """Let the queue run until the command ends, or some virtual time; True if it ended.

        Raises:
            ShimError: the device is gone.
        """
        with self.lock:
            deadline_ms = self.clock_ms + timeout_ms if timeout_ms else None
            context = command.context
            while command.in_flight:
                head = context.queue[0]
                if head.hung_since_ms is None:
                    self._execute(context)
                    continue
                # The watchdog counts from the last progress of any command on the device.
                reset_ms = max(head.hung_since_ms, self._progress_ms) + self.profile.tdr_ms
                if deadline_ms is not None and deadline_ms < reset_ms:
                    self.clock_ms = deadline_ms
                    return False
                self.clock_ms = max(self.clock_ms, reset_ms)
                self._time_out(context)
            return True

    def poll(self, command: Command) -> int:
        """The command's state; looking takes a virtual millisecond, and lets the queue run.

        Raises:
            ShimError: the device is gone.
        """
        with self.lock:
            if command.in_flight:
                self.finish(command, timeout_ms=1)
            return command.state

    @staticmethod
    def _time_out(context: Context) -> None:
        """The watchdog: the head timed out, the rest is aborted, the context rebuilt."""
        context.queue.popleft().end(ert.TIMEOUT)
        for later in context.queue:
            later.end(ert.ABORT)
        context.queue.clear()
        context.reset()

    def _execute(self, context: Context) -> None:
        """Run the head of a queue, and what follows of its chain, to the end or where it hangs."""
        head = context.queue[0]
        if head.chain is not None and head.chain.failed:
            context.queue.popleft().end(ert.ABORT)
            return
        if self.table.take_the_array(context.serial):
            self.switches += 1
            context.reset()
        bound, wound, failed = self._bind_submission(context)
        done = self._compute(bound)
        if done == len(bound) and wound is not None:
            wound.deal()
        for command, _, _ in bound[:done]:
            self._end(command, ert.COMPLETED)
        if done < len(bound):
            failed = bound[done][0], Fault(-1, "this machine has no memory left to compute the run")
        if failed is not None:
            self._fail(*failed)

    def _bind_submission(
        self, context: Context
    ) -> tuple[list[Computable], Wound | None, tuple[Command, Fault | Stall] | None]:
        """The commands of the head's submission that can be computed now.

        Then what becomes of the last one's results, and the command that failed after it.

        Raises:
            ShimError: the device is gone.
        """
        bound: list[Computable] = []
        for command in context.next_submission():
            command.state = ert.RUNNING
            due = self.faults.of_run() if self.faults is not None else []
            if due and not self._keep_context(context, due):
                return [], None, None  # it has ended all of them
            try:
                wound = self._wound(command, due) if due else None
                bound.append((command, *self._bind(command)))
            except (Fault, Stall) as failure:
                # Without the traceback, whose frames keep the run, and with it the slot.
                return bound, None, (command, failure.with_traceback(None))
            if wound is not None:  # what follows in its chain must read the results it is left with
                return bound, wound, None
        return bound, None, None

    def _end(self, command: Command, state: int) -> None:
        command.end(state)
        if command in command.context.queue:  # unless its run was dropped meanwhile
            command.context.queue.remove(command)
        self._progress_ms = self.clock_ms

    def _fail(self, command: Command, failure: Fault | Stall) -> None:
        if isinstance(failure, Stall):
            command.hung_since_ms = self.clock_ms
        else:
            self._end(command, ert.ABORT if isinstance(failure, Aborted) else ert.ERROR)
            # How far it came is unknown: nothing in the tiles can be relied on.
            command.context.reset()
        self._note(command, failure)

    # -- planned faults -----------------------------------------------------------------------

    def _check_here(self, ioctl: str) -> None:
        if self.gone:
            raise ShimError(ioctl, errno.ENODEV, self.profile.errno_sign)

    def _keep_context(self, context: Context, due: Sequence[Planned]) -> bool:
        """Whether a run's context is still there after what happens to contexts before the run.

        Raises:
            ShimError: the device is gone, with all of them.
        """
        kinds = {planned.kind for planned in due}
        if "gone" in kinds:
            self.gone = True
            for each in list(self.contexts):
                each.destroy()
            self._check_here("WAIT_CMD")
        if "suspend" in kinds:
            for each in self.contexts:
                each.reset()
        if "lost" in kinds:
            context.destroy()
        return not context.destroyed

    def _wound(self, command: Command, due: Sequence[Planned]) -> Wound | None:
        """What becomes of a run's results.

        Raises:
            Fault, Stall: it has none.
        """
        assert self.faults is not None
        found = bindings_of(command)
        array = command.context.arrays[command.kernel_index]
        return self.faults.wound(due, array, stream_of(found), found.arguments)

    @staticmethod
    def _note(command: Command, failure: Fault | Stall) -> None:
        command.detail, command.txn_op_index = str(failure), failure.op_index
        log.warning("emulated NPU: op %d: %s", failure.op_index, command.detail)

    def _bind(self, command: Command) -> tuple[Array, Bound]:
        """A command's stream executed up to its computation, on the array it runs on."""
        found = bindings_of(command)
        if self.mode == "loose":
            for window in found.windows:
                window.memory.evict_lines()
        stream = stream_of(found)
        array = command.context.arrays[command.kernel_index]
        return array, array.bind(stream, found.arguments)

    def _compute(self, bound: Sequence[Computable]) -> int:
        """Compute commands in order; how many there was memory for."""
        done = 0
        for name, group in groupby(bound, key=lambda one: one[1].program_name):
            start = time.perf_counter()
            some = list(group)
            # Attentions that follow each other are computed together, GEMMs one by one.
            parts = [some] if name == ATTENTION else [[one] for one in some]
            try:
                for part in parts:
                    compute([of for _, _, of in part])
                    done += len(part)
            except MemoryError:
                return done
            finally:
                busy = self.busy_seconds.get(name, 0.0) + time.perf_counter() - start
                self.busy_seconds[name] = busy
        return done

    def abandon(self, command: Command) -> None:
        """Take a command out of its queue: nobody will ever wait for it."""
        with self.lock:
            if command in command.context.queue:
                command.context.queue.remove(command)
            command.end(ert.ABORT)
