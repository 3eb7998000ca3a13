"""bfloat16 as the upper half of a float32, held in uint16 (numpy has no such type).

`to_bf16` rounds to nearest, ties to even, as the NPU's conv_even mode and torch do; infinities
stay, a NaN stays a NaN. `to_f32` is exact. Both work in blocks that stay in the cache: the naive
whole-array expression makes four passes over memory and is several times slower.

A *row buffer* is its flat elements, the position of a row's first one, and the elements from a row
to the next; `round_rows` and `widen_rows` write and read parts of one, compiled where kernels are
loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import jit

BF16 = NDArray[np.uint16]
F32 = NDArray[np.float32]
RowBuffer = tuple[BF16, int, int]  # elements, position of a row's first, elements to the next row

QUIET_NAN = 0x7FC0
BLOCK_ELEMS = 1 << 15  # 128 KiB of float32: a block and its scratch stay in a 512 KiB L2

_ROUND_BIAS = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SHIFT = np.uint32(16)


def _round_block(x: F32, out: BF16, scratch: NDArray[np.uint32]) -> None:
    """Write x, rounded, to out; x C-contiguous, scratch as large as x."""
    bits = x.view(np.uint32)
    np.right_shift(bits, _SHIFT, out=scratch)
    np.bitwise_and(scratch, _ONE, out=scratch)
    np.add(scratch, _ROUND_BIAS, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, _SHIFT, out=out, casting="unsafe")
    # A NaN with a low payload would round up to infinity, or wrap. One reduction finds whether
    # there is one: a sum is NaN if any element is (or if infinities cancel, which costs only time).
    with np.errstate(invalid="ignore", over="ignore"):
        suspicious = np.isnan(x.sum(dtype=np.float32))
    if suspicious:
        nans = np.isnan(x)
        out[nans] = (bits[nans] >> _SHIFT).astype(np.uint16) | np.uint16(0x0040)


def to_bf16(x: F32, out: BF16 | None = None) -> BF16:
    """The float32 x rounded to bfloat16 (nearest, ties to even), as uint16 bits.

    x of any shape -> the same shape; out, if given, has x's shape (any strides) and is
    returned.
    """
    x = np.asarray(x, dtype=np.float32)
    if out is None:
        out = np.empty(x.shape, dtype=np.uint16)
    elif out.shape != x.shape:
        raise ValueError(f"to_bf16: out has shape {out.shape}, wanted {x.shape}")
    if x.flags.c_contiguous and out.flags.c_contiguous:
        flat, flat_out = x.reshape(-1), out.reshape(-1)
        scratch = np.empty(min(BLOCK_ELEMS, flat.size), dtype=np.uint32)
        for start in range(0, flat.size, BLOCK_ELEMS):
            block = flat[start : start + BLOCK_ELEMS]
            _round_block(block, flat_out[start : start + BLOCK_ELEMS], scratch[: block.size])
        return out
    rows = x.reshape(-1, x.shape[-1]) if x.ndim != 1 else x[None, :]
    rows_out = out.reshape(rows.shape) if out.flags.c_contiguous else None
    if rows_out is None:
        if out.ndim > 2:
            out[...] = to_bf16(np.ascontiguousarray(x))
            return out
        rows_out = out if out.ndim == 2 else out[None, :]
    step = max(1, BLOCK_ELEMS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block = np.ascontiguousarray(rows[start : start + step])
        rounded = np.empty(block.shape, dtype=np.uint16)
        _round_block(block, rounded, np.empty(block.shape, dtype=np.uint32))
        rows_out[start : start + step] = rounded
    return out


def to_f32(bits: BF16, out: F32 | None = None) -> F32:
    """The float32 values of bfloat16 bits, exact; same shape, C-contiguous unless out is given.

    bits uint16 of any shape and strides; out, if given, C-contiguous float32 of that shape.
    """
    if out is None:
        out = np.empty(bits.shape, dtype=np.float32)
    elif out.shape != bits.shape:
        raise ValueError(f"to_f32: out has shape {out.shape}, wanted {bits.shape}")
    words = out.view(np.uint32)
    np.left_shift(bits, _SHIFT, out=words, dtype=np.uint32, casting="unsafe")
    return out


def round_f32(x: F32, out: F32 | None = None) -> F32:
    """The float32 x rounded to bfloat16 and widened again: what a bfloat16 unit would see.

    out, if given, is where the result goes, x itself for example.
    """
    return to_f32(to_bf16(x), out=out)


def round_rows(x: F32, elements: BF16, first: int, stride: int) -> None:
    """Write x [rows, width], rounded, to the rows of a row buffer; x C-contiguous.

    elements: uint16, one-dimensional and contiguous.
    """
    if jit.kernels is not None:
        jit.kernels.round_rows(x, elements, first, stride)
    else:
        to_bf16(x, out=rows_of(elements, first, stride, x.shape))


def widen_rows(elements: BF16, first: int, stride: int, out: F32) -> F32:
    """The rows of a row buffer as float32, in out [rows, width]; out C-contiguous."""
    if jit.kernels is not None:
        jit.kernels.widen_rows(elements, first, stride, out)
        return out
    return to_f32(rows_of(elements, first, stride, out.shape), out=out)


def rows_of(elements: BF16, first: int, stride: int, shape: tuple[int, ...]) -> BF16:
    """A [rows, width] view of a row buffer.

    Raises:
        ValueError: it leaves the elements.
    """
    view: BF16 = np.ndarray(shape, np.uint16, elements, 2 * first, (2 * stride, 2))
    return view
