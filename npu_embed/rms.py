"""The RMS norm of rows in float32, alone and with what is before and behind it between two runs.

As the steps of hostops: compiled where kernels are loaded, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from . import jit
from .bf16 import F32, RowBuffer, round_rows, widen_rows
from .cores import run_rows
from .hostops import NOWHERE
from .jit.lanes import fits, row_sums
from .rows import Rows

# What is put of a row x for the next run: x / rms(x), x as it is, or nothing.
Put = Literal["norm", "x"] | None

ONE = np.float32(1.0)
_NO_ROWS: F32 = np.empty((0, 0), dtype=np.float32)
_BLOCK_ELEMS = 1 << 15


def rms_norm(x: F32, weight: F32 | None, eps: float, *, out: F32 | None = None) -> F32:
    """The rows x / sqrt(mean(x^2, axis=-1) + eps) * weight, in float32.

    x [rows, ..., width]; weight broadcasts against [..., width], None = all ones. out is where the
    result goes, x itself if it may be overwritten; None = a new array. Blocks of rows stay in the
    cache: whole-array passes would be bound by memory.

    Source: "Root Mean Square Layer Normalization" (Zhang and Sennrich). Where a model multiplies
    by 1 + weight, its exporter stores that sum.
    """
    found: F32 = np.empty_like(x) if out is None else out
    step = max(1, _BLOCK_ELEMS // int(np.prod(x.shape[1:])))
    scale = ONE / np.float32(x.shape[-1])
    for start in range(0, len(x), step):
        y, z = x[start : start + step], found[start : start + step]
        mean_square = row_sums(np.multiply(y, y)) * scale
        np.multiply(y, ONE / np.sqrt(mean_square + np.float32(eps)), out=z)
        if weight is not None:
            np.multiply(z, weight, out=z)
    return found


def put_rms_norm(x: F32, eps: float, out: Rows) -> None:
    """Put x / rms(x) into out; x [rows, width], C-contiguous."""
    rows, width = x.shape
    if jit.kernels is None or not fits(width):
        out.put(rms_norm(x, None, eps))
        return
    bits, first, stride = out.host(rows, width)
    epsilon, norm = np.float32(eps), jit.kernels.put_rms_norm

    def part(start: int, stop: int) -> None:
        norm(x[start:stop], epsilon, bits, first + start * stride, stride)

    run_rows(rows, width, part)
    out.send(rows)


def add_rms_norm(
    x: F32,
    ys: Sequence[Rows],
    weight: F32,
    eps: float,
    *,
    scale: np.float32 = ONE,
    out: Rows,
    put: Put,
) -> None:
    """Do x = (x + rms_norm(sum of ys) * weight) * scale, and put it into out.

    x [rows, width], C-contiguous; ys: row buffers the device has written, whose first columns
    count; put: what of x, with the norm of the same eps.
    """
    rows, width = x.shape
    if jit.kernels is None or not fits(width):
        y = _sum(ys, rows, width)
        np.add(x, rms_norm(y, weight, eps, out=y), out=x)
        np.multiply(x, scale, out=x)
        if put is not None:
            out.put(rms_norm(x, None, eps) if put == "norm" else x)
        return
    *others, last = ys
    total = _sum(others, rows, width) if others else _NO_ROWS
    added, y_first, y_stride = last.receive(rows, width)
    bits, first, stride = NOWHERE if put is None else out.host(rows, width)
    epsilon, normed, norm = np.float32(eps), put == "norm", jit.kernels.add_rms_norm

    def part(start: int, stop: int) -> None:
        norm(
            total[start:stop],
            added,
            y_first + start * y_stride,
            y_stride,
            x[start:stop],
            weight,
            epsilon,
            scale,
            bits,
            first + start * stride,
            stride,
            normed,
        )

    run_rows(rows, width, part)
    if put is not None:
        out.send(rows)


def _sum(ys: Sequence[Rows], rows: int, width: int) -> F32:
    """The sum of row buffers that the device has written, added in their order."""
    total = ys[0].get(rows, width)
    for y in ys[1:]:
        if jit.kernels is not None:
            jit.kernels.add_rows(total, *y.receive(rows, width))
        else:
            np.add(total, y.get(rows, width), out=total)
    return total


def put_gated(gate: Rows, c: RowBuffer, rows: int, weight: F32, eps: float, out: Rows) -> None:
    """Put gate * rms_norm(c) * weight into out, row by row, as wide as weight.

    gate: a row buffer the device has written; c: the host's side of rows.
    """
    width = len(weight)
    factors, target = gate.receive(rows, width), out.host(rows, width)
    if jit.kernels is None or not fits(width):
        y = widen_rows(*c, np.empty((rows, width), dtype=np.float32))
        rms_norm(y, weight, eps, out=y)
        np.multiply(widen_rows(*factors, np.empty_like(y)), y, out=y)
        round_rows(y, *target)
        out.send(rows)
        return
    epsilon, gate_rows = np.float32(eps), jit.kernels.gate_rows

    def part(start: int, stop: int) -> None:
        moved = [
            (elements, first + start * stride, stride)
            for elements, first, stride in (factors, c, target)
        ]
        gate_rows(*moved[0], *moved[1], weight, epsilon, *moved[2], stop - start)

    run_rows(rows, width, part)
    out.send(rows)
