"""What a run computes with: bf16 numbers as float64, packed weights unpacked, and by which formula.

Source: docs/array-programs.md. Nothing here is shared with the emulator's arithmetic or with the
exporter's packing, so that a mistake of theirs shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..containers import array_program
from ..errors import InputError
from ..manifest import Record
from ..specs import GemmSpec, MhaSpec

F64 = NDArray[np.float64]

EPILOGUES = ("none", "gelu_erf", "gelu_tanh", "geglu_pair", "tanh")
OCTET = 8


@dataclass(frozen=True, slots=True)
class GemmFormula:
    """What a GEMM's record and xclbin say of it."""

    K: int
    N: int
    n_out: int
    k_tile: int
    n_tile: int
    epilogue: str
    bias: bool


@dataclass(frozen=True, slots=True)
class MhaFormula:
    """The heads of an attention, side by side in a row: q's, k's, v's."""

    heads: int
    kv_heads: int
    head_dim: int


def gemm_formula(bundle: Bundle, spec: GemmSpec) -> GemmFormula:
    """What a GEMM computes.

    Raises:
        InputError: its record or its xclbin does not say so.
    """
    record = _record(bundle, spec.line)
    epilogue = record.get("epilogue") if record.has("epilogue") else ""
    if epilogue not in EPILOGUES or not record.has("bias"):
        raise InputError(f"gemm {spec.key}: its record does not say epilogue= and bias=")
    constants = array_program(bundle.xclbin(spec.ctx))
    if constants is None:
        raise InputError(f"gemm {spec.key}: code for real cores, whose tiles are not known")
    return GemmFormula(
        spec.K,
        spec.N,
        spec.n_out,
        int(constants["k_tile"]),
        int(constants["n_tile"]),
        epilogue,
        record.get("bias") == "1",
    )


def mha_formula(bundle: Bundle, spec: MhaSpec) -> MhaFormula:
    """What an attention computes.

    Raises:
        InputError: its record does not say.
    """
    record = _record(bundle, spec.line)
    names = ("heads", "kv_heads", "head_dim")
    if not all(record.has(name) for name in names):
        raise InputError(f"{spec.kernel_id}: its record does not say heads=, kv_heads=, head_dim=")
    return MhaFormula(*(record.get_int(name, minimum=1, maximum=1 << 16) for name in names))


def _record(bundle: Bundle, line: int) -> Record:
    return next(record for record in bundle.manifest.records if record.line == line)


def widened(bits: NDArray[np.uint16]) -> F64:
    """Bf16 numbers, each exactly, as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def unpacked(packed: NDArray[np.uint8], formula: GemmFormula) -> tuple[F64, F64]:
    """B [K, N] and the bias [N] (zeros where there is none) of a GEMM's packed bytes.

    Raises:
        InputError: K or N is no whole number of tiles, or the bytes are too few.
    """
    k_tile, n_tile, K, N = formula.k_tile, formula.n_tile, formula.K, formula.N
    bias_words = 2 * n_tile if formula.bias else 0  # of 16 bits
    block_words = bias_words + K * n_tile
    if K % k_tile or N % n_tile or packed.nbytes < 2 * block_words * (N // n_tile):
        raise InputError(f"{packed.nbytes} packed bytes do not hold {K} x {N} in whole tiles")
    words = packed[: 2 * block_words * (N // n_tile)].view(np.uint16)
    # Where each element stands: a block of columns, a block of k, an octet of columns, an octet of
    # k, the column in it, the k in it.
    block, column = np.divmod(np.arange(N), n_tile)
    k_block, k = np.divmod(np.arange(K), k_tile)
    of_column = (
        block * block_words + bias_words + column // OCTET * (k_tile * OCTET)
    ) + column % OCTET * OCTET
    of_k = k_block * (k_tile * n_tile) + k // OCTET * (OCTET * OCTET) + k % OCTET
    bias = np.zeros(N)
    if formula.bias:
        heads = words[(np.arange(N // n_tile) * block_words)[:, None] + np.arange(bias_words)]
        bias = np.ascontiguousarray(heads).view(np.float32).reshape(-1).astype(np.float64)
    return widened(words[of_k[:, None] + of_column]), bias
