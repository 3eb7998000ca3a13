"""The instruction streams older than TXN ("npu" or "ipu" sequences), decoded only.

A fixed prolog of 17 words, which hand-written text files leave out, then ops with the opcode in the
top byte of their first word. There is no header: the stream ends where the data does.

Source: mlir-aie's AIETargetIPU.cpp of 2023 and 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .txn_codec import Data, as_words, decode
from .txn_ops import Sync, TxnError, Write, address

_PROLOG = (
    *(0x00000011, 0x01000405, 0x01000100, 0x0B590100, 0x000055FF, 0x00000001),
    *(0x00000010, 0x314E5A5F, 0x635F5F31, 0x676E696C, 0x39354E5F, 0x6E693131),
    *(0x5F727473, 0x64726F77, 0x00004573, 0x07BD9630, 0x000055FF),
)
_WRITE32 = 2
_SYNC = 3
_WRITE_BD = 6
_OP_WORDS = {_WRITE32: 3, _SYNC: 2, _WRITE_BD: 10}


@dataclass(frozen=True, slots=True)
class LegacyWriteBd:
    """A shim buffer descriptor = data, its address taken from buffer argument ddr_id.

    data: the descriptor's 8 words; data[1] is the offset in bytes into the buffer.
    """

    word: int
    raw: tuple[int, ...]
    col: int
    ncol: int
    ddr_id: int
    bd_id: int
    address_increment: int
    data: tuple[int, ...]


LegacyOp: TypeAlias = Write | Sync | LegacyWriteBd


@dataclass(frozen=True, slots=True)
class LegacyStream:
    """A decoded stream of the form older than TXN; prolog holds 17 words or none."""

    prolog: tuple[int, ...]
    ops: tuple[LegacyOp, ...]


def decode_legacy(data: Data) -> LegacyStream:
    """The stream in `data`, with or without the prolog; word indices count from the first word.

    Raises:
        TxnError: an opcode is unknown, an op is cut off, or there is no op.
    """
    words: list[int] = as_words(data).tolist()
    prolog = tuple(words[: len(_PROLOG)]) if _has_prolog(words) else ()
    ops: list[LegacyOp] = []
    at = len(prolog)
    while at < len(words):
        opcode = words[at] >> 24
        length = _OP_WORDS.get(opcode)
        if length is None:
            raise TxnError(
                f"op {len(ops)} at word {at}: unknown legacy opcode {opcode}, wanted 2, 3 or 6; "
                "make the stream anew with a compiler that writes TXN.",
                op_index=len(ops),
                word=at,
            )
        raw = tuple(words[at : at + length])
        if len(raw) < length:
            raise TxnError(
                f"op {len(ops)} at word {at}: {len(raw)} words, wanted {length}; "
                "the stream is cut off, make or download it again.",
                op_index=len(ops),
                word=at,
            )
        ops.append(_decode_op(opcode, raw, at))
        at += length
    if not ops:
        raise TxnError("legacy stream: no ops, wanted at least one; make it anew.", word=at)
    return LegacyStream(prolog, tuple(ops))


def is_legacy(data: Data) -> bool:
    """Whether `data` is a stream older than TXN: not valid as TXN, and valid as one of these.

    The first word alone does not tell: 0x06030100 begins a TXN stream and is a legacy BD write.
    """
    for read, answer in ((decode, False), (decode_legacy, True)):
        try:
            read(data)
        except TxnError:
            continue
        return answer
    return False


def _has_prolog(words: Sequence[int]) -> bool:
    return tuple(words[: len(_PROLOG)]) == _PROLOG


def _decode_op(opcode: int, raw: tuple[int, ...], at: int) -> LegacyOp:
    """One op; WRITE32 and SYNC mean what Write and Sync of TXN mean."""
    first = raw[0]
    col = first >> 16 & 0xFF
    row = first >> 8 & 0xFF
    if opcode == _WRITE32:
        # The offset may repeat tile bits above bit 19; the op's own column and row win.
        register = address(col & 0x7F, row & 0x1F, raw[1] & 0xFFFFF)
        return Write(register, raw[2], word=at, raw=raw)
    if opcode == _SYNC:
        second = raw[1]
        return Sync(
            direction=first & 0xFF,
            row=row,
            col=col,
            nrow=second >> 8 & 0xFF,
            ncol=second >> 16 & 0xFF,
            channel=second >> 24,
            word=at,
            raw=raw,
        )
    return LegacyWriteBd(
        word=at,
        raw=raw,
        col=col,
        ncol=row,
        ddr_id=first >> 4 & 0xF,
        bd_id=first & 0xF,
        address_increment=raw[1],
        data=raw[2:],
    )
