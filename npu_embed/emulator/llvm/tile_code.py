"""LLVM code of products by tile registers (Intel AMX): bfloat16 operands as they are, float32 sums.

An instruction multiplies 16 rows of A by 16 columns of B over 32 of K. It takes denormal numbers as
zeros. B lies in panels [k / 2][column][2], as a tile of it is loaded.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS and LDTILECFG.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import vectors
from .registers import LANES, PAIR, TILE, TILES
from .vectors import BITS, FLOATS, I64, ZERO, at, loop

I8 = ir.IntType(8)
_POINTER = I8.as_pointer()

_ROW_BYTES = 64  # of a tile register
_PALETTE = 1  # eight registers of 16 rows
_COUNT = 8
_A, _B = TILES * TILES, TILES * TILES + TILES  # the registers after those of C


class TileProducts:
    """A GEMM's products by tile registers: see gemm_code.Products."""

    def __init__(self, module: Any) -> None:
        self._module = module
        nothing = ir.VoidType()
        for name, kinds in (
            ("ldtilecfg", (_POINTER,)),
            ("tilerelease", ()),
            ("tilezero", (I8,)),
            ("tileloadd64", (I8, _POINTER, I64)),
            ("tilestored64", (I8, _POINTER, I64)),
            ("tdpbf16ps", (I8, I8, I8)),
        ):
            ir.Function(module, ir.FunctionType(nothing, kinds), f"llvm.x86.{name}")
        self._shapes = _shapes(module)
        self._panel = self._make_panel()

    def _do(self, b: Any, name: str, *arguments: Any) -> None:
        b.call(self._module.get_global(f"llvm.x86.{name}"), arguments)

    def begin(
        self, b: Any, a: tuple[Any, Any], rows: Any, k: Any, work: Any, slices: tuple[Any, Any]
    ) -> Any:
        """Set up the registers, and copy to work the rows that do not fill a tile."""
        self._do(b, "ldtilecfg", b.bitcast(self._shapes, _POINTER))
        source, stride = a
        tail = b.bitcast(work, BITS)
        whole = b.and_(rows, I64(-TILE))

        def row(i: Any) -> None:
            old = at(b, source, b.mul(i, stride))
            new = at(b, tail, b.mul(b.sub(i, whole), k))

            def some(j: Any) -> None:
                vectors.store(b, vectors.load_halves(b, at(b, old, j)), at(b, new, j))

            loop(b, ZERO, k, LANES, some)

        loop(b, whole, rows, 1, row)
        return source, stride, rows, tail, k

    def multiply(self, b: Any, state: Any, panel: Any, c: Any, c_stride: Any) -> None:
        """Set c to A times a panel."""
        b.call(self._panel, (*state, panel, c, c_stride))

    def end(self, b: Any) -> None:
        """Give the registers back: a switch of threads saves what is in use."""
        self._do(b, "tilerelease")

    def _make_panel(self) -> Any:
        kinds = (BITS, I64, I64, BITS, I64, BITS, FLOATS, I64)
        made, b = vectors.function(self._module, "tile_panel", kinds, (0, 3, 5, 6), inside=True)
        a, a_stride, rows, tail, k, panel, c, c_stride = made.args
        whole = b.and_(rows, I64(-TILE))
        of_b = panel, k

        def blocks(start: Any, height: int) -> Any:
            def block(i: Any) -> None:
                source = at(b, a, b.mul(i, a_stride))
                target = at(b, c, b.mul(i, c_stride))
                self._block(b, height, (source, a_stride), of_b, (target, c_stride))

            return loop(b, start, whole, height * TILE, block)

        left: Any = ZERO
        for height in range(TILES, 0, -1):
            left = blocks(left, height)

        def last(i: Any) -> None:
            self._block(b, 1, (tail, k), of_b, (at(b, c, b.mul(i, c_stride)), c_stride))

        loop(b, whole, b.add(rows, I64(TILE - 1)), TILE, last)
        b.ret_void()
        return made

    def _block(
        self, b: Any, height: int, a: tuple[Any, Any], of: tuple[Any, Any], c: tuple[Any, Any]
    ) -> None:
        """C = A times the panel for some tiles of rows; a, c: the first element and the stride."""
        panel, k = of
        tiles = [(row, column) for row in range(height) for column in range(TILES)]

        def tile(base: tuple[Any, Any], row: int, *columns: Any) -> Any:
            first = at(b, base[0], b.mul(base[1], I64(row * TILE)), *columns)
            return b.bitcast(first, _POINTER)

        for row, column in tiles:
            self._do(b, "tilezero", I8(row * TILES + column))
        a_bytes, c_bytes = b.mul(a[1], I64(2)), b.mul(c[1], I64(4))
        columns = TILES * TILE

        def step(at_k: Any) -> None:
            for row in range(height):
                self._do(b, "tileloadd64", I8(_A + row), tile(a, row, at_k), a_bytes)
            of_b = at(b, panel, b.mul(at_k, I64(columns)))
            for column in range(TILES):
                place = b.bitcast(at(b, of_b, column * TILE * PAIR), _POINTER)
                self._do(b, "tileloadd64", I8(_B + column), place, I64(columns * PAIR * 2))
            for row, column in tiles:
                into = I8(row * TILES + column)
                self._do(b, "tdpbf16ps", into, I8(_A + row), I8(_B + column))

        loop(b, ZERO, k, PAIR * TILE, step)
        for row, column in tiles:
            place = tile(c, row, column * TILE)
            self._do(b, "tilestored64", I8(row * TILES + column), place, c_bytes)


def _shapes(module: Any) -> Any:
    """What LDTILECFG reads: all registers of full size."""
    content = bytearray(64)
    content[0] = _PALETTE
    for register in range(_COUNT):
        content[16 + 2 * register] = _ROW_BYTES
        content[48 + register] = TILE
    kind = ir.ArrayType(I8, len(content))
    shapes = ir.GlobalVariable(module, kind, "tile_shapes")
    shapes.linkage, shapes.global_constant, shapes.align = "internal", True, 64
    shapes.initializer = ir.Constant(kind, content)
    return shapes
