"""Streams made by hand, word by word, and an array to run them.

Nothing here uses the exporter: what it and the emulator both got wrong must show.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import txn
from npu_embed.emulator.array import Array, PlanCache, compute
from npu_embed.emulator.flows import Argument
from npu_embed.emulator.memory import Memory

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]

DEV_GEN = 4
RTP_OFFSET = 1024
NO_WINDOW = 0xFFFFFFFF
QUEUES = {"S2MM0": 0x1D204, "S2MM1": 0x1D20C, "MM2S0": 0x1D214, "MM2S1": 0x1D21C}
TOKEN = 1 << 31

BF16_HALF_ULP = 2.0**-8  # relative: 8 significant bits
F32_ULP = 2.0**-23


def pdi(**constants: object) -> bytes:
    """A PDI that names an array program."""
    text = json.dumps(constants, sort_keys=True).encode()
    return bytes.fromhex("DD00000044332211") + b"NPUEMBED" + struct.pack("<II", 1, len(text)) + text


def bd(
    length: int,
    d0: tuple[int, int] = (0, 1),
    d1: tuple[int, int] = (0, 1),
    d2_stride: int = 1,
    iteration: tuple[int, int] = (1, 1),
    current: int = 0,
    next_bd: int | None = None,
) -> list[int]:
    """The eight words of a shim descriptor; (size, stride) pairs in 32-bit words."""
    return [
        length,
        0,
        0,
        d0[0] << 20 | d0[1] - 1,
        d1[0] << 20 | d1[1] - 1,
        d2_stride - 1,
        current << 26 | iteration[0] - 1 << 20 | iteration[1] - 1,
        1 << 25 | (0 if next_bd is None else next_bd << 27 | 1 << 26),
    ]


def bd_address(col: int, bd_id: int, word: int = 0) -> int:
    """The register of a descriptor's word."""
    return txn.address(col, 0, 0x1D000 + 0x20 * bd_id + 4 * word)


@dataclass(frozen=True)
class Push:
    """A descriptor, its buffer, and the channel that is told to move it."""

    col: int
    channel: str
    arg: int
    words: Sequence[int]
    offset_bytes: int = 0
    repeat: int = 1
    bd_id: int = 0
    token: bool | None = None  # None: where results leave the array

    def ops(self) -> Iterator[txn.Op]:
        """Descriptor, address, queue."""
        yield txn.block_write(bd_address(self.col, self.bd_id), self.words)
        yield txn.ddr_patch(bd_address(self.col, self.bd_id, 1), self.arg, self.offset_bytes)
        token = self.channel.startswith("S2MM") if self.token is None else self.token
        value = self.bd_id | self.repeat - 1 << 16 | (TOKEN if token else 0)
        yield txn.write(txn.address(self.col, 0, QUEUES[self.channel]), value)


def rtp(col: int, row: int, word: int, value: int) -> txn.Op:
    """A run-time word of core row `row`."""
    return txn.write(txn.address(col, 2 + row, RTP_OFFSET + 4 * word), value)


def wait(col: int, channel: int = 0) -> txn.Op:
    """A wait for a token of the column's S2MM channel."""
    return txn.sync(direction=0, row=0, col=col, nrow=1, ncol=1, channel=channel)


def assemble(ops: Iterable[txn.Op], dev_gen: int = DEV_GEN) -> bytes:
    """The stream's bytes."""
    return txn.assemble(ops, dev_gen=dev_gen, num_cols=8).encode()


def ramp(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> F32:
    """Random values that bf16 holds exactly."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * scale
    return to_f32(to_bf16(values.astype(np.float32)))


@dataclass
class Buffers:
    """Kernel arguments as the array sees them: bf16 memory, already synced."""

    loose: Any = None
    arguments: list[Argument] = field(default_factory=list)

    def add(self, content: NDArray[Any]) -> int:
        """A buffer with this content; its argument index."""
        memory = Memory(content.nbytes, self.loose)
        memory.host[:] = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        memory.sync_to_device(0, content.nbytes)
        self.arguments.append(Argument(memory, 0, content.nbytes))
        return len(self.arguments) - 1

    def bits(self, index: int) -> U16:
        """The device's side of a buffer, as bf16 bits."""
        side: U16 = self.arguments[index].memory.device.view(np.uint16).copy()
        return side


class Bench:
    """One partition with an array program, without a driver around it."""

    def __init__(self, columns: int = 4, **constants: object) -> None:
        image = pdi(columns=columns, rtp_offset=RTP_OFFSET, **constants)
        self.array = Array(image, DEV_GEN, PlanCache(), columns)

    def run(self, ops: Iterable[txn.Op], buffers: Buffers) -> None:
        """Execute a stream of these ops."""
        compute([self.array.bind(assemble(ops), buffers.arguments)])
