"""The two xclbins of a bundle: array programs by name, in the place of machine code.

Source: docs/array-programs.md, "The PDI" and the constants of each program.
"""

from __future__ import annotations

import json
import struct

from ..emulator import xclbin
from .geometry import (
    COLUMNS,
    CORE_ROWS,
    K_TILE,
    N_TILE,
    ROW_TILE,
    ROWS_PER_CORE,
    RTP_OFFSET,
    round_up,
)

KERNEL_NAME = "MLIR_AIE"

_PDI_MAGIC = bytes.fromhex("DD00000044332211")
_PROGRAM_MAGIC = b"NPUEMBED"
_FORMAT = 1
_PDI_ALIGN_BYTES = 64


def pdi_image(constants: dict[str, str | int]) -> bytes:
    """The PDI that names an array program and its compile-time constants."""
    text = json.dumps(constants, sort_keys=True, separators=(",", ":")).encode()
    image = _PDI_MAGIC + _PROGRAM_MAGIC + struct.pack("<II", _FORMAT, len(text)) + text
    return image.ljust(round_up(len(image), _PDI_ALIGN_BYTES), b"\0")


def gemm_xclbin() -> bytes:
    """The xclbin of the GEMM program; one serves every shape, which only the streams know."""
    constants: dict[str, str | int] = {
        "program": "gemm",
        "columns": COLUMNS,
        "core_rows": CORE_ROWS,
        "rows_per_core": ROWS_PER_CORE,
        "row_tile": ROW_TILE,
        "k_tile": K_TILE,
        "n_tile": N_TILE,
        "rtp_offset": RTP_OFFSET,
    }
    return _build("gemm", constants)


def mha_xclbin(heads: int, kv_heads: int, head_dim: int) -> bytes:
    """The xclbin of the MHA program for one head geometry.

    Raises:
        ValueError: heads is no multiple of kv_heads.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"mha xclbin: {heads} heads, wanted a multiple of kv_heads {kv_heads}")
    constants: dict[str, str | int] = {
        "program": "mha",
        "columns": COLUMNS,
        "core_rows": CORE_ROWS,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rtp_offset": RTP_OFFSET,
    }
    return _build("mha", constants)


def _build(name: str, constants: dict[str, str | int]) -> bytes:
    return xclbin.build(
        kernel_name=KERNEL_NAME,
        pdi_image=pdi_image(constants),
        column_width=COLUMNS,
        name=f"npu_embed_{name}",
    )
