"""B and bias of a GEMM, unpacked once into what this machine multiplies with fastest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bf16 import BF16, F32, RowBuffer, to_f32, widen_rows
from ..cores import Scratch
from . import epilogues
from .llvm import machine
from .llvm.machine import Machine

BLAS_SPEED = 100_000  # floating point operations a microsecond of a core


@dataclass(frozen=True, slots=True)
class Weights:
    """B [K, N] for one of the ways to multiply, and its bias [N] where it has one.

    way: this machine's own code, with B in its panels; or BLAS, with B in float32.
    tile: the columns that products are cut at multiples of.
    """

    way: tuple[Machine, BF16] | F32
    k: int
    columns: int
    tile: int
    bias: F32 | None

    def microseconds(self, rows: int) -> float:
        """What a product of so many rows takes one core, about."""
        speed = (
            self.way[0].registers.flop_per_microsecond
            if isinstance(self.way, tuple)
            else BLAS_SPEED
        )
        return 2 * rows * self.k * self.columns / speed

    def compute(
        self,
        a: RowBuffer,
        rows: int,
        between: tuple[int, int],
        epilogue: int,
        out: RowBuffer,
        scratch: Scratch,
    ) -> None:
        """Write epilogue(A B + bias) of rows of A, and of columns between two tiles, to out."""
        left, right = between
        bias = None if self.bias is None else self.bias[left:right]
        if isinstance(self.way, tuple):
            compiled, panels = self.way
            panels = panels[left // compiled.columns : right // compiled.columns]
            compiled.gemm(a, rows, panels, self.tile, bias, epilogue, out, scratch)
            return
        wide = scratch.take("a", (rows, self.k))
        acc = scratch.take("acc", (rows, right - left))
        np.matmul(widen_rows(*a, wide), self.way[:, left:right], out=acc)
        epilogues.finish(acc, bias, epilogue, self.tile, out, scratch)


def prepare(b: BF16, bias: F32 | None, tile: int) -> Weights:
    """Weights of B [K, N], for products that are cut at multiples of tile columns."""
    k, columns = b.shape
    compiled = machine.load()
    fits = compiled is not None and compiled.fits(k, tile)
    way = (compiled, compiled.pack(b)) if compiled is not None and fits else to_f32(b)
    return Weights(way, k, columns, tile, bias)
