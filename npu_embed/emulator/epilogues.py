"""Epilogues of the emulated GEMM, in float32 and in place, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

BLOCK_ELEMS = 1 << 15

# Odd rational approximation of erf on [-4, 4], float32 to a few units in the last place.
# Source: Eigen's and XLA's erf for float32.
_ERF_CLAMP = np.float32(4.0)
_ERF_NUMERATOR = tuple(
    np.float32(c)
    for c in (
        -2.72614225801306e-10,
        2.77068142495902e-08,
        -2.10102402082508e-06,
        -5.69250639462346e-05,
        -7.34990630326855e-04,
        -2.95459980854025e-03,
        -1.60960333262415e-02,
    )
)
_ERF_DENOMINATOR = tuple(
    np.float32(c)
    for c in (
        -1.45660718464996e-05,
        -2.13374055278905e-04,
        -1.68282697438203e-03,
        -7.37332916720468e-03,
        -1.42647390514189e-02,
    )
)
_HALF = np.float32(0.5)
_RSQRT2 = np.float32(np.sqrt(0.5))
_TANH_SCALE = np.float32(np.sqrt(2.0 / np.pi))
_TANH_CUBIC = np.float32(0.044715)


def _polynomial(coefficients: tuple[np.float32, ...], x: F32) -> F32:
    """Horner's scheme, highest power first."""
    result = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        np.multiply(result, x, out=result)
        np.add(result, c, out=result)
    return result


def _gelu_erf_block(x: F32) -> None:
    z = np.multiply(x, _RSQRT2)
    np.clip(z, -_ERF_CLAMP, _ERF_CLAMP, out=z)
    square = np.multiply(z, z)
    numerator = _polynomial(_ERF_NUMERATOR, square)
    np.multiply(numerator, z, out=numerator)
    denominator = _polynomial(_ERF_DENOMINATOR, square)
    np.divide(numerator, denominator, out=numerator)
    np.add(numerator, np.float32(1.0), out=numerator)
    np.multiply(x, _HALF, out=x)
    np.multiply(x, numerator, out=x)


def _gelu_tanh_block(x: F32) -> None:
    inner = np.multiply(x, x)
    np.multiply(inner, _TANH_CUBIC, out=inner)
    np.add(inner, np.float32(1.0), out=inner)
    np.multiply(inner, x, out=inner)
    np.multiply(inner, _TANH_SCALE, out=inner)
    np.tanh(inner, out=inner)
    np.add(inner, np.float32(1.0), out=inner)
    np.multiply(x, _HALF, out=x)
    np.multiply(x, inner, out=x)


def _tanh_block(x: F32) -> None:
    np.tanh(x, out=x)


def _geglu_block(x: F32, n_tile: int) -> F32:
    """gelu_tanh(gate) * up: each n_tile columns are n_tile/2 gates, then as many ups."""
    tiles = x.reshape(len(x), -1, 2, n_tile // 2)
    gate = np.ascontiguousarray(tiles[:, :, 0])
    _gelu_tanh_block(gate)
    np.multiply(gate, tiles[:, :, 1], out=gate)
    return gate.reshape(len(x), -1)


NONE, GELU_ERF, GELU_TANH, GEGLU_TANH, TANH = range(5)

_IN_PLACE: dict[int, Callable[[F32], None]] = {
    GELU_ERF: _gelu_erf_block,
    GELU_TANH: _gelu_tanh_block,
    TANH: _tanh_block,
}


def apply(acc: F32, bias: F32 | None, epilogue: int, n_tile: int) -> F32:
    """epilogue(acc + bias); acc [rows, n] is overwritten, and is the result unless n shrinks.

    bias [n] or None; n_tile counts only for a GeGLU pair, which halves n.
    """
    rows, n = acc.shape
    paired = np.empty((rows, n // 2), dtype=np.float32) if epilogue == GEGLU_TANH else None
    step = max(1, BLOCK_ELEMS // n)
    if bias is None and epilogue == NONE:
        return acc
    for start in range(0, rows, step):
        block = acc[start : start + step]
        if bias is not None:
            np.add(block, bias, out=block)
        if paired is not None:
            paired[start : start + step] = _geglu_block(block, n_tile)
        elif epilogue != NONE:
            _IN_PLACE[epilogue](block)
    return acc if paired is None else paired
