"""Epilogues of the emulated GEMM, in float32, rounded to bf16 into a row buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..bf16 import RowBuffer, round_rows, rows_of, to_bf16
from ..cores import Scratch
from . import erf
from .epilogue_numbers import GEGLU_TANH, GELU_ERF, GELU_TANH, NONE, TANH

__all__ = ["GEGLU_TANH", "GELU_ERF", "GELU_TANH", "NONE", "TANH", "finish"]

F32 = NDArray[np.float32]

BLOCK_ELEMS = 1 << 15  # of float32: a block and its scratch stay in the cache

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_RSQRT2 = np.float32(erf.RSQRT2)
_CLAMP = np.float32(erf.CLAMP)
_CUBIC = np.float32(0.044715)
_EXPONENT = np.float32(-2.0 * np.sqrt(2.0 / np.pi))


def finish(
    acc: F32,
    bias: F32 | None,
    epilogue: int,
    n_tile: int,
    out: RowBuffer,
    scratch: Scratch,
) -> None:
    """Write epilogue(acc + bias), rounded, to a row buffer; acc [rows, n] is overwritten.

    bias [n] or None; n_tile counts only for a GeGLU pair, which halves n. out: where its
    first row goes.
    """
    rows, n = acc.shape
    if epilogue == TANH:
        if bias is not None:
            np.add(acc, bias, out=acc)
        np.tanh(acc, out=acc)
        round_rows(acc, *out)
        return
    if epilogue == NONE and bias is None:
        round_rows(acc, *out)
        return
    bias = np.zeros(n, dtype=np.float32) if bias is None else bias
    if epilogue in (GELU_TANH, GEGLU_TANH):
        tile = n_tile if epilogue == GEGLU_TANH else n
        gates = n // 2 if epilogue == GEGLU_TANH else n
        _gelu_tanh(acc, bias, tile, scratch.take("powers", (rows, gates)), out)
    else:
        elements, first, stride = out
        step = max(1, BLOCK_ELEMS // n)
        for start in range(0, rows, step):
            block = acc[start : start + step]
            np.add(block, bias, out=block)
            if epilogue == GELU_ERF:
                _gelu_erf_block(block)
            to_bf16(block, out=rows_of(elements, first + start * stride, stride, block.shape))


def _polynomial(coefficients: tuple[float, ...], x: F32) -> F32:
    """Horner's scheme, highest power first."""
    result = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        np.multiply(result, x, out=result)
        np.add(result, np.float32(c), out=result)
    return result


def _gelu_erf_block(x: F32) -> None:
    """X = x/2 (1 + erf(x/sqrt 2)), in place."""
    z = np.multiply(x, _RSQRT2)
    np.clip(z, -_CLAMP, _CLAMP, out=z)
    square = np.multiply(z, z)
    numerator = _polynomial(erf.NUMERATOR, square)
    np.multiply(numerator, z, out=numerator)
    denominator = _polynomial(erf.DENOMINATOR, square)
    np.divide(numerator, denominator, out=numerator)
    np.add(numerator, _ONE, out=numerator)
    np.multiply(x, _HALF, out=x)
    np.multiply(x, numerator, out=x)


def _gelu_tanh(acc: F32, bias: F32, tile: int, powers: F32, out: RowBuffer) -> None:
    """Each tile's gates x become x / (1 + e^(-2 u)), times its ups; powers is a work array.

    That is x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), without tanh's loss of
    digits where x is negative.
    """
    elements, first, stride = out
    rows, n = acc.shape
    gates = powers.shape[1] // (n // tile)
    step = max(1, BLOCK_ELEMS // n)
    for start in range(0, rows, step):
        block = acc[start : start + step]
        np.add(block, bias, out=block)
        tiles = block.reshape(len(block), -1, tile)
        gate = np.ascontiguousarray(tiles[:, :, :gates])
        power = np.multiply(gate, gate)
        np.multiply(power, _CUBIC, out=power)
        np.add(power, _ONE, out=power)
        np.multiply(power, gate, out=power)
        np.multiply(power, _EXPONENT, out=power)
        np.exp(power, out=power)
        np.add(power, _ONE, out=power)
        np.divide(gate, power, out=gate)
        if gates < tile:
            np.multiply(gate, tiles[:, :, gates:], out=gate)
        found = gate.reshape(len(block), -1)
        to_bf16(found, out=rows_of(elements, first + start * stride, stride, found.shape))
