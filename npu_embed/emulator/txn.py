"""TXN instruction streams: what the NPU's firmware executes, one op after another.

A stream writes registers of the array (buffer descriptors, queues, run-time words in core memory),
patches buffer addresses into descriptors and waits for completion tokens.

decode() reads what mlir-aie, aiebu and AMD's tools write; assemble() writes the form of mlir-aie.
All that is malformed raises TxnError and nothing else.
"""

from .txn_codec import Header, Stream, assemble, decode
from .txn_legacy import (
    LegacyOp,
    LegacyStream,
    LegacyWriteBd,
    decode_legacy,
    is_legacy,
)
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
    address,
    block_write,
    ddr_patch,
    mask_write,
    split_address,
    sync,
    write,
)
from .txn_text import disassemble, read_insts, register_name

__all__ = [
    "BlockWrite",
    "DdrPatch",
    "Header",
    "LegacyOp",
    "LegacyStream",
    "LegacyWriteBd",
    "LoadPdi",
    "MaskPoll",
    "MaskWrite",
    "Noop",
    "Op",
    "Other",
    "Preempt",
    "Stream",
    "Sync",
    "TxnError",
    "Write",
    "address",
    "assemble",
    "block_write",
    "ddr_patch",
    "decode",
    "decode_legacy",
    "disassemble",
    "is_legacy",
    "mask_write",
    "read_insts",
    "register_name",
    "split_address",
    "sync",
    "write",
]
