"""The attention programs' softmax to the base 2, over the keys that take part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..bf16 import round_f32
from ..jit.lanes import LANES, sum_lanes

F32 = NDArray[np.float32]

# 2^s as e^(s ln 2): numpy's float32 exp is vectorised where its exp2 is not. The product's rounding
# moves p by at most |s| 2^-24 relative, far below the bf16 rounding of p that follows.
_LN2 = np.float32(np.log(2.0))


def padded(keys: int) -> int:
    """Columns for so many keys: rows are summed in lanes."""
    return -(-keys // LANES) * LANES


def softmax2(s: F32, keys: int, first: int, window: int) -> None:
    """S = 2^(s - max) / sum over the keys that take part, rounded to bf16; 0 for all others.

    s [heads, rows, padded(keys)], C-contiguous, columns past keys of any content. Row i is query
    first + i; key j takes part if j < keys and abs(first + i - j) <= window. A query without a key
    gets zeros.
    """
    s[:, :, keys:] = -np.inf
    rows = s.shape[1]
    if window < max(first + rows, keys):
        query = np.arange(first, first + rows)[:, None]
        s[:, np.abs(query - np.arange(s.shape[2])) > window] = -np.inf
    top = s.max(axis=-1, keepdims=True)
    without_key = max(0, keys + window - first)  # the first row whose window begins past the keys
    top[:, without_key:] = 0.0
    s -= top
    s *= _LN2
    np.exp(s, out=s)
    total = sum_lanes(s)
    total[total == 0.0] = 1.0
    s *= np.float32(1.0) / total
    round_f32(s, out=s)
