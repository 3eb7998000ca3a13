"""Compiled: what the Gemma encoders do to rows beside norms and heads.

The numpy versions are where they are used, in models/.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rms import inverse_rms
from .scalars import IDS, INDEX, MATRIX, NUMBER, ROWS, TABLE, VECTOR, kernel, rounded, widened


@kernel(TABLE, IDS, NUMBER, MATRIX)
def table_rows(table: Any, ids: Any, scale: Any, x: Any) -> None:
    """x[i] = table[ids[i]] * scale; the table in bf16."""
    rows, width = x.shape
    for i in range(rows):
        source, target = table[ids[i]], x[i]
        for j in range(width):
            target[j] = widened(source[j]) * scale


@kernel(*ROWS, *ROWS, VECTOR, NUMBER, *ROWS, INDEX)
def gate_rows(
    gate: Any,
    gate_first: Any,
    gate_stride: Any,
    c: Any,
    c_first: Any,
    c_stride: Any,
    weight: Any,
    eps: Any,
    bits: Any,
    first: Any,
    stride: Any,
    rows: Any,
) -> None:
    """bits[row] = gate[row] * rms_norm(c[row]), rounded; rows as wide as weight."""
    width = len(weight)
    z = np.empty(width, dtype=np.float32)
    for i in range(rows):
        start = c_first + i * c_stride
        source = c[start : start + width]
        for j in range(width):
            z[j] = widened(source[j])
        inverse = inverse_rms(z, eps)
        start = gate_first + i * gate_stride
        factor = gate[start : start + width]
        start = first + i * stride
        target = bits[start : start + width]
        for j in range(width):
            target[j] = rounded(widened(factor[j]) * (z[j] * inverse * weight[j]))
