"""Compiled: what the emulated array does element by element, epilogues and softmax.

The numpy versions in emulator/epilogues.py and emulator/softmax.py do the same and explain why.
Device memory is passed as the flat bf16 elements of an allocation, the position of a view's first
element in it, and the view's strides in elements. Float32 arrays are C-contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .scalars import (
    BITS,
    CUBE,
    INDEX,
    INLINE,
    MATRIX,
    NUMBER,
    ROWS,
    VECTOR,
    bits_of,
    f32,
    float_of,
    kernel,
    rounded,
    widened,
)
from .sums import sum_of

_CUBIC = f32(0.044715)
_EXPONENT = f32(-2.0 * np.sqrt(2.0 / np.pi))


@kernel(MATRIX, VECTOR, INDEX, MATRIX)
def gelu_exponents(acc: Any, bias: Any, tile: Any, exponents: Any) -> None:
    """exponents = the tanh form's exponent of each gate acc + bias.

    A tile of columns begins with its gates; exponents [rows, gates of all tiles].
    """
    rows, width = acc.shape
    tiles = width // tile
    gates = exponents.shape[1] // tiles
    for i in range(rows):
        for t in range(tiles):
            g = acc[i, t * tile : t * tile + gates]
            b = bias[t * tile : t * tile + gates]
            e = exponents[i, t * gates : (t + 1) * gates]
            for j in range(gates):
                x = g[j] + b[j]
                e[j] = ((x * x * _CUBIC + f32(1.0)) * x) * _EXPONENT


@kernel(MATRIX, VECTOR, INDEX, MATRIX, *ROWS)
def gelu_tanh_rows(
    acc: Any, bias: Any, tile: Any, powers: Any, out: Any, first: Any, stride: Any
) -> None:
    """out[row] = gate / (1 + power), times the tile's ups where it has any, rounded.

    powers [rows, gates of all tiles] = e to gelu_exponents.
    """
    rows, width = acc.shape
    tiles = width // tile
    gates = powers.shape[1] // tiles
    for i in range(rows):
        for t in range(tiles):
            g = acc[i, t * tile : t * tile + gates]
            b = bias[t * tile : t * tile + gates]
            e = powers[i, t * gates : (t + 1) * gates]
            start = first + i * stride + t * gates
            target = out[start : start + gates]
            if gates == tile:
                for j in range(gates):
                    target[j] = rounded((g[j] + b[j]) / (e[j] + f32(1.0)))
            else:
                up = acc[i, t * tile + gates : (t + 1) * tile]
                c = bias[t * tile + gates : (t + 1) * tile]
                for j in range(gates):
                    gate = (g[j] + b[j]) / (e[j] + f32(1.0))
                    target[j] = rounded(gate * (up[j] + c[j]))


@njit(**INLINE)
def _largest(x: Any) -> Any:
    """The largest of x, by its bits as ordered integers: they may be compared in any order."""
    top = np.int32(-2147483648)
    for j in range(len(x)):
        b = np.int32(bits_of(x[j]))
        top = max(top, np.int32(b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return float_of(np.uint32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@kernel(CUBE, INDEX, INDEX, INDEX, NUMBER)
def shift_scores(s: Any, keys: Any, first: Any, window: Any, scale: Any) -> None:
    """s = (s - its row's largest) * scale for the keys that take part, -inf for all others.

    s [heads, rows, padded keys]; row i of a head is query first + i (in key positions); key j takes
    part if j < keys and abs(query - j) <= window.
    """
    heads, rows, _ = s.shape
    for h in range(heads):
        for i in range(rows):
            low = min(max(0, first + i - window), keys)
            high = max(min(keys, first + i + window + 1), low)
            row = s[h, i]
            some = row[low:high]
            top = _largest(some)
            for j in range(len(some)):
                some[j] = (some[j] - top) * scale
            row[:low] = -np.inf
            row[high:] = -np.inf


@kernel(CUBE)
def weights_of(p: Any) -> None:
    """p = p * (1 / its row's sum), rounded to bfloat16; a row of zeros stays."""
    heads, rows, _ = p.shape
    for h in range(heads):
        for i in range(rows):
            row = p[h, i]
            total = sum_of(row)
            if total == f32(0.0):
                total = f32(1.0)
            inverse = f32(1.0) / total
            for j in range(len(row)):
                row[j] = widened(rounded(row[j] * inverse))


@kernel(BITS, INDEX, INDEX, INDEX, CUBE)
def widen_heads(bits: Any, first: Any, head_stride: Any, row_stride: Any, x: Any) -> None:
    """x[head, row] = the bits there."""
    heads, rows, width = x.shape
    for h in range(heads):
        for i in range(rows):
            start = first + h * head_stride + i * row_stride
            source, target = bits[start : start + width], x[h, i]
            for j in range(width):
                target[j] = widened(source[j])


@kernel(CUBE, BITS, INDEX, INDEX, INDEX)
def round_heads(x: Any, bits: Any, first: Any, head_stride: Any, row_stride: Any) -> None:
    """Make the bits of each head and row x[head, row], rounded."""
    heads, rows, width = x.shape
    for h in range(heads):
        for i in range(rows):
            start = first + h * head_stride + i * row_stride
            source, target = x[h, i], bits[start : start + width]
            for j in range(width):
                target[j] = rounded(source[j])
