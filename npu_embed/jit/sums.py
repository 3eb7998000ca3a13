"""Sums of a row in the order of `lanes`, compiled: sixteen lanes are two AVX registers.

The lanes are written out, since the compiler keeps variables in registers, but no array. Indices
are unsigned: a signed one might be negative and count from the end, and is checked for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .scalars import INLINE, f32

u64 = np.uint64


@njit(**INLINE)
def sum_of(x: Any) -> Any:
    """The sum of x [n] by lanes; n a multiple of LANES."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = f32(0)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = f32(0)
    for j in range(u64(0), u64(len(x)), u64(16)):
        a0 += x[j]
        a1 += x[j + u64(1)]
        a2 += x[j + u64(2)]
        a3 += x[j + u64(3)]
        a4 += x[j + u64(4)]
        a5 += x[j + u64(5)]
        a6 += x[j + u64(6)]
        a7 += x[j + u64(7)]
        b0 += x[j + u64(8)]
        b1 += x[j + u64(9)]
        b2 += x[j + u64(10)]
        b3 += x[j + u64(11)]
        b4 += x[j + u64(12)]
        b5 += x[j + u64(13)]
        b6 += x[j + u64(14)]
        b7 += x[j + u64(15)]
    return _fold(a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7)


@njit(**INLINE)
def sum_of_squares(x: Any, shift: Any) -> Any:
    """The sum of (x - shift)^2 by lanes, x [n]; n a multiple of LANES."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = f32(0)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = f32(0)
    for j in range(u64(0), u64(len(x)), u64(16)):
        a0 += _square(x[j] - shift)
        a1 += _square(x[j + u64(1)] - shift)
        a2 += _square(x[j + u64(2)] - shift)
        a3 += _square(x[j + u64(3)] - shift)
        a4 += _square(x[j + u64(4)] - shift)
        a5 += _square(x[j + u64(5)] - shift)
        a6 += _square(x[j + u64(6)] - shift)
        a7 += _square(x[j + u64(7)] - shift)
        b0 += _square(x[j + u64(8)] - shift)
        b1 += _square(x[j + u64(9)] - shift)
        b2 += _square(x[j + u64(10)] - shift)
        b3 += _square(x[j + u64(11)] - shift)
        b4 += _square(x[j + u64(12)] - shift)
        b5 += _square(x[j + u64(13)] - shift)
        b6 += _square(x[j + u64(14)] - shift)
        b7 += _square(x[j + u64(15)] - shift)
    return _fold(a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7)


@njit(**INLINE)
def _square(x: Any) -> Any:
    return x * x


@njit(**INLINE)
def _fold(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Eight lanes added by halves."""
    return ((a + e) + (c + g)) + ((b + f) + (d + h))
