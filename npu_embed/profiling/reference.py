"""GEMM and attention in float64, and how far from that a right bf16 result may be.

The operands are bf16 and exact, so a result is off by what its own arithmetic rounds: products are
exact in float32, n additions in any order are off by at most gamma(n) times the sum of the
magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1), an epilogue stretches
that by at most its steepest slope, and the result is rounded to bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from .operands import GemmFormula, MhaFormula

F64 = NDArray[np.float64]

U32 = 2.0**-24  # unit roundoff of float32
U16 = 2.0**-8  # of bfloat16, which has 8 significant bits
TINY = 2.0**-126  # below this float32 has fewer digits
EPILOGUE_ERROR = 16 * U32  # of x: what evaluating GELU or tanh itself may be off
STEEPEST_GELU = 1.13  # of either GELU: 1.1290 at x = sqrt 2
FAR = 150.0  # exponents: 2^-150 is 0 in float32


@dataclass(frozen=True, slots=True)
class Expected:
    """Results, and by how much a right one may differ from each."""

    values: F64
    bounds: F64


def gamma(additions: int) -> float:
    """The relative error of so many float32 additions."""
    return additions * U32 / (1 - additions * U32)


def gemm(a: F64, b: F64, bias: F64, formula: GemmFormula) -> Expected:
    """epilogue(A B + bias): a [rows, K], b [K, N], bias [N] -> [rows, n_out]."""
    x = a @ b + bias
    # The accumulator may begin at zero and end with the bias: K products, two additions more.
    error = gamma(formula.K + 2) * (np.abs(a) @ np.abs(b) + np.abs(bias))
    if formula.epilogue == "geglu_pair":
        half = formula.n_tile // 2
        tiles, errors = (m.reshape(len(m), -1, 2, half) for m in (x, error))
        up, up_error = tiles[:, :, 1], errors[:, :, 1]
        gate, gate_error = _epilogue("gelu_tanh", tiles[:, :, 0], errors[:, :, 0])
        y = gate * up
        off = np.abs(gate) * up_error + np.abs(up) * gate_error + gate_error * up_error
        x, error = (m.reshape(len(a), -1) for m in (y, off + U32 * np.abs(y)))
    else:
        x, error = _epilogue(formula.epilogue, x, error)
    return _rounded(x[:, : formula.n_out], error[:, : formula.n_out])


def _epilogue(name: str, x: F64, error: F64) -> tuple[F64, F64]:
    """(epilogue(x), its error) given the error of x."""
    if name == "none":
        return x, error
    if name == "tanh":
        return np.tanh(x), error + EPILOGUE_ERROR
    if name == "gelu_erf":
        y = x / 2 * (1 + erf(x / sqrt(2)))
    else:
        y = x / 2 * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y, STEEPEST_GELU * error + EPILOGUE_ERROR * np.abs(x)


def erf(x: F64) -> F64:
    """The error function of each element, by C's."""
    return np.fromiter(map(math.erf, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape)


def attention(qkv: F64, formula: MhaFormula, window: int | None) -> Expected:
    """softmax2(Q K^T) V of one text: qkv [rows, >= all heads] -> [rows, heads * head_dim].

    window: keys further than this from the query take no part; None = all do.
    """
    rows, d = len(qkv), formula.head_dim
    count = formula.heads, formula.kv_heads, formula.kv_heads
    ends = np.cumsum([n * d for n in count])
    q, k, v = (
        part.reshape(rows, n, d)
        for part, n in zip(np.split(qkv[:, : ends[-1]], ends[:-1], axis=1), count, strict=True)
    )
    far = None
    if window is not None:
        i = np.arange(rows)
        far = np.abs(i[:, None] - i) > window
    group = formula.heads // formula.kv_heads
    heads = [_head(q[:, h], k[:, h // group], v[:, h // group], far) for h in range(formula.heads)]
    return Expected(
        np.concatenate([h.values for h in heads], axis=1),
        np.concatenate([h.bounds for h in heads], axis=1),
    )


def _head(q: F64, k: F64, v: F64, far: NDArray[np.bool_] | None) -> Expected:
    """One head: q, k, v [rows, head_dim]; far [rows, rows]: keys that take no part."""
    rows, d = q.shape
    s = q @ k.T
    score_errors = gamma(d) * (np.abs(q) @ np.abs(k).T)
    if far is not None:
        s[far] = -np.inf
        score_errors[far] = 0.0
    p = np.exp2(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    # An exponent is off as its score and the largest one are, and by the rounding of their
    # difference and of its product with ln 2; e^x and the sums add a few units more.
    exponent = 2 * score_errors.max(axis=1, keepdims=True) + 4 * U32 * FAR
    one = np.expm1(np.log(2.0) * exponent) + 8 * U32
    weight = np.where(one < 1, (1 + one) / np.maximum(1 - one, TINY) - 1, np.inf)
    weight = weight + gamma(rows + 4) * (1 + weight)
    weight = weight + U16 * (1 + weight)  # p is rounded to bf16
    out, magnitude = p @ v, p @ np.abs(v)
    error = (weight + gamma(rows) * (1 + weight)) * magnitude
    return _rounded(out, error + rows * TINY * np.abs(v).max())


def _rounded(y: F64, error: F64) -> Expected:
    """Results that are off by `error` and then rounded to bf16."""
    return Expected(y, error + U16 * (np.abs(y) + error) + TINY)
