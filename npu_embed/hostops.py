"""Float32 host operations: norms, gathers, pooling.

Those between two runs read what the device wrote and put what it reads next in the same pass, in
compiled kernels where those are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import jit
from .bf16 import F32, RowBuffer
from .cores import run_rows
from .jit.lanes import fits, row_sums
from .rows import Rows

NOWHERE: RowBuffer = (np.empty(0, dtype=np.uint16), 0, 0)
MIN_NORM = np.float32(1e-12)  # where torch.nn.functional.normalize stops to make unit rows
_BLOCK_ELEMS = 1 << 15


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """The rows (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    x [rows, hidden_size] is overwritten and returned; weight, bias [hidden_size]. Blocks of rows
    stay in the cache: whole-array passes would be bound by memory.

    Source: torch.nn.LayerNorm; the variance is the biased one.
    """
    rows, width = x.shape
    step = max(1, _BLOCK_ELEMS // width)
    scale = np.float32(1.0) / np.float32(width)
    for start in range(0, rows, step):
        y = x[start : start + step]
        np.subtract(y, row_sums(y) * scale, out=y)
        variance = row_sums(np.multiply(y, y)) * scale
        np.multiply(y, np.float32(1.0) / np.sqrt(variance + np.float32(eps)), out=y)
        np.multiply(y, weight, out=y)
        np.add(y, bias, out=y)
    return x


def put_layer_norm(x: F32, weight: F32, bias: F32, eps: float, out: Rows) -> None:
    """Do x = layer_norm(x), and put it into out; x C-contiguous."""
    if jit.kernels is not None and fits(x.shape[1]):
        rows, width = x.shape
        bits, first, stride = out.host(rows, width)
        epsilon, norm = np.float32(eps), jit.kernels.layer_norm

        def part(start: int, stop: int) -> None:
            norm(x[start:stop], weight, bias, epsilon, bits, first + start * stride, stride)

        run_rows(rows, width, part)
        out.send(rows)
    else:
        out.put(layer_norm(x, weight, bias, eps))


def add_layer_norm(x: F32, y: Rows, weight: F32, bias: F32, eps: float, out: Rows | None) -> None:
    """Do x = layer_norm(x + y), and put it into out, if that is wanted; x C-contiguous.

    y: a row buffer the device has written, whose first columns count.
    """
    rows, width = x.shape
    if jit.kernels is not None and fits(width):
        added, y_first, y_stride = y.receive(rows, width)
        bits, first, stride = NOWHERE if out is None else out.host(rows, width)
        epsilon, norm = np.float32(eps), jit.kernels.add_layer_norm

        def part(start: int, stop: int) -> None:
            norm(
                added,
                y_first + start * y_stride,
                y_stride,
                x[start:stop],
                weight,
                bias,
                epsilon,
                bits,
                first + start * stride,
                stride,
            )

        run_rows(rows, width, part)
        if out is not None:
            out.send(rows)
        return
    np.add(x, y.get(rows, width), out=x)
    layer_norm(x, weight, bias, eps)
    if out is not None:
        out.put(x)


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
