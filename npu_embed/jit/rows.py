"""Compiled: rows of bfloat16 to float32 and back, norms with what is before and behind them.

A row buffer is passed as its flat bits, the position of its first element, and the elements from
a row to the next; float32 matrices are whole and C-contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .scalars import INLINE, MATRIX, NUMBER, ROWS, VECTOR, f32, kernel, rounded, widened
from .sums import sum_of, sum_of_squares


@kernel(MATRIX, *ROWS)
def round_rows(x: Any, bits: Any, first: Any, stride: Any) -> None:
    """bits[row] = x[row], rounded."""
    rows, width = x.shape
    for i in range(rows):
        start = first + i * stride
        source, target = x[i], bits[start : start + width]
        for j in range(width):
            target[j] = rounded(source[j])


@kernel(*ROWS, MATRIX)
def widen_rows(bits: Any, first: Any, stride: Any, x: Any) -> None:
    """x[row] = bits[row]."""
    rows, width = x.shape
    for i in range(rows):
        start = first + i * stride
        source, target = bits[start : start + width], x[i]
        for j in range(width):
            target[j] = widened(source[j])


@njit(**INLINE)
def _normed(row: Any, weight: Any, bias: Any, eps: Any) -> None:
    """A row normed in place, as hostops.layer_norm does it."""
    scale = f32(1.0) / f32(len(row))
    mean = sum_of(row) * scale
    inverse = f32(1.0) / np.sqrt(sum_of_squares(row, mean) * scale + eps)
    for j in range(len(row)):
        row[j] = (row[j] - mean) * inverse * weight[j] + bias[j]


@kernel(MATRIX, VECTOR, VECTOR, NUMBER, *ROWS)
def layer_norm(
    x: Any, weight: Any, bias: Any, eps: Any, bits: Any, first: Any, stride: Any
) -> None:
    """Each row of x normed, and rounded in bits."""
    rows, width = x.shape
    for i in range(rows):
        row = x[i]
        _normed(row, weight, bias, eps)
        start = first + i * stride
        target = bits[start : start + width]
        for j in range(width):
            target[j] = rounded(row[j])


@kernel(*ROWS, MATRIX, VECTOR, VECTOR, NUMBER, *ROWS)
def add_layer_norm(
    y: Any,
    y_first: Any,
    y_stride: Any,
    x: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    bits: Any,
    first: Any,
    stride: Any,
) -> None:
    """Each row of x + y normed in x, and rounded in bits unless those are empty."""
    rows, width = x.shape
    for i in range(rows):
        start = y_first + i * y_stride
        row, added = x[i], y[start : start + width]
        for j in range(width):
            row[j] += widened(added[j])
        _normed(row, weight, bias, eps)
        if len(bits):
            start = first + i * stride
            target = bits[start : start + width]
            for j in range(width):
                target[j] = rounded(row[j])
