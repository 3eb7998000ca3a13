"""What the driver keeps of a program: contexts, the commands in their queues, its refusals."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from . import ert
from .array import Array
from .flows import Argument
from .memory import Memory
from .xclbin import KernelInfo

if TYPE_CHECKING:
    from .hardware import EmulatedNpu


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


@dataclass(frozen=True, slots=True)
class Bindings:
    """A packet read by the device: the stream's buffer, the count beside it, buffer arguments."""

    stream: Window | None
    count: int | None
    arguments: tuple[Argument, ...]
    windows: tuple[Window, ...]  # all there are, in the packet's order


@dataclass(slots=True, eq=False)
class Packet:
    """A start packet and the buffers its ioctl names, by argument index; made once for many starts.

    bindings: what the device made of it when it first ran.
    """

    words: bytes
    windows: Mapping[int, Window]
    bindings: Bindings | None = None


@dataclass(slots=True, eq=False)
class Chain:
    """Commands submitted as one: after the first that fails, the others are aborted."""

    failed: bool = False


@dataclass(slots=True, eq=False)
class Command:
    """A submitted packet."""

    context: Context
    kernel_index: int
    kernel: KernelInfo
    packet: Packet
    chain: Chain | None = None
    state: int = ert.NEW
    detail: str = ""
    txn_op_index: int = -1
    hung_since_ms: int | None = None

    @property
    def in_flight(self) -> bool:
        """Submitted, and not ended yet."""
        return self.state in (ert.QUEUED, ert.RUNNING)

    def end(self, state: int) -> None:
        """Note the state it ended in."""
        self.state = state
        self.hung_since_ms = None
        if self.chain is not None and state != ert.COMPLETED:
            self.chain.failed = True


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
    pid: int = field(default_factory=os.getpid)

    @property
    def usable(self) -> bool:
        """Whether this process may submit to it: a forked child may not use its parent's."""
        return not self.destroyed and self.pid == os.getpid()

    def submissions(self) -> int:
        """How many submissions are queued; the commands of a chain are one."""
        return len({id(c if c.chain is None else c.chain) for c in self.queue})

    def next_submission(self) -> list[Command]:
        """The head of the queue, and what follows of its chain."""
        head = self.queue[0]
        if head.chain is None:
            return [head]
        return list(takewhile(lambda command: command.chain is head.chain, self.queue))

    def reset(self) -> None:
        """Lose registers and core memory."""
        for array in self.arrays.values():
            array.reset()

    def destroy(self) -> None:
        """Give the slot back; queued commands are aborted. A forked child's copy frees nothing."""
        if self.destroyed:
            return
        self.destroyed = True
        for command in self.queue:
            command.end(ert.ABORT)
        self.queue.clear()
        self.npu.table.release(self.slot)
        self.npu.contexts.discard(self)
