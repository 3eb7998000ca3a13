"""Where the words of each opcode stand, in either version of the TXN encoding.

Source: xaie_txn.h of Xilinx/aie-rt and aie-codegen (the plain structs are version 0.1, the
"_opt" ones 1.0), and what mlir-aie and aiebu write.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .txn_ops import (
    BLOCKWRITE,
    CREATE_SCRATCHPAD,
    DDR_PATCH,
    LOAD_PM_START,
    LOADPDI,
    MASKPOLL,
    MASKPOLL_BUSY,
    MASKWRITE,
    MERGE_SYNC,
    NOOP,
    PREEMPT,
    READ_REGS,
    RECORD_TIMER,
    TCT,
    UPDATE_REG,
    UPDATE_SCRATCH,
    UPDATE_STATE_TABLE,
    WRITE,
    BlockWrite,
    DdrPatch,
    LoadPdi,
    MaskPoll,
    MaskWrite,
    Noop,
    Op,
    Other,
    Preempt,
    Sync,
    Write,
)


class Layout(NamedTuple):
    """How one opcode is laid out in one version.

    head_words: the words before any data. size_word: where in them the op's size in bytes stands;
    None for an op of fixed length. sizes: the only sizes accepted; none = head and any data.
    high_words: upper halves of 64-bit fields whose values fit 32 bits.
    """

    name: str
    head_words: int
    build: Callable[[tuple[int, ...], int], Op]
    size_word: int | None = None
    sizes: tuple[int, ...] = ()
    high_words: tuple[int, ...] = ()


def _write(raw: tuple[int, ...], at: int) -> Op:
    if len(raw) == 6:
        return Write(raw[2], raw[4], word=at, raw=raw)
    return Write(raw[1], raw[2], word=at, raw=raw)


def _block_write_0_1(raw: tuple[int, ...], at: int) -> Op:
    return BlockWrite(raw[2], raw[4:], word=at, raw=raw)


def _block_write_1_0(raw: tuple[int, ...], at: int) -> Op:
    return BlockWrite(raw[1], raw[3:], word=at, raw=raw)


def _masked(raw: tuple[int, ...], at: int) -> Op:
    register, value, mask = raw[1:4] if len(raw) == 4 else (raw[2], raw[4], raw[5])
    opcode = raw[0] & 0xFF
    if opcode == MASKWRITE:
        return MaskWrite(register, value, mask, word=at, raw=raw)
    return MaskPoll(register, value, mask, opcode == MASKPOLL_BUSY, word=at, raw=raw)


def _noop(raw: tuple[int, ...], at: int) -> Op:
    return Noop(word=at, raw=raw)


def _preempt(raw: tuple[int, ...], at: int) -> Op:
    return Preempt(raw[0] >> 8 & 0xFF, word=at, raw=raw)


def _load_pdi(raw: tuple[int, ...], at: int) -> Op:
    return LoadPdi(raw[0] >> 16, raw[1], raw[2] | raw[3] << 32, word=at, raw=raw)


def _sync(raw: tuple[int, ...], at: int) -> Op:
    first, second = raw[2:]
    return Sync(
        direction=first & 0xFF,
        row=first >> 8 & 0xFF,
        col=first >> 16 & 0xFF,
        nrow=second >> 8 & 0xFF,
        ncol=second >> 16 & 0xFF,
        channel=second >> 24,
        word=at,
        raw=raw,
    )


def _ddr_patch(raw: tuple[int, ...], at: int) -> Op:
    if len(raw) == 12:
        return DdrPatch(raw[6], raw[8], raw[10] | raw[11] << 32, word=at, raw=raw)
    return DdrPatch(raw[2], raw[3] & 0xFF, raw[4] | raw[5] << 32, word=at, raw=raw)


def _other(raw: tuple[int, ...], at: int) -> Op:
    opcode = raw[0] & 0xFF
    return Other(opcode, _COMMON[opcode].name, word=at, raw=raw)


_COMMON: Mapping[int, Layout] = {
    NOOP: Layout("NOOP", 1, _noop),
    PREEMPT: Layout("PREEMPT", 1, _preempt),
    LOADPDI: Layout("LOADPDI", 4, _load_pdi),
    LOAD_PM_START: Layout("LOAD_PM_START", 2, _other),
    CREATE_SCRATCHPAD: Layout("CREATE_SCRATCHPAD", 4, _other),
    UPDATE_STATE_TABLE: Layout("UPDATE_STATE_TABLE", 2, _other),
    UPDATE_REG: Layout("UPDATE_REG", 3, _other),
    UPDATE_SCRATCH: Layout("UPDATE_SCRATCH", 1, _other),
    TCT: Layout("TCT", 2, _sync, 1, (16,)),
    # Both forms occur inside either version: only the size tells them apart.
    DDR_PATCH: Layout("DDR_PATCH", 2, _ddr_patch, 1, (24, 48), (7, 9)),
    READ_REGS: Layout("READ_REGS", 2, _other, 1),
    RECORD_TIMER: Layout("RECORD_TIMER", 2, _other, 1),
    MERGE_SYNC: Layout("MERGE_SYNC", 2, _other, 1),
}

# mlir-aie writes masked ops without the 4 bytes of padding that aie-rt's struct ends in.
_MASKED_0_1 = (7, _masked, 6, (28, 32), (3,))

LAYOUTS: Mapping[tuple[int, int], Mapping[int, Layout]] = {
    (0, 1): {
        **_COMMON,
        WRITE: Layout("WRITE", 6, _write, 5, (24,), (3,)),
        BLOCKWRITE: Layout("BLOCKWRITE", 4, _block_write_0_1, 3),
        MASKWRITE: Layout("MASKWRITE", *_MASKED_0_1),
        MASKPOLL: Layout("MASKPOLL", *_MASKED_0_1),
        MASKPOLL_BUSY: Layout("MASKPOLL_BUSY", *_MASKED_0_1),
    },
    (1, 0): {
        **_COMMON,
        WRITE: Layout("WRITE", 3, _write),
        BLOCKWRITE: Layout("BLOCKWRITE", 3, _block_write_1_0, 2),
        MASKWRITE: Layout("MASKWRITE", 4, _masked),
        MASKPOLL: Layout("MASKPOLL", 4, _masked),
        MASKPOLL_BUSY: Layout("MASKPOLL_BUSY", 4, _masked),
    },
}
