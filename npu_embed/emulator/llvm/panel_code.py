"""LLVM code of products by vector registers.

The inner loop keeps a tile of C in registers while it goes along K: a row of B's panel, times one
element of each of some rows of A. Every element of C is one chain of fused multiply-adds over k,
in slices of K that are added one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from . import vectors
from .registers import LANES, Registers
from .vectors import BITS, FLOATS, I64, INDICES, ONE, VECTOR, ZERO, at, loop


class Panels:
    """Functions of a module that multiply by a panel of B: one for each width in vectors.

    panel(a, a_stride, rows, b, b_stride, c, c_stride, ends, slices): C = A B for so many rows. a
    and c float32, b bfloat16 [k, width], each with so many elements from a row to the next; ends
    [slices] int64, where each slice of K ends, none empty.
    """

    def __init__(self, module: Any, registers: Registers, fma: Any) -> None:
        self._registers = registers
        self._fma = fma
        self.of_width = {width: self._make(module, width) for width in registers.widths}

    def _make(self, module: Any, width: int) -> Any:
        kinds = (FLOATS, I64, I64, BITS, I64, FLOATS, I64, INDICES, I64)
        made, b = vectors.function(module, f"panel{width}", kinds, (0, 3, 5), inside=True)
        a, a_stride, rows, weights, b_stride, c, c_stride, ends, slices = made.args

        def slice_of(s: Any, start: Any) -> Any:
            """Add the product over a slice of K; the slice's end."""
            end = b.load(at(b, ends, s))
            first = b.icmp_signed("==", s, ZERO)
            row: Any = ZERO
            for height in self._registers.rows:

                def some(i: Any, height: int = height) -> None:
                    tops = [b.add(i, I64(r)) for r in range(height)]
                    sources = [at(b, a, b.mul(top, a_stride)) for top in tops]
                    targets = [at(b, c, b.mul(top, c_stride)) for top in tops]
                    part = start, end
                    self._add_tile(b, width, sources, (weights, b_stride), part, targets, first)

                row = loop(b, row, rows, height, some)
            return end

        vectors.carry(b, (ZERO, slices, 1), ZERO, slice_of)
        b.ret_void()
        return made

    def _add_tile(
        self,
        b: Any,
        width: int,
        sources: Sequence[Any],
        of: tuple[Any, Any],
        part: tuple[Any, Any],
        targets: Sequence[Any],
        first: Any,
    ) -> None:
        """targets += the rows at sources times the panel over a part of K; set them if first."""
        weights, b_stride = of
        steps, zero = range(width), vectors.constant(0.0)
        before, inside, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(inside)
        b.position_at_end(inside)
        k = b.phi(I64)
        sums = [[b.phi(VECTOR) for _ in steps] for _ in sources]
        row_of_b = at(b, weights, b.mul(k, b_stride))
        of_b = [vectors.widened(b, at(b, row_of_b, v * LANES)) for v in steps]
        added = []
        for source, chain in zip(sources, sums, strict=True):
            of_a = vectors.repeated(b, b.load(at(b, source, k), align=4))
            added.append([b.call(self._fma, [of_a, of_b[v], chain[v]]) for v in steps])
        following = b.add(k, ONE)
        k.add_incoming(part[0], before)
        k.add_incoming(following, inside)
        for chain, new in zip(sums, added, strict=True):
            for total, value in zip(chain, new, strict=True):
                total.add_incoming(zero, before)
                total.add_incoming(value, inside)
        b.cbranch(b.icmp_signed("<", following, part[1]), inside, after)
        b.position_at_end(after)
        for target, new in zip(targets, added, strict=True):
            for v in steps:
                place = at(b, target, v * LANES)
                there = b.select(first, zero, vectors.load(b, place))
                vectors.store(b, b.fadd(there, new[v]), place)


def widen_rows(
    b: Any, source: tuple[Any, Any], target: tuple[Any, Any], rows: Any, width: Any
) -> None:
    """Rows of bfloat16 as float32; source, target: the first element, elements to the next row."""

    def row(i: Any) -> None:
        bits, floats = (at(b, base, b.mul(i, stride)) for base, stride in (source, target))

        def some(j: Any) -> None:
            vectors.store(b, vectors.widened(b, at(b, bits, j)), at(b, floats, j))

        def one(j: Any) -> None:
            word = b.shl(b.zext(b.load(at(b, bits, j)), vectors.I32), vectors.I32(16))
            b.store(b.bitcast(word, vectors.F32), at(b, floats, j))

        loop(b, loop(b, ZERO, width, LANES, some), width, 1, one)

    loop(b, ZERO, rows, 1, row)


def fused_multiply_add(module: Any) -> Any:
    """a b + c of vectors, rounded once."""
    kind = ir.FunctionType(VECTOR, (VECTOR,) * 3)
    return ir.Function(module, kind, f"llvm.fma.v{LANES}f32")
