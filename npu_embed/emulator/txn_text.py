"""Instruction streams as text: one readable line an op, and the text form of insts files."""

import re
from collections.abc import Iterator

import numpy as np

from .txn_codec import Stream
from .txn_legacy import LegacyStream, LegacyWriteBd
from .txn_ops import (
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
    TxnError,
    Write,
    split_address,
)

_HEX_WORD = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,8})")
_DIRECTIONS = {0: "S2MM", 1: "MM2S"}
_BD_BYTES = 0x20


def disassemble(stream: Stream | LegacyStream) -> Iterator[str]:
    """One line an op: index of its first word, mnemonic, tile (col,row), register, values."""
    # Streams older than TXN have no header; they are for arrays of one row of memory tiles.
    memtile_rows = stream.header.num_memtile_rows if isinstance(stream, Stream) else 1
    for op in stream.ops:
        if isinstance(op, LegacyWriteBd):
            mnemonic, details = _describe_legacy_bd(op)
        else:
            mnemonic, details = _describe(op, memtile_rows)
        yield f"{op.word:6d}  {mnemonic:<13} {details}".rstrip()


def register_name(address: int, *, num_memtile_rows: int = 1) -> str:
    """`(col,row) tile register` of an address; a register of unknown name by its offset.

    Source: AM025, the AIE-ML register reference; the shim and memory tile layouts of mlir-aie.
    """
    col, row, offset = split_address(address)
    if row == 0:
        tile, name = "shim", _shim_register(offset)
    elif row <= num_memtile_rows:
        tile, name = "memtile", _memtile_register(offset)
    else:
        tile, name = "core", _core_register(offset)
    return f"({col},{row}) {tile} {name or f'register {offset:#07x}'}"


def read_insts(data: bytes) -> bytes:
    """The stream's words as little endian bytes, from an insts file of either form.

    Text form: one hexadecimal word a line, # begins a comment. A file's name does not tell the
    form (many insts.txt are binary); a NUL byte does: every binary stream has one, no text.

    Raises:
        TxnError: a line is not a 32-bit hexadecimal word, the length is not a multiple of 4, or
            there is no word at all.
    """
    if b"\0" in data:
        if len(data) % 4:
            raise TxnError(
                f"insts file: {len(data)} bytes, wanted a multiple of 4; it is cut off, "
                "make or download it again.",
                word=len(data) // 4,
            )
        return data
    words: list[int] = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HEX_WORD.fullmatch(text)
        if match is None:
            raise TxnError(
                f"insts file, line {number}: {text[:40]!r}, wanted one 32-bit word in hexadecimal; "
                "pass the instruction file the compiler wrote.",
                word=len(words),
            )
        words.append(int(match[1], 16))
    if not words:
        raise TxnError("insts file: no words, wanted at least one; make or download it again.")
    return np.array(words, "<u4").tobytes()


def _describe(op: Op, memtile_rows: int) -> tuple[str, str]:
    """(mnemonic, details) of one op."""

    def name(address: int) -> str:
        return register_name(address, num_memtile_rows=memtile_rows)

    if isinstance(op, Write):
        register = name(op.address)
        note = _queue_push(op.value) if " shim queue " in register else ""
        return "WRITE", f"{register} = {op.value:#010x}{note}"
    if isinstance(op, BlockWrite):
        values = " ".join(f"{value:08x}" for value in op.data)
        return "BLOCKWRITE", f"{name(op.address)} = {len(op.data)} words: {values}"
    if isinstance(op, MaskWrite):
        return "MASKWRITE", f"{name(op.address)} = {op.value:#010x} mask {op.mask:#010x}"
    if isinstance(op, MaskPoll):
        mnemonic = "MASKPOLL_BUSY" if op.busy else "MASKPOLL"
        return mnemonic, f"{name(op.address)} == {op.value:#010x} mask {op.mask:#010x}"
    if isinstance(op, Sync):
        direction = _DIRECTIONS.get(op.direction, f"direction {op.direction} channel ")
        tiles = "" if op.ncol == op.nrow == 1 else f", {op.ncol} columns x {op.nrow} rows"
        return "SYNC", f"({op.col},{op.row}) {direction}{op.channel}{tiles}"
    if isinstance(op, DdrPatch):
        return "DDR_PATCH", f"{name(op.address)} = argument {op.arg_index} + {op.arg_plus:#x}"
    return _describe_control(op)


def _describe_legacy_bd(op: LegacyWriteBd) -> tuple[str, str]:
    """(mnemonic, details) of a descriptor write, which patches in its buffer's address itself."""
    values = " ".join(f"{value:08x}" for value in op.data)
    return "WRITEBD", f"({op.col},0) shim BD {op.bd_id} = argument {op.ddr_id}, 8 words: {values}"


def _describe_control(op: Noop | Preempt | LoadPdi | Other) -> tuple[str, str]:
    """(mnemonic, details) of an op that touches no register."""
    if isinstance(op, Noop):
        return "NOOP", ""
    if isinstance(op, Preempt):
        return "PREEMPT", f"level {op.level}"
    if isinstance(op, LoadPdi):
        return "LOADPDI", f"id {op.pdi_id}, {op.size_bytes} bytes at {op.address:#x}"
    return op.name, " ".join(f"{value:08x}" for value in op.raw[1:])


def _queue_push(value: int) -> str:
    """What a word pushed on a shim task queue starts."""
    token = ", token" if value >> 31 else ""
    return f" (BD {value & 0xF}, repeat {value >> 16 & 0xFF}{token})"


def _shim_register(offset: int) -> str | None:
    if 0x1D000 <= offset < 0x1D200:
        return _descriptor(offset - 0x1D000)
    if 0x1D200 <= offset < 0x1D220:
        channel = _channel(offset - 0x1D200, channels=2)
        return f"{'queue' if offset & 4 else 'control'} {channel}"
    if 0x1D220 <= offset < 0x1D230:
        word = (offset - 0x1D220) // 4
        return f"status {_DIRECTIONS[word // 2]}{word % 2}"
    if 0x14000 <= offset < 0x14100:
        return f"lock {(offset - 0x14000) // 0x10}"
    if offset in (0x1F000, 0x1F004):
        return "mux" if offset == 0x1F000 else "demux"
    return _stream_switch(offset)


def _memtile_register(offset: int) -> str | None:
    if offset < 0x80000:
        return f"memory +{offset:#x}"
    if 0xA0000 <= offset < 0xA0600:
        return _descriptor(offset - 0xA0000)
    if 0xA0600 <= offset < 0xA0660:
        channel = _channel(offset - 0xA0600, channels=6)
        return f"{'queue' if offset & 4 else 'control'} {channel}"
    return None


def _core_register(offset: int) -> str | None:
    if offset < 0x10000:
        return f"data memory +{offset:#x}"
    if 0x1D000 <= offset < 0x1D200:
        return _descriptor(offset - 0x1D000)
    if 0x20000 <= offset < 0x24000:
        return f"program memory +{offset - 0x20000:#x}"
    return _stream_switch(offset)


def _stream_switch(offset: int) -> str | None:
    return f"stream switch +{offset - 0x3F000:#x}" if 0x3F000 <= offset < 0x40000 else None


def _descriptor(offset: int) -> str:
    return f"BD {offset // _BD_BYTES} word {offset % _BD_BYTES // 4}"


def _channel(offset: int, *, channels: int) -> str:
    """`S2MM0`... of a channel register: all S2MM channels come first, 8 bytes each."""
    index = offset // 8
    return f"{_DIRECTIONS[index // channels]}{index % channels}"
