"""Sums of float32 rows in one order that both numpy and compiled code keep.

Column j of a row goes to lane j % LANES, each lane is summed from the left, and the lanes are then
added by halves. Compiled, the lanes are the elements of vector registers; in numpy they are the
last axis.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

LANES = 16


def sum_lanes(x: F32) -> F32:
    """The sum over the last axis, kept as an axis of length 1; its length a multiple of LANES."""
    blocks = x.reshape(-1, x.shape[-1] // LANES, LANES)
    # The n-th blocks of all rows side by side: numpy sums over a first axis much the fastest.
    together = np.ascontiguousarray(blocks.transpose(1, 0, 2)).reshape(blocks.shape[1], -1)
    lanes: F32 = np.add.reduce(together, axis=0).reshape(*x.shape[:-1], LANES)
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes


def fits(width: int) -> bool:
    """Whether rows of this width can be summed so."""
    return width % LANES == 0


def row_sums(x: F32) -> F32:
    """The sum over the last axis, kept as an axis of length 1: by lanes where its length fits."""
    sums: F32 = sum_lanes(x) if fits(x.shape[-1]) else x.sum(axis=-1, keepdims=True)
    return sums
