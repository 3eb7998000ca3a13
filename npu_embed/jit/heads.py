"""Compiled: norm and rotary turn of the heads of q, k and v; the numpy version is in heads.

Row buffers are passed as in `rows`: a row is its heads side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .rms import inverse_rms
from .scalars import CUBE, INDEX, INLINE, INTEGERS, MATRIX, NUMBER, ROWS, kernel, rounded, widened

_STEP = (MATRIX, NUMBER, INDEX, MATRIX, MATRIX, INTEGERS)


@njit(**INLINE)
def _turn(x: Any, cos: Any, sin: Any) -> None:
    """Turn the pairs (x[j], x[j + half]) by angles of these cosines and sines [half]."""
    half = len(cos)
    a, b = x[:half], x[half : 2 * half]
    for j in range(half):
        first, second = a[j], b[j]
        a[j] = first * cos[j] - second * sin[j]
        b[j] = second * cos[j] + first * sin[j]


@njit(**INLINE)
def _made(
    source: Any,
    h: Any,
    norm: Any,
    eps: Any,
    turned: Any,
    cos: Any,
    sin: Any,
    at: Any,
    x: Any,
) -> None:
    """x = head h of a row made of the bits `source`, both [head_dim]; at: the row's positions."""
    for j in range(len(x)):
        x[j] = widened(source[j])
    if h < len(norm):
        weight = norm[h]
        inverse = inverse_rms(x, eps)
        for j in range(len(x)):
            x[j] = x[j] * inverse * weight[j]
    if h < turned:
        part = len(x) // len(at)
        for s in range(len(at)):
            _turn(x[s * part : (s + 1) * part], cos[at[s]], sin[at[s]])


@kernel(*ROWS, *_STEP, INDEX, *ROWS)
def put_heads(
    bits: Any,
    first: Any,
    stride: Any,
    norm: Any,
    eps: Any,
    turned: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    heads: Any,
    out: Any,
    out_first: Any,
    out_stride: Any,
) -> None:
    """out[row] = the heads of bits[row], made and rounded.

    norm [normed heads, head_dim]; the first `turned` heads turn by positions [rows, parts].
    """
    width = norm.shape[1]
    x = np.empty(width, dtype=np.float32)
    for i in range(len(positions)):
        for h in range(heads):
            start = first + i * stride + h * width
            _made(bits[start : start + width], h, norm, eps, turned, cos, sin, positions[i], x)
            start = out_first + i * out_stride + h * width
            target = out[start : start + width]
            for j in range(width):
                target[j] = rounded(x[j])


@kernel(*ROWS, *_STEP, CUBE)
def make_heads(
    bits: Any,
    first: Any,
    stride: Any,
    norm: Any,
    eps: Any,
    turned: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    x: Any,
) -> None:
    """x [rows, heads, head_dim] = the heads of bits[row], made; the rest as in put_heads."""
    rows, heads, width = x.shape
    for i in range(rows):
        for h in range(heads):
            start = first + i * stride + h * width
            _made(
                bits[start : start + width], h, norm, eps, turned, cos, sin, positions[i], x[i, h]
            )
