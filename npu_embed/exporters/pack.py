"""Weights in the order the array reads them.

Source: docs/array-programs.md, "A packed block". The emulator unpacks from that page on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..bf16 import to_bf16
from .geometry import K_TILE, N_TILE, round_up

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

GROUP = 8  # the array multiplies 8 x 8 blocks


def pack_gemm(weight_kn: F32, bias: F32 | None, k_tile: int = K_TILE, n_tile: int = N_TILE) -> U8:
    """B of C = A B + bias as the array's column streams, one byte string for all columns.

    weight_kn [K, N] and bias [N] or None, float32 -> uint8 [n_blocks * block bytes]; K and N are
    padded with zeros to whole tiles, so padded columns of C come out as epilogue(0) = 0 and padded
    columns of A do not count (they must still be finite: 0 * NaN is NaN).

    Raises:
        ValueError: a shape or tile does not fit.
    """
    if weight_kn.ndim != 2 or 0 in weight_kn.shape:
        raise ValueError(f"pack_gemm: weight has shape {weight_kn.shape}, wanted [K, N]")
    if k_tile % GROUP or n_tile % GROUP or k_tile < GROUP or n_tile < GROUP:
        raise ValueError(f"pack_gemm: tiles {k_tile} x {n_tile}, wanted multiples of {GROUP}")
    k, n = weight_kn.shape
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"pack_gemm: bias has shape {bias.shape}, wanted ({n},)")
    k_blocks, n_blocks = round_up(k, k_tile) // k_tile, round_up(n, n_tile) // n_tile

    padded = np.zeros((k_blocks * k_tile, n_blocks * n_tile), dtype=np.uint16)
    padded[:k, :n] = to_bf16(np.ascontiguousarray(weight_kn, dtype=np.float32))
    k_groups, n_groups = k_tile // GROUP, n_tile // GROUP
    tiles = padded.reshape(k_blocks, k_groups, GROUP, n_blocks, n_groups, GROUP)
    # [n_block][k_block][column group][k group][column][k]
    ordered = np.ascontiguousarray(tiles.transpose(3, 0, 4, 1, 5, 2), dtype="<u2")
    weights = ordered.reshape(n_blocks, -1).view(np.uint8)
    if bias is None:
        return weights.reshape(-1)

    padded_bias = np.zeros(n_blocks * n_tile, dtype="<f4")
    padded_bias[:n] = bias
    biases = padded_bias.reshape(n_blocks, n_tile).view(np.uint8)
    return np.concatenate([biases, weights], axis=1).reshape(-1)


def geglu_pair(gate_kn: F32, up_kn: F32, n_tile: int = N_TILE) -> F32:
    """Gate and up side by side as a GeGLU pair wants them: half a tile of each in turn.

    Both [K, N] -> [K, 2 N'], N padded with zeros to N', whole tiles of the result.

    Raises:
        ValueError: the two differ in shape.
    """
    if gate_kn.shape != up_kn.shape or gate_kn.ndim != 2:
        raise ValueError(f"geglu_pair: {gate_kn.shape} and {up_kn.shape}, wanted one shape [K, N]")
    k, n = gate_kn.shape
    half = n_tile // 2
    padded = np.zeros((k, 2, round_up(n, n_tile)), dtype=np.float32)
    padded[:, 0, :n], padded[:, 1, :n] = gate_kn, up_kn
    pairs = padded.reshape(k, 2, -1, half).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(pairs).reshape(k, -1)


def block_bytes(k: int, bias: bool, k_tile: int = K_TILE, n_tile: int = N_TILE) -> int:
    """Bytes of one packed block of n_tile columns; k is a multiple of k_tile."""
    return (4 * n_tile if bias else 0) + round_up(k, k_tile) * n_tile * 2
