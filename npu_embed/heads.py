"""The step between the GEMM of q, k and v and attention: norm and rotary turn of their heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import jit
from .attention import Rotary
from .bf16 import F32
from .cores import run_rows
from .jit.lanes import fits
from .rms import rms_norm
from .rows import Rows


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What becomes of a row's heads, which stand side by side: q's, k's, v's.

    norm [normed heads, head_dim]: the weights of the first ones' RMS norm, which hold q's scale
    too. The first `turned` heads turn. A head in as many parts as a row has positions turns each
    part by its own.
    """

    heads: int
    turned: int
    norm: F32
    eps: float
    rotary: Rotary

    def put(self, qkv: Rows, positions: NDArray[np.intp], out: Rows) -> None:
        """Put the heads of the rows the device wrote into qkv into out.

        positions [rows, parts] of the rows.
        """
        rows = len(positions)
        if jit.kernels is None or not fits(self.norm.shape[1]):
            out.put(self._made(qkv, positions).reshape(rows, -1))
            return
        width = self.heads * self.norm.shape[1]
        elements, first, stride = qkv.receive(rows, width)
        bits, out_first, out_stride = out.host(rows, width)
        put_heads = jit.kernels.put_heads

        def part(start: int, stop: int) -> None:
            put_heads(
                elements,
                first + start * stride,
                stride,
                *self._arguments(positions[start:stop]),
                self.heads,
                bits,
                out_first + start * out_stride,
                out_stride,
            )

        run_rows(rows, width, part)
        out.send(rows)

    def get(self, qkv: Rows, positions: NDArray[np.intp]) -> F32:
        """The heads of the rows the device wrote into qkv, float32 [rows, heads, head_dim]."""
        rows, head_dim = len(positions), self.norm.shape[1]
        if jit.kernels is None or not fits(head_dim):
            return self._made(qkv, positions)
        elements, first, stride = qkv.receive(rows, self.heads * head_dim)
        x = np.empty((rows, self.heads, head_dim), dtype=np.float32)
        make_heads = jit.kernels.make_heads

        def part(start: int, stop: int) -> None:
            arguments = self._arguments(positions[start:stop])
            make_heads(elements, first + start * stride, stride, *arguments, x[start:stop])

        run_rows(rows, self.heads * head_dim, part)
        return x

    def _arguments(
        self, positions: NDArray[np.intp]
    ) -> tuple[F32, np.float32, int, F32, F32, NDArray[np.intp]]:
        """A kernel's arguments that say what is done."""
        cos, sin = self.rotary.cos, self.rotary.sin
        return self.norm, np.float32(self.eps), self.turned, cos, sin, positions

    def _made(self, qkv: Rows, positions: NDArray[np.intp]) -> F32:
        """As get, by numpy."""
        (rows, parts), head_dim = positions.shape, self.norm.shape[1]
        x = qkv.get(rows, self.heads * head_dim).reshape(rows, self.heads, head_dim)
        normed = x[:, : len(self.norm)]
        rms_norm(normed, self.norm, self.eps, out=normed)
        size = head_dim // parts
        for p in range(parts):
            self.rotary.turn(x[:, : self.turned, p * size : (p + 1) * size], positions[:, p])
        return x
