"""Float32 host operations: norms, gathers, pooling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32

MIN_NORM = np.float32(1e-12)  # where torch.nn.functional.normalize stops to make unit rows
_BLOCK_ELEMS = 1 << 15


def layer_norm(x: F32, weight: F32, bias: F32, eps: float, residual: F32 | None = None) -> F32:
    """(y - mean(y)) / sqrt(var(y) + eps) * weight + bias with y = x + residual, by row.

    x [rows, hidden_size] is overwritten and returned; residual [rows, hidden_size]; weight, bias
    [hidden_size]. Blocks of rows stay in the cache: whole-array passes would be bound by memory.

    Source: torch.nn.LayerNorm; the variance is the biased one.
    """
    rows, width = x.shape
    step = max(1, _BLOCK_ELEMS // width)
    scale = np.float32(1.0 / width)
    for start in range(0, rows, step):
        y = x[start : start + step]
        if residual is not None:
            np.add(y, residual[start : start + step], out=y)
        np.subtract(y, y.mean(axis=1, keepdims=True), out=y)
        variance = np.einsum("ij,ij->i", y, y)[:, None] * scale
        np.multiply(y, 1.0 / np.sqrt(variance + np.float32(eps)), out=y)
        np.multiply(y, weight, out=y)
        np.add(y, bias, out=y)
    return x


def rms_norm(x: F32, weight: F32 | None, eps: float, *, out: F32 | None = None) -> F32:
    """The rows x / sqrt(mean(x^2, axis=-1) + eps) * weight, in float32.

    x [rows, ..., width]; weight broadcasts against [..., width], None = all ones. out is where the
    result goes, x itself if it may be overwritten; None = a new array. Blocks of rows stay in the
    cache, as in layer_norm.

    Source: "Root Mean Square Layer Normalization" (Zhang and Sennrich). Where a model multiplies
    by 1 + weight, its exporter stores that sum.
    """
    found: F32 = np.empty_like(x) if out is None else out
    step = max(1, _BLOCK_ELEMS // int(np.prod(x.shape[1:])))
    scale = np.float32(1.0 / x.shape[-1])
    for start in range(0, len(x), step):
        y, z = x[start : start + step], found[start : start + step]
        mean_square = np.einsum("...i,...i->...", y, y)[..., None] * scale
        np.multiply(y, 1.0 / np.sqrt(mean_square + np.float32(eps)), out=z)
        if weight is not None:
            np.multiply(z, weight, out=z)
    return found


def mean_pool(x: F32, starts: Sequence[int], lengths: Sequence[int]) -> F32:
    """The mean row of each text: [texts, hidden_size] from x [rows, hidden_size]."""
    pooled: F32 = np.stack(
        [x[s : s + n].mean(axis=0, dtype=np.float32) for s, n in zip(starts, lengths, strict=True)]
    )
    return pooled


def max_pool(x: F32, starts: Sequence[int], lengths: Sequence[int]) -> F32:
    """The largest value of each column over each text's rows: [texts, hidden_size]."""
    pooled: F32 = np.stack([x[s : s + n].max(axis=0) for s, n in zip(starts, lengths, strict=True)])
    return pooled


def first_row(x: F32, starts: Sequence[int], lengths: Sequence[int]) -> F32:
    """The first row of each text, [CLS] in BERT: [texts, hidden_size]."""
    rows: F32 = x[np.asarray(starts, dtype=np.intp)].copy()
    return rows


POOLINGS = {"mean": mean_pool, "max": max_pool, "cls": first_row}


def unit_rows(x: F32) -> F32:
    """Each row x / |x|; NaN where |x| is below 1e-12 or not finite: it has no direction.

    x [rows, dim], a new array.
    """
    with np.errstate(over="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64)).astype(np.float32)
    norms[~((norms >= MIN_NORM) & (norms < np.inf))] = np.nan
    unit: F32 = x / norms[:, None]
    return unit


def row_numbers(starts: Sequence[int], lengths: Sequence[int]) -> NDArray[np.intp]:
    """The position of every row within its text: 0, 1, ... n-1 for each text in turn."""
    return np.concatenate([np.arange(n, dtype=np.intp) for n in lengths])
