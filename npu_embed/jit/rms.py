"""Compiled: the RMS norm with what is before and behind it.

Row buffers and matrices are passed as in `rows`; the numpy versions are in hostops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .scalars import FLAG, INLINE, MATRIX, NUMBER, ROWS, VECTOR, f32, kernel, rounded, widened
from .sums import sum_of_squares


@njit(**INLINE)
def inverse_rms(x: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps), x [n]."""
    scale = f32(1.0) / f32(len(x))
    return f32(1.0) / np.sqrt(sum_of_squares(x, f32(0.0)) * scale + eps)


@njit(**INLINE)
def _put_normed(row: Any, eps: Any, target: Any) -> None:
    inverse = inverse_rms(row, eps)
    for j in range(len(row)):
        target[j] = rounded(row[j] * inverse)


@kernel(MATRIX, NUMBER, *ROWS)
def put_rms_norm(x: Any, eps: Any, bits: Any, first: Any, stride: Any) -> None:
    """bits[row] = x[row] / rms(x[row]), rounded."""
    rows, width = x.shape
    for i in range(rows):
        start = first + i * stride
        _put_normed(x[i], eps, bits[start : start + width])


@kernel(MATRIX, *ROWS)
def add_rows(x: Any, bits: Any, first: Any, stride: Any) -> None:
    """x[row] += bits[row]."""
    rows, width = x.shape
    for i in range(rows):
        start = first + i * stride
        row, added = x[i], bits[start : start + width]
        for j in range(width):
            row[j] += widened(added[j])


@kernel(MATRIX, *ROWS, MATRIX, VECTOR, NUMBER, NUMBER, *ROWS, FLAG)
def add_rms_norm(
    total: Any,
    y: Any,
    y_first: Any,
    y_stride: Any,
    x: Any,
    weight: Any,
    eps: Any,
    scale: Any,
    bits: Any,
    first: Any,
    stride: Any,
    normed: Any,
) -> None:
    """x = (x + rms_norm(total + y)) * scale, and its rows in bits, unless those are empty.

    total may be empty: 0. normed: whether a row is put as row / rms(row).
    """
    rows, width = x.shape
    z = np.empty(width, dtype=np.float32)
    for i in range(rows):
        start = y_first + i * y_stride
        row, added = x[i], y[start : start + width]
        if len(total):
            others = total[i]
            for j in range(width):
                z[j] = others[j] + widened(added[j])
        else:
            for j in range(width):
                z[j] = widened(added[j])
        inverse = inverse_rms(z, eps)
        for j in range(width):
            row[j] = (row[j] + z[j] * inverse * weight[j]) * scale
        if len(bits):
            start = first + i * stride
            target = bits[start : start + width]
            if normed:
                _put_normed(row, eps, target)
            else:
                for j in range(width):
                    target[j] = rounded(row[j])
