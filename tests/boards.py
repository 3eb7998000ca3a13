"""A device with a kernel that copies, through pyxrt's API: the emulated NPU's or a real one's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from handmade import DEV_GEN, RTP_OFFSET, pdi, ramp
from handmade_gemm import Gemm, Tiles, packed

from npu_embed.bf16 import to_bf16
from npu_embed.emulator import txn, xclbin

# pyxrt's objects: its own stub files are wrong in places, so nothing is promised about them.
Xrt: TypeAlias = Any

OPCODE = 3
INSTR, NINSTR, FIRST_BUFFER = 1, 2, 3


@dataclass(frozen=True)
class Design:
    """A compiled kernel that copies its first buffer: files, operands, and what comes out."""

    xclbin: Path
    kernel: str
    insts: bytes
    inputs: dict[int, bytes]  # by argument index
    output: int
    wanted: bytes

    @property
    def hanging(self) -> bytes:
        """The same stream, with a wait at its end for a token that never comes."""
        stream = txn.decode(self.insts)
        wait = txn.sync(direction=0, row=0, col=0, nrow=1, ncol=1, channel=0)
        header = stream.header
        return txn.assemble(
            [*stream.ops, wait], dev_gen=header.dev_gen, num_cols=header.num_cols
        ).encode()


TILES = Tiles(columns=4, core_rows=1, rows_per_core=16, k_tile=16, n_tile=16)
COPY = Gemm(TILES, chunks=1, k_blocks=1, n_blocks=(1,), bias=False)


def copying_xclbin(buffers: int = 5, columns: int = 4) -> bytes:
    """An xclbin with the small GEMM program; C = A where B is the identity."""
    image = pdi(
        program="gemm",
        columns=columns,
        core_rows=TILES.core_rows,
        rows_per_core=TILES.rows_per_core,
        k_tile=TILES.k_tile,
        n_tile=TILES.n_tile,
        rtp_offset=RTP_OFFSET,
    )
    return xclbin.build(pdi_image=image, column_width=columns, buffers=buffers)


def copying_design(folder: Path) -> Design:
    """The emulated NPU's copying kernel, its xclbin written into the folder."""
    path = folder / "copy.xclbin"
    path.write_bytes(copying_xclbin())
    insts = txn.assemble(COPY.ops(), dev_gen=DEV_GEN, num_cols=8).encode()
    a = to_bf16(ramp((COPY.rows, COPY.k), 7)).tobytes()
    identity = packed(np.eye(COPY.k, dtype=np.float32), None, TILES).tobytes()
    return Design(path, "MLIR_AIE", insts, {3: a, 4: identity}, 5, a)


class Loaded:
    """A kernel in a context of its own, with its buffers filled and synced."""

    def __init__(self, xrt: Xrt, device: Xrt, design: Design, insts: bytes | None = None) -> None:
        self.xrt, self.device, self.design = xrt, device, design
        file = xrt.xclbin(str(design.xclbin))
        uuid = device.register_xclbin(file)
        self.context = xrt.hw_context(device, uuid)
        self.kernel = xrt.kernel(self.context, design.kernel)
        self.insts = self.instructions(design.insts if insts is None else insts)
        self.bos = {i: self.buffer(i, content) for i, content in design.inputs.items()}
        self.bos[design.output] = self.buffer(design.output, bytes(len(design.wanted)))

    @property
    def to_device(self) -> Xrt:
        return self.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE

    @property
    def from_device(self) -> Xrt:
        return self.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE

    def instructions(self, insts: bytes) -> Xrt:
        """A synced instruction buffer."""
        flags = self.xrt.bo.cacheable
        bo = self.xrt.bo(self.device, len(insts), flags, self.kernel.group_id(INSTR))
        bo.write(insts, 0)
        bo.sync(self.to_device)
        return bo

    def buffer(self, index: int, content: bytes) -> Xrt:
        """A synced data buffer for an argument."""
        flags, group = self.xrt.bo.host_only, self.kernel.group_id(index)
        bo = self.xrt.bo(self.device, len(content), flags, group)
        bo.write(content, 0)
        bo.sync(self.to_device)
        return bo

    def run(self, insts: bytes | None = None) -> Xrt:
        """A run with all arguments set, not started; of other instructions if given."""
        bo = self.insts if insts is None else self.instructions(insts)
        run = self.xrt.run(self.kernel)
        for index, value in {0: OPCODE, INSTR: bo, NINSTR: bo.size() // 4, **self.bos}.items():
            run.set_arg(index, value)
        return run

    def clear(self) -> None:
        """Forget the last results, on both sides."""
        out = self.bos[self.design.output]
        out.write(bytes(out.size()), 0)
        out.sync(self.to_device)

    def result(self) -> bytes:
        """What the kernel wrote."""
        out = self.bos[self.design.output]
        out.sync(self.from_device)
        return bytes(out.map()[: len(self.design.wanted)])
