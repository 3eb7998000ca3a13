"""Ops of a TXN instruction stream, and the constructors of those this package writes.

An op keeps its words verbatim in `raw`, reserved ones included, because files of other tools hold
uninitialised bytes there and must survive a round trip. The named fields are what those words mean.
A changed op is therefore made anew by a constructor, not with dataclasses.replace.

Source: XAie_TxnHeader and its op structs in Xilinx/aie-rt and aie-codegen, xaie_txn.h.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

WRITE = 0x00
BLOCKWRITE = 0x01
MASKWRITE = 0x03
MASKPOLL = 0x04
NOOP = 0x05
PREEMPT = 0x06
MASKPOLL_BUSY = 0x07
LOADPDI = 0x08
LOAD_PM_START = 0x09
CREATE_SCRATCHPAD = 0x0A
UPDATE_STATE_TABLE = 0x0B
UPDATE_REG = 0x0C
UPDATE_SCRATCH = 0x0D
TCT = 0x80
DDR_PATCH = 0x81
READ_REGS = 0x82
RECORD_TIMER = 0x83
MERGE_SYNC = 0x84

_COLUMN_SHIFT = 25
_ROW_SHIFT = 20
_OFFSET_MASK = 0xFFFFF


class TxnError(ValueError):
    """An instruction stream, or a word meant for one, is malformed.

    op_index counts the stream's ops from 0; -1 where no op is at fault (the header, the file).
    word is the index of the word at fault, counted from the first word of the data (of the op, for
    an op not yet in a stream).
    """

    def __init__(self, message: str, *, op_index: int = -1, word: int = 0) -> None:
        super().__init__(message)
        self.op_index = op_index
        self.word = word


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """What every op has: the index of its first word in the stream, and its words verbatim."""

    word: int
    raw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write(_Encoded):
    """Register at `address` = value."""

    address: int
    value: int

    @property
    def value_word(self) -> int:
        """Index of the value's word in the stream: the word to patch."""
        return self.word + (4 if len(self.raw) == 6 else 2)


@dataclass(frozen=True, slots=True)
class BlockWrite(_Encoded):
    """Consecutive registers from `address` on = data."""

    address: int
    data: tuple[int, ...]

    @property
    def data_word(self) -> int:
        """Index of data[0] in the stream."""
        return self.word + len(self.raw) - len(self.data)


@dataclass(frozen=True, slots=True)
class MaskWrite(_Encoded):
    """Register at `address` = (register & ~mask) | (value & mask)."""

    address: int
    value: int
    mask: int


@dataclass(frozen=True, slots=True)
class MaskPoll(_Encoded):
    """Wait until (register & mask) == value; `busy` for the MASKPOLL_BUSY opcode."""

    address: int
    value: int
    mask: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Noop(_Encoded):
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Preempt(_Encoded):
    """A point where the firmware may switch contexts.

    level, what it saves: 0 nothing, 1 memory tiles, 2 core tiles, 3 registers.
    """

    level: int


@dataclass(frozen=True, slots=True)
class LoadPdi(_Encoded):
    """Configure the array from another PDI."""

    pdi_id: int
    size_bytes: int
    address: int


@dataclass(frozen=True, slots=True)
class Sync(_Encoded):
    """Wait for a completion token of one channel in each tile of a rectangle.

    direction: 0 S2MM (results out), 1 MM2S (data in). The rectangle begins at (col, row).
    """

    direction: int
    row: int
    col: int
    nrow: int
    ncol: int
    channel: int


@dataclass(frozen=True, slots=True)
class DdrPatch(_Encoded):
    """The 48-bit address in the BD words at `address` = address of a buffer argument + arg_plus.

    arg_index counts buffer arguments from bo0; arg_plus is in bytes.
    """

    address: int
    arg_index: int
    arg_plus: int


@dataclass(frozen=True, slots=True)
class Other(_Encoded):
    """A known op whose meaning is not decoded (newer firmware, profiling)."""

    opcode: int
    name: str


Op: TypeAlias = (
    Write | BlockWrite | MaskWrite | MaskPoll | Noop | Preempt | LoadPdi | Sync | DdrPatch | Other
)


def address(col: int, row: int, offset: int) -> int:
    """The register's address in the array: col << 25 | row << 20 | offset.

    Raises:
        TxnError: col is not in 0..127, row in 0..31 or offset in 20 bits.
    """
    return (
        _field(col, 7, "column", 0) << _COLUMN_SHIFT
        | _field(row, 5, "row", 0) << _ROW_SHIFT
        | _field(offset, 20, "register offset", 0)
    )


def split_address(register: int) -> tuple[int, int, int]:
    """(col, row, offset) of a register's address."""
    return (
        register >> _COLUMN_SHIFT,
        register >> _ROW_SHIFT & 0x1F,
        register & _OFFSET_MASK,
    )


def write(address: int, value: int) -> Write:
    """A WRITE in its version 0.1 form, 6 words."""
    address, value = _field(address, 32, "address", 2), _field(value, 32, "value", 4)
    return Write(address, value, word=0, raw=(WRITE, 0, address, 0, value, 24))


def block_write(address: int, data: Iterable[SupportsIndex]) -> BlockWrite:
    """A BLOCKWRITE in its version 0.1 form, 4 words and the data (32-bit words)."""
    address = _field(address, 32, "address", 2)
    words = tuple(_field(value, 32, "data", 4 + i) for i, value in enumerate(data))
    raw = (BLOCKWRITE, 0, address, 16 + 4 * len(words), *words)
    return BlockWrite(address, words, word=0, raw=raw)


def mask_write(address: int, value: int, mask: int) -> MaskWrite:
    """A MASKWRITE in its version 0.1 form, 7 words."""
    address = _field(address, 32, "address", 2)
    value, mask = _field(value, 32, "value", 4), _field(mask, 32, "mask", 5)
    return MaskWrite(address, value, mask, word=0, raw=(MASKWRITE, 0, address, 0, value, mask, 28))


def sync(direction: int, row: int, col: int, nrow: int, ncol: int, channel: int) -> Sync:
    """A TCT sync, 4 words: wait for tokens of `channel` in nrow x ncol tiles from (col, row) on."""
    direction = _field(direction, 1, "direction", 2)
    row, col = _field(row, 8, "row", 2), _field(col, 8, "column", 2)
    nrow, ncol = _field(nrow, 8, "nrow", 3), _field(ncol, 8, "ncol", 3)
    channel = _field(channel, 8, "channel", 3)
    first = direction | row << 8 | col << 16
    second = nrow << 8 | ncol << 16 | channel << 24
    return Sync(direction, row, col, nrow, ncol, channel, word=0, raw=(TCT, 16, first, second))


def ddr_patch(address: int, arg_index: int, arg_plus: int) -> DdrPatch:
    """A DDR_PATCH in its 48-byte form, 12 words; `address` is that of the BD's word 1."""
    address = _field(address, 32, "address", 6)
    arg_index = _field(arg_index, 32, "argument index", 8)
    arg_plus = _field(arg_plus, 48, "argument offset", 10)
    low, high = arg_plus & 0xFFFFFFFF, arg_plus >> 32
    raw = (DDR_PATCH, 48, 0, 0, 0, 0, address, 0, arg_index, 0, low, high)
    return DdrPatch(address, arg_index, arg_plus, word=0, raw=raw)


def _field(value: SupportsIndex, bits: int, what: str, word: int) -> int:
    """The value as a plain int of at most `bits` bits; NumPy integers are welcome.

    Raises:
        TxnError: the value does not fit.
    """
    number = operator.index(value)
    if not 0 <= number < 1 << bits:
        raise TxnError(
            f"{what}: found {number}, wanted 0 to {(1 << bits) - 1}; pass an unsigned value.",
            word=word,
        )
    return number
