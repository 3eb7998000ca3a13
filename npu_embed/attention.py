"""Attention on the host in float32: rotary positions, and softmax(q k^T) v for one text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32

_BLOCK_ELEMS = 1 << 15
_QUERY_ROWS = 128  # queries at a time: bounds the scores, and skips most keys outside a window


class Rotary:
    """Rotary positions for heads of head_dim numbers: number i turns with i + head_dim / 2.

    Position p turns pair i by p / theta^(2 i / head_dim), whose cosine and sine are tabulated for
    positions below max_positions: cos, sin [max_positions, head_dim / 2].

    Source: "RoFormer" (Su et al.), with halves in place of neighbours, as Hugging Face has it.
    """

    def __init__(self, theta: float, head_dim: int, max_positions: int) -> None:
        half = head_dim // 2
        # In float64: a float32 angle of thousands of radians has few digits left.
        angles = np.arange(max_positions)[:, None] * theta ** (-np.arange(half) / half)
        self.cos: F32 = np.cos(angles).astype(np.float32)
        self.sin: F32 = np.sin(angles).astype(np.float32)

    def turn(self, x: F32, positions: NDArray[np.intp]) -> None:
        """Turn every head of x [rows, heads, head_dim] by its row's position, in place."""
        half = x.shape[-1] // 2
        step = max(1, _BLOCK_ELEMS // (x.shape[1] * x.shape[2]))
        for start in range(0, len(x), step):
            block = slice(start, start + step)
            first, second = x[block, :, :half], x[block, :, half:]
            cos, sin = self.cos[positions[block], None], self.sin[positions[block], None]
            turned = first * cos - second * sin
            np.multiply(second, cos, out=second)
            np.add(second, first * sin, out=second)
            first[...] = turned


def attend_texts(
    q: F32,
    k: F32,
    v: F32,
    starts: Sequence[int],
    lengths: Sequence[int],
    window: int | None,
) -> F32:
    """The attention of each of a pack's texts among its own rows; see attend."""
    texts = [slice(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    found: F32 = np.concatenate([attend(q[t], k[t], v[t], window) for t in texts])
    return found


def attend(q: F32, k: F32, v: F32, window: int | None = None) -> F32:
    """softmax(q k^T) v of one text, its heads side by side: float32 [rows, heads * head_dim].

    q [rows, heads, head_dim], already scaled; k, v [rows, kv_heads, head_dim]: query head h reads
    key/value head h * kv_heads // heads. window: keys further than this from the query take no
    part; None = all do.
    """
    rows, heads, head_dim = q.shape
    if window is not None and rows <= window + 1:
        window = None
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out: F32 = np.empty((rows, heads, head_dim), dtype=np.float32)
    for start in range(0, rows, _QUERY_ROWS):
        end = min(start + _QUERY_ROWS, rows)
        low, high = (0, rows) if window is None else (start - window, end + window)
        low, high = max(0, low), min(rows, high)
        far = None
        if window is not None:
            distance = np.arange(start, end)[:, None] - np.arange(low, high)[None, :]
            far = (np.abs(distance) > window)[:, None]
        for kv_head in range(kv_heads):
            own = slice(kv_head * group, (kv_head + 1) * group)
            # The heads of a group share their keys, so that they are one product.
            queries = q[start:end, own].reshape(-1, head_dim)
            scores = (queries @ k[low:high, kv_head].T).reshape(end - start, group, high - low)
            if far is not None:
                np.copyto(scores, np.float32(-np.inf), where=far)
            p = _softmax(scores).reshape(len(queries), -1)
            out[start:end, own] = (p @ v[low:high, kv_head]).reshape(end - start, group, head_dim)
    return out.reshape(rows, heads * head_dim)


def _softmax(scores: F32) -> F32:
    """Over the last axis, in place; every row has a number that is not -inf."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
