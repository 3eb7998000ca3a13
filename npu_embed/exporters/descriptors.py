"""Shim buffer descriptors and what it takes to run one: the words and ops of a stream.

The shim's registers are the hardware's own: eight words a descriptor, a task queue a channel, a
completion token where one is asked for. A field that does not fit is refused here, by name, since
the hardware would silently take its low bits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from ..emulator import txn

BD_BASE, BD_BYTES = 0x1D000, 0x20
CONTROLLER_ID_MASK, CONTROLLER_ID = 0x1F00, 0x0F00  # as the hardware's own compiler sets it
ISSUE_TOKEN = 1 << 31
VALID = 1 << 25
BURST_256_BYTES = 2 << 30

MAX_SIZE = (1 << 10) - 1
MAX_STRIDE = 1 << 20  # stored minus one
MAX_ITERATIONS = 1 << 6  # stored minus one
MAX_REPEAT = 1 << 8  # stored minus one
MAX_LENGTH = (1 << 32) - 1


class Channel(enum.Enum):
    """A shim DMA channel; the value is its control register, the queue follows 4 bytes on."""

    S2MM0 = 0x1D200
    MM2S0 = 0x1D210
    MM2S1 = 0x1D218

    @property
    def queue(self) -> int:
        """Offset of the task queue register."""
        return self.value + 4

    @property
    def writes_memory(self) -> bool:
        """Whether data leaves the array here (S2MM: stream to memory)."""
        return self is Channel.S2MM0


def check_field(name: str, value: int, lowest: int, highest: int) -> None:
    """Refuse a value outside lowest..highest.

    Raises:
        ValueError: naming field, value and limits.
    """
    if not lowest <= value <= highest:
        raise ValueError(f"descriptor: {name} is {value}, wanted {lowest} to {highest}")


@dataclass(frozen=True, slots=True)
class ShimBd:
    """Which words of a buffer move, in which order; all in 32-bit words.

    Each push moves length words, dimension 0 innermost; size 0 = no such dimension (d0_size 0 =
    linear). d2 has no size, it runs until length is spent. Push number i of a repeat begins
    (i modulo iterations) * iteration_stride words on.
    """

    length: int
    d0_size: int = 0
    d0_stride: int = 1
    d1_size: int = 0
    d1_stride: int = 1
    d2_stride: int = 1
    iterations: int = 1
    iteration_stride: int = 1

    def __post_init__(self) -> None:
        check_field("length", self.length, 1, MAX_LENGTH)
        check_field("d0_size", self.d0_size, 0, MAX_SIZE)
        check_field("d1_size", self.d1_size, 0, MAX_SIZE)
        check_field("d0_stride", self.d0_stride, 1, MAX_STRIDE)
        check_field("d1_stride", self.d1_stride, 1, MAX_STRIDE)
        check_field("d2_stride", self.d2_stride, 1, MAX_STRIDE)
        check_field("iterations", self.iterations, 1, MAX_ITERATIONS)
        check_field("iteration_stride", self.iteration_stride, 1, MAX_STRIDE)

    def words(self) -> tuple[int, ...]:
        """The eight register words; the address in word 1 is left to a patch."""
        return (
            self.length,
            0,
            0,
            self.d0_size << 20 | (self.d0_stride - 1),
            BURST_256_BYTES | self.d1_size << 20 | (self.d1_stride - 1),
            self.d2_stride - 1,
            (self.iterations - 1) << 20 | (self.iteration_stride - 1),
            VALID,
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """One descriptor of one column, tied to a kernel argument and pushed `repeat` times."""

    col: int
    channel: Channel
    bd_id: int
    bd: ShimBd
    arg_index: int
    offset_bytes: int
    repeat: int = 1

    def ops(self) -> Iterator[txn.Op]:
        """Descriptor, address patch, controller id where a token comes back, queue push."""
        check_field("bd_id", self.bd_id, 0, 15)
        check_field("repeat", self.repeat, 1, MAX_REPEAT)
        check_field("offset_bytes", self.offset_bytes, 0, (1 << 48) - 1)
        base = BD_BASE + BD_BYTES * self.bd_id
        yield txn.block_write(txn.address(self.col, 0, base), self.bd.words())
        yield txn.ddr_patch(txn.address(self.col, 0, base + 4), self.arg_index, self.offset_bytes)
        push = self.bd_id | (self.repeat - 1) << 16
        if self.channel.writes_memory:
            push |= ISSUE_TOKEN
            control = txn.address(self.col, 0, self.channel.value)
            yield txn.mask_write(control, CONTROLLER_ID, CONTROLLER_ID_MASK)
        yield txn.write(txn.address(self.col, 0, self.channel.queue), push)


def wait_for_results(col: int) -> txn.Op:
    """Wait for the token of what column col's S2MM0 was last pushed."""
    return txn.sync(direction=0, row=0, col=col, nrow=1, ncol=1, channel=0)
