"""Heads of attention in device memory: [heads, rows, head_dim], each row's numbers side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bf16 import BF16, F32, to_bf16, to_f32

_EXPONENT = np.uint16(0x7F80)


@dataclass(slots=True, eq=False)  # made four times a run: frozen ones take three times as long
class Heads:
    """Where heads are: flat bf16 elements, the first one's position, elements to the next.

    head_stride leads from a head to the next, row_stride from a row of it to the next.
    """

    elements: BF16
    first: int
    head_stride: int
    row_stride: int

    def at(self, head: int, row: int) -> int:
        """The position of a head's row."""
        return self.first + head * self.head_stride + row * self.row_stride

    def widen(self, head: int, row: int, out: F32) -> F32:
        """The heads and rows from there on, as many as out [heads, rows, head_dim] has, in out."""
        return to_f32(self._view(head, row, out.shape), out=out)

    def round(self, head: int, row: int, x: F32) -> None:
        """Write x [heads, rows, head_dim], rounded, to the heads and rows from there on."""
        self._view(head, row, x.shape)[...] = to_bf16(x)

    def finite(self, head: int, row: int, shape: tuple[int, ...]) -> bool:
        """Whether no number of the heads and rows from there on is infinite or NaN."""
        exponents = self._view(head, row, shape) & _EXPONENT
        return not (exponents == _EXPONENT).any()

    def _view(self, head: int, row: int, shape: tuple[int, ...]) -> BF16:
        strides = (2 * self.head_stride, 2 * self.row_stride, 2)
        over: BF16 = np.ndarray(shape, np.uint16, self.elements, 2 * self.at(head, row), strides)
        return over
