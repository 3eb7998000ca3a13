"""LLVM code of C = epilogue(A B + bias)."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from .. import epilogue_numbers as epilogues
from . import vectors
from .panel_code import Panels, widen_rows
from .registers import LANES, Registers
from .vectors import BITS, FLOATS, I64, INDICES, ZERO, at, loop, where


class Products(Protocol):
    """A GEMM's products: how rows of A are multiplied by a panel of B."""

    def begin(
        self, b: Any, a: tuple[Any, Any], rows: Any, k: Any, work: Any, slices: tuple[Any, Any]
    ) -> Any:
        """Prepare rows of A; what is returned is for multiply().

        a: the first element, the elements to the next row; work: float32 [rows, k], rows filled up
        to Registers.row_step; slices: where the slices of K end, and how many there are.
        """

    def multiply(self, b: Any, state: Any, panel: Any, c: Any, c_stride: Any) -> None:
        """Set c, float32 rows, to A times a panel; rows filled up as work's are."""

    def end(self, b: Any) -> None:
        """After the last product."""


class VectorProducts:
    """Products by vector registers, of A widened to float32."""

    def __init__(self, registers: Registers, panels: Panels) -> None:
        self._columns = registers.columns
        self._panel = panels.of_width[registers.vectors]

    def begin(
        self, b: Any, a: tuple[Any, Any], rows: Any, k: Any, work: Any, slices: tuple[Any, Any]
    ) -> Any:
        """Widen A."""
        widen_rows(b, a, (work, k), rows, k)
        return (work, k, rows), slices

    def multiply(self, b: Any, state: Any, panel: Any, c: Any, c_stride: Any) -> None:
        """Set c to A times a panel."""
        of_a, slices = state
        b.call(self._panel, (*of_a, panel, I64(self._columns), c, c_stride, *slices))

    def end(self, b: Any) -> None:
        """Nothing is left behind."""


def gemm(module: Any, registers: Registers, products: Products, fma: Any) -> None:
    """Add `gemm`: out = epilogue(A B + bias), rounded, for so many rows and tiles of columns.

    Its arguments, named as below: a, out bfloat16 with so many elements to the next row; weights
    [panel], as Products want them; a tile is some panels; bias [columns] or null; work [rows, k]
    and acc [rows, tile] float32 to work in, of rows filled up to Registers.row_step; ends [slices],
    where the slices of K end.
    A GeGLU pair makes half as many columns of a tile: its first half, the gates, times its second.
    """
    kinds = (
        *(BITS, I64, I64, I64, BITS, I64, I64, FLOATS, I64, BITS, I64),
        *(FLOATS, FLOATS, INDICES, I64),
    )
    made, b = vectors.function(module, "gemm", kinds, (0, 4, 7, 9, 11, 12))
    a, a_stride, rows, k, weights, tiles, tile, bias, epilogue, out, out_stride = made.args[:11]
    work, acc, ends, slices = made.args[11:]
    columns = I64(registers.columns)
    size = b.mul(k, columns)
    panels_of_tile = b.sdiv(tile, columns)
    is_pair = b.icmp_signed("==", epilogue, I64(epilogues.GEGLU_TANH))
    gates = b.select(is_pair, b.sdiv(tile, I64(2)), tile)
    has_bias = b.icmp_unsigned("!=", b.ptrtoint(bias, I64), ZERO)
    state = products.begin(b, (a, a_stride), rows, k, work, (ends, slices))

    def each(t: Any) -> None:
        def one(p: Any) -> None:
            panel = at(b, weights, b.mul(b.add(b.mul(t, panels_of_tile), p), size))
            products.multiply(b, state, panel, at(b, acc, b.mul(p, columns)), tile)

        loop(b, ZERO, panels_of_tile, 1, one)
        of_tile = at(b, bias, b.mul(t, tile))

        def row(i: Any) -> None:
            source = at(b, acc, b.mul(i, tile))
            target = at(b, out, b.mul(i, out_stride), b.mul(t, gates))

            def some(j: Any) -> None:
                x = _with_bias(b, source, of_tile, j, has_bias)
                for number, curve in (
                    (epilogues.GELU_ERF, partial(vectors.gelu_erf, b)),
                    (epilogues.GELU_TANH, lambda x: vectors.gelu_tanh(b, x, fma)),
                    (epilogues.GEGLU_TANH, lambda x: pair(x, j)),
                    (epilogues.TANH, lambda x: vectors.tanh(b, x, fma)),
                ):
                    x = where(b, b.icmp_signed("==", epilogue, I64(number)), x, curve)
                vectors.store(b, vectors.rounded(b, x), at(b, target, j))

            def pair(x: Any, j: Any) -> Any:
                up = _with_bias(b, source, of_tile, b.add(j, gates), has_bias)
                return b.fmul(vectors.gelu_tanh(b, x, fma), up)

            loop(b, ZERO, gates, LANES, some)

        loop(b, ZERO, rows, 1, row)

    loop(b, ZERO, tiles, 1, each)
    products.end(b)
    b.ret_void()


def _with_bias(b: Any, source: Any, bias: Any, j: Any, has_bias: Any) -> Any:
    """Elements of a row from j on, with their bias where there is one."""
    x = vectors.load(b, at(b, source, j))
    return where(b, has_bias, x, lambda x: b.fadd(x, vectors.load(b, at(b, bias, j))))
