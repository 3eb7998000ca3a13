"""The command processor: executes an instruction stream into register writes and DMA flows.

The result of a stream is a pure function of its words and of the registers it reads without having
written them. An Execution therefore holds both, so that a stream seen before is not executed again
while what it read is unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import txn
from .dma import (
    BD_BASE,
    BD_BYTES,
    BD_COUNT,
    BD_WORDS,
    WORD_BYTES,
    BadDescriptor,
    Piece,
    decode_descriptor,
    pushed,
)

# Shim DMA channel control registers; a channel's task queue is the next word.
CHANNEL_CONTROL = {
    ("S2MM", 0): 0x1D200,
    ("S2MM", 1): 0x1D208,
    ("MM2S", 0): 0x1D210,
    ("MM2S", 1): 0x1D218,
}
QUEUES = {control + 4: channel for channel, control in CHANNEL_CONTROL.items()}
DIRECTIONS = ("S2MM", "MM2S")  # as a token's direction bit numbers them

CORE_DATA_BYTES = 0x10000
FIRST_CORE_ROW = 2
LAST_ROW = 5
RESET_MEMORY = 0xFFFFFFFF  # what a core reads from memory that nobody wrote since the last reset

# The firmware adds the array's view of DDR to the first five buffers; for later ones the
# compiler has folded it into the patch.
DDR_OFFSET = 0x80000000
FOLDED_FROM_ARG = 5

MAX_PIECES = 1 << 15  # of one run; whole streams of a few dozen are the rule

Channel = tuple[int, str, int]  # column, direction, number


def reset_value(address: int) -> int:
    """What a register or core memory word holds that nobody wrote since the last reset."""
    _, row, offset = txn.split_address(address)
    return RESET_MEMORY if row >= FIRST_CORE_ROW and offset < CORE_DATA_BYTES else 0


class Fault(Exception):
    """The run ends in state ERROR."""

    def __init__(self, op_index: int, text: str) -> None:
        super().__init__(text)
        self.op_index = op_index


class Stall(Exception):
    """The run never ends: the device times it out."""

    def __init__(self, op_index: int, text: str) -> None:
        super().__init__(text)
        self.op_index = op_index


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for results: `words` of a channel, when every channel was told to move `moved`."""

    op_index: int
    channel: Channel
    words: int
    moved: Mapping[Channel, int]


@dataclass(slots=True)
class Execution:
    """What executing a stream left behind.

    flows: the pieces each channel was told to move, in order. writes: registers and core memory
    written. entry_reads: what was read from before the stream, and had to be as it was for this
    result. waits: the waits for results, in order.
    """

    columns: int
    entry: Mapping[int, int]
    writes: dict[int, int] = field(default_factory=dict)
    entry_reads: dict[int, int] = field(default_factory=dict)
    flows: dict[Channel, list[Piece]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    num_ops: int = 0
    _addresses: dict[int, tuple[int, int]] = field(default_factory=dict)
    _moved: dict[Channel, int] = field(default_factory=dict)
    # Words a channel has moved in all when each of its tokens not taken yet comes.
    _tokens: dict[Channel, deque[int]] = field(default_factory=dict)
    _waited: dict[Channel, int] = field(default_factory=dict)
    _pieces: int = 0

    def read(self, address: int) -> int:
        """A register or core memory word as the stream left it."""
        if address in self.writes:
            return self.writes[address]
        value = self.entry.get(address, reset_value(address))
        self.entry_reads[address] = value
        return value

    def core_word(self, col: int, row: int, offset: int) -> int:
        """A word of a core's data memory; row 0 is the first core row."""
        return self.read(txn.address(col, FIRST_CORE_ROW + row, offset))

    def write(self, op_index: int, address: int, value: int) -> None:
        """One register write, with what it sets off."""
        col, row, offset = txn.split_address(address)
        if offset % WORD_BYTES:
            raise Fault(op_index, f"register address 0x{address:X}, wanted a multiple of 4")
        if col >= self.columns or row > LAST_ROW:
            raise Fault(
                op_index,
                f"address 0x{address:X} is tile ({col}, {row}), outside the partition of "
                f"{self.columns} columns and {LAST_ROW + 1} rows",
            )
        if row >= FIRST_CORE_ROW:
            if offset >= CORE_DATA_BYTES:
                raise Fault(op_index, f"core register 0x{offset:X} of ({col}, {row}) not emulated")
        elif row != 0 or not self._is_shim_dma(offset):
            raise Fault(op_index, f"register 0x{offset:X} of ({col}, {row}) is not emulated")
        elif offset in QUEUES:
            self._push(op_index, col, QUEUES[offset], value)
            return
        if row == 0:
            # A raw address, its low word or its high one, replaces a patched one.
            self._addresses.pop(address, None)
            self._addresses.pop(address - WORD_BYTES, None)
        self.writes[address] = value

    @staticmethod
    def _is_shim_dma(offset: int) -> bool:
        in_descriptors = BD_BASE <= offset < BD_BASE + BD_BYTES * BD_COUNT
        return in_descriptors or offset in QUEUES or offset in CHANNEL_CONTROL.values()

    def patch(self, op_index: int, op: txn.DdrPatch) -> None:
        """Put an argument's address into a descriptor."""
        col, row, offset = txn.split_address(op.address)
        bd, at = divmod(offset - BD_BASE, BD_BYTES)
        if row != 0 or not 0 <= bd < BD_COUNT or at != WORD_BYTES or col >= self.columns:
            raise Fault(
                op_index, f"address patch of 0x{op.address:X}, which is no shim descriptor's word 1"
            )
        plus = op.arg_plus
        if op.arg_index >= FOLDED_FROM_ARG:
            plus -= DDR_OFFSET
        if plus < 0 or plus % 4:
            raise Fault(op_index, f"address patch plus {plus} bytes, wanted a multiple of 4 >= 0")
        self.writes[op.address] = 0
        self._addresses[op.address] = (op.arg_index, plus // 4)

    def _push(self, op_index: int, col: int, channel: tuple[str, int], word: int) -> None:
        key = (col, *channel)
        flow = self.flows.setdefault(key, [])
        bd: int | None = word & 0xF
        chain: set[int] = set()
        while bd is not None:
            if bd in chain:
                raise Fault(op_index, f"descriptor {bd} of column {col} chains to itself")
            chain.add(bd)
            base = txn.address(col, 0, BD_BASE + BD_BYTES * bd)
            try:
                descriptor = decode_descriptor([self.read(base + 4 * i) for i in range(BD_WORDS)])
            except BadDescriptor as error:
                raise Fault(op_index, f"descriptor {bd} of column {col}: {error}") from None
            if base + 4 not in self._addresses:
                raise Fault(op_index, f"descriptor {bd} of column {col} has no argument's address")
            arg, offset = self._addresses[base + 4]
            repeats = (word >> 16 & 0xFF) + 1
            pieces = pushed(descriptor, arg, offset, repeats)
            self._pieces += len(pieces)
            if self._pieces > MAX_PIECES:
                raise Fault(op_index, f"more than {MAX_PIECES} pieces to move in one run")
            flow.extend(pieces)
            self._moved[key] = self._moved.get(key, 0) + descriptor.length * repeats
            current = (descriptor.iteration_current + repeats) % descriptor.iteration_size
            if current != descriptor.iteration_current:
                w6 = self.read(base + 24)
                self.writes[base + 24] = w6 & ~(0x3F << 26) | current << 26
            bd = descriptor.next_bd
        if word >> 31 & 1:
            self._tokens.setdefault(key, deque()).append(self._moved[key])

    def step(self, index: int, op: txn.Op) -> None:
        """Execute one operation."""
        if isinstance(op, txn.Write):
            self.write(index, op.address, op.value)
        elif isinstance(op, txn.BlockWrite):
            for i, value in enumerate(op.data):
                self.write(index, op.address + 4 * i, value)
        elif isinstance(op, txn.MaskWrite):
            old = self.read(op.address)
            self.write(index, op.address, old & ~op.mask | op.value & op.mask)
        elif isinstance(op, txn.DdrPatch):
            self.patch(index, op)
        elif isinstance(op, txn.Sync):
            self.sync(index, op)
        elif isinstance(op, txn.MaskPoll):
            self.poll(index, op)
        elif not isinstance(op, txn.Noop | txn.Preempt):
            raise Fault(index, f"{type(op).__name__} operations are not emulated")

    def sync(self, op_index: int, op: txn.Sync) -> None:
        """Take a token of each tile named; only the shim's DMA sends any."""
        direction = DIRECTIONS[op.direction & 1]
        if op.row != 0 or op.nrow > 1:
            raise Stall(op_index, f"waits for tokens of rows {op.row} to {op.row + op.nrow - 1}")
        for col in range(op.col, op.col + max(1, op.ncol)):
            key = (col, direction, op.channel)
            tokens = self._tokens.get(key)
            if not tokens:
                raise Stall(
                    op_index, f"waits for a token of {direction}{op.channel} of column {col}"
                )
            words = tokens.popleft()
            if direction == "S2MM":
                self._waited[key] = words
                self.waits.append(Wait(op_index, key, words, dict(self._moved)))

    def poll(self, op_index: int, op: txn.MaskPoll) -> None:
        """Wait until a register has a value."""
        if self.read(op.address) & op.mask != op.value:
            raise Stall(op_index, f"polls register 0x{op.address:X} for ever")

    def check_waited(self) -> None:
        """Every result must be waited for, or the run ends before its data is there."""
        for key, words in self._moved.items():
            col, direction, number = key
            waited = self._waited.get(key, 0)
            if direction == "S2MM" and waited < words:
                raise Fault(
                    self.num_ops,
                    f"only {waited} of the {words} words of S2MM{number} of column {col} are "
                    "waited for; the run would end before its results are in memory",
                )


def execute(run: Execution, stream: txn.Stream, *, dev_gen: int) -> None:
    """Execute a stream on an array in the state of `run.entry`; nothing is moved yet.

    Raises:
        Fault: the stream would end in state ERROR.
        Stall: the stream would wait for ever.
    """
    if stream.header.dev_gen != dev_gen:
        raise Fault(
            -1, f"stream for device generation {stream.header.dev_gen}, this NPU is {dev_gen}"
        )
    for index, op in enumerate(stream.ops):
        run.step(index, op)
    run.check_waited()
