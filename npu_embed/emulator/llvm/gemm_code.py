"""LLVM's intermediate code of jit.product; importing this imports llvmlite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from .erf import CLAMP, DENOMINATOR, NUMERATOR, RSQRT2
from .registers import BIAS, GELU, Registers

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _BITS, _INDICES = (kind.as_pointer() for kind in (_F32, _I16, _I64))
_ZERO, _ONE = _I64(0), _I64(1)


def module_of(registers: Registers) -> str:
    """The functions `product` and `gemm`, as jit.product calls them.

    product(a, rows, k, panels, count, c, ends, slices): C = A B. a [rows, k] float32; panels
    [count, k, registers.columns] bfloat16; c [rows, count * registers.columns] float32; ends
    [slices] int64, where each slice of K ends.

    gemm(a, a_stride, rows, k, panels, count, bias, epilogue, out, out_stride, a_work, c_work,
    ends, slices): out = epilogue(A B + bias), a and out rows of bfloat16 with so many elements to
    the next; bias [count * registers.columns]; a_work [rows, k] and c_work [rows,
    registers.columns] float32.
    """
    module = ir.Module("npu_embed")
    vectors = _Vectors(module, registers)
    panel = _panel(module, vectors)
    _product(module, registers, panel)
    _gemm(module, vectors, panel)
    return str(module)


def _function(
    module: Any, name: str, kinds: Sequence[Any], apart: Sequence[int], linkage: str = ""
) -> tuple[Any, Any]:
    """A function and a builder at its start; `apart` are pointers to what overlaps no other's."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = linkage
    for index in apart:
        function.args[index].add_attribute("noalias")
    return function, ir.IRBuilder(function.append_basic_block())


def _panel(module: Any, vectors: _Vectors) -> Any:
    """panel(a, rows, k, weights, c, width, ends, slices): a panel's columns of C [rows, width]."""
    registers = vectors.registers
    kinds = (_FLOATS, _I64, _I64, _BITS, _FLOATS, _I64, _INDICES, _I64)
    function, b = _function(module, "panel", kinds, (0, 3, 4), "internal")
    a, rows, k, weights, c, width, ends, slices = function.args

    def slice_of(s: Any, start: Any) -> Any:
        """Add the product over a slice of K; the slice's end."""
        end = b.load(b.gep(ends, [s]))
        first = b.icmp_signed("==", s, _ZERO)
        row: Any = _ZERO
        for height in registers.rows:

            def some(i: Any, height: int = height) -> None:
                tops = [b.add(i, _I64(r)) for r in range(height)]
                sources = [b.gep(a, [b.mul(top, k)]) for top in tops]
                targets = [b.gep(c, [b.mul(top, width)]) for top in tops]
                _add_tile(b, vectors, sources, weights, (start, end), targets, first)

            row = _loop(b, row, rows, height, some)
        return end

    _carry(b, slices, _ZERO, slice_of)
    b.ret_void()
    return function


def _product(module: Any, registers: Registers, panel: Any) -> None:
    kinds = (_FLOATS, _I64, _I64, _BITS, _I64, _FLOATS, _INDICES, _I64)
    function, b = _function(module, "product", kinds, (0, 3, 5))
    a, rows, k, panels, count, c, ends, slices = function.args
    columns = _I64(registers.columns)
    width, size = b.mul(count, columns), b.mul(k, columns)

    def each(p: Any) -> None:
        weights, left = b.gep(panels, [b.mul(p, size)]), b.gep(c, [b.mul(p, columns)])
        b.call(panel, (a, rows, k, weights, left, width, ends, slices))

    _loop(b, _ZERO, count, 1, each)
    b.ret_void()


def _gemm(module: Any, vectors: _Vectors, panel: Any) -> None:
    kinds = (
        *(_BITS, _I64, _I64, _I64, _BITS, _I64),
        *(_FLOATS, _I64, _BITS, _I64, _FLOATS, _FLOATS, _INDICES, _I64),
    )
    function, b = _function(module, "gemm", kinds, (0, 4, 6, 8, 10, 11))
    (a, a_stride, rows, k, panels, count, bias, epilogue) = function.args[:8]
    (out, out_stride, a_work, c_work, ends, slices) = function.args[8:]
    columns = _I64(vectors.registers.columns)
    size = b.mul(k, columns)

    def widen(i: Any) -> None:
        source, target = b.gep(a, [b.mul(i, a_stride)]), b.gep(a_work, [b.mul(i, k)])

        def some(j: Any) -> None:
            vectors.store(b, vectors.widened(b, b.gep(source, [j])), b.gep(target, [j]))

        def single(j: Any) -> None:
            word = b.shl(b.zext(b.load(b.gep(source, [j])), _I32), _I32(16))
            b.store(b.bitcast(word, _F32), b.gep(target, [j]))

        _loop(b, _loop(b, _ZERO, k, vectors.registers.lanes, some), k, 1, single)

    _loop(b, _ZERO, rows, 1, widen)

    def each(p: Any) -> None:
        weights, left = b.gep(panels, [b.mul(p, size)]), b.mul(p, columns)
        b.call(panel, (a_work, rows, k, weights, c_work, columns, ends, slices))

        def finish(i: Any) -> None:
            source = b.gep(c_work, [b.mul(i, columns)])
            target = b.gep(out, [b.add(b.mul(i, out_stride), left)])
            for v in range(vectors.registers.vectors):
                at = [_I64(v * vectors.registers.lanes)]
                x = vectors.load(b, b.gep(source, at))
                of_bias = b.gep(b.gep(bias, [left]), at)
                some, gelu = (b.icmp_signed("==", epilogue, _I64(n)) for n in (BIAS, GELU))
                x = _where(b, b.or_(some, gelu), x, partial(vectors.plus, of_bias))
                x = _where(b, gelu, x, vectors.gelu_erf)
                vectors.store(b, vectors.rounded(b, x), b.gep(target, at))

        _loop(b, _ZERO, rows, 1, finish)

    _loop(b, _ZERO, count, 1, each)
    b.ret_void()


def _add_tile(
    b: Any,
    vectors: _Vectors,
    sources: Sequence[Any],
    weights: Any,
    part: tuple[Any, Any],
    targets: Sequence[Any],
    first: Any,
) -> None:
    """targets += the rows at sources times weights, over a part of K; set them if first.

    The tile of C stays in registers. A part of K is never empty.
    """
    registers, kind, zero = vectors.registers, vectors.floats, vectors.all(0.0)
    steps = range(registers.vectors)
    before, inside, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(inside)
    b.position_at_end(inside)
    k = b.phi(_I64)
    sums = [[b.phi(kind) for _ in steps] for _ in sources]
    row_of_b = b.gep(weights, [b.mul(k, _I64(registers.columns))])
    of_b = [vectors.widened(b, b.gep(row_of_b, [_I64(v * registers.lanes)])) for v in steps]
    added = []
    for source, chain in zip(sources, sums, strict=True):
        of_a = vectors.repeated(b, b.load(b.gep(source, [k]), align=4))
        added.append([b.call(vectors.fma, [of_a, of_b[v], chain[v]]) for v in steps])
    following = b.add(k, _ONE)
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
            at = b.gep(target, [_I64(v * registers.lanes)])
            vectors.store(b, b.fadd(b.select(first, zero, vectors.load(b, at)), new[v]), at)


class _Vectors:
    """Code for vectors of a register's lanes, element by element."""

    def __init__(self, module: Any, registers: Registers) -> None:
        lanes = registers.lanes
        self.registers = registers
        self.floats = ir.VectorType(_F32, lanes)
        self._words = ir.VectorType(_I32, lanes)
        self._halves = ir.VectorType(_I16, lanes)
        kind = ir.FunctionType(self.floats, (self.floats,) * 3)
        self.fma = ir.Function(module, kind, f"llvm.fma.v{lanes}f32")

    def all(self, value: float) -> Any:
        return ir.Constant(self.floats, [float(np.float32(value))] * self.registers.lanes)

    def _all_words(self, value: int) -> Any:
        return ir.Constant(self._words, [value] * self.registers.lanes)

    def repeated(self, b: Any, value: Any) -> Any:
        """A vector of one value."""
        any_ = ir.Constant(self.floats, ir.Undefined)
        return b.shuffle_vector(b.insert_element(any_, value, _I32(0)), any_, self._all_words(0))

    def load(self, b: Any, at: Any) -> Any:
        """Float32 from an element on."""
        return b.load(b.bitcast(at, self.floats.as_pointer()), align=4)

    def store(self, b: Any, x: Any, at: Any) -> None:
        b.store(x, b.bitcast(at, x.type.as_pointer()), align=2 if x.type == self._halves else 4)

    def widened(self, b: Any, at: Any) -> Any:
        """bfloat16 from an element on, as float32: bf16.to_f32."""
        halves = b.load(b.bitcast(at, self._halves.as_pointer()), align=2)
        return b.bitcast(b.shl(b.zext(halves, self._words), self._all_words(16)), self.floats)

    def rounded(self, b: Any, x: Any) -> Any:
        """The bfloat16 nearest to x, ties to even, a NaN quiet: bf16.to_bf16."""
        bits = b.bitcast(x, self._words)
        upper = b.lshr(bits, self._all_words(16))
        odd = b.and_(upper, self._all_words(1))
        up = b.add(b.add(bits, self._all_words(0x7FFF)), odd)
        even = b.lshr(up, self._all_words(16))
        quiet = b.or_(upper, self._all_words(0x40))
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, even), self._halves)

    def plus(self, at: Any, b: Any, x: Any) -> Any:
        """x + the float32 from an element on."""
        return b.fadd(x, self.load(b, at))

    def gelu_erf(self, b: Any, x: Any) -> Any:
        """x/2 (1 + erf(x/sqrt 2)), in the order of emulator.epilogues."""
        z = b.fmul(x, self.all(RSQRT2))
        for sign, beyond in ((-1.0, "<"), (1.0, ">")):  # a NaN is neither, and stays
            limit = self.all(sign * CLAMP)
            z = b.select(b.fcmp_ordered(beyond, z, limit), limit, z)
        square = b.fmul(z, z)
        over = b.fmul(self._polynomial(b, NUMERATOR, square), z)
        ratio = b.fdiv(over, self._polynomial(b, DENOMINATOR, square))
        return b.fmul(b.fmul(x, self.all(0.5)), b.fadd(ratio, self.all(1.0)))

    def _polynomial(self, b: Any, coefficients: Sequence[float], x: Any) -> Any:
        """Horner's scheme, highest power first; a product and a sum, each rounded."""
        result = self.all(coefficients[0])
        for coefficient in coefficients[1:]:
            result = b.fadd(b.fmul(result, x), self.all(coefficient))
        return result


def _where(b: Any, wanted: Any, x: Any, change: Callable[[Any, Any], Any]) -> Any:
    """change(x) if wanted, else x."""
    before, inside, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.cbranch(wanted, inside, after)
    b.position_at_end(inside)
    changed = change(b, x)
    b.branch(after)
    b.position_at_end(after)
    result = b.phi(x.type)
    result.add_incoming(x, before)
    result.add_incoming(changed, inside)
    return result


def _loop(b: Any, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> Any:
    """body(i) for i from start on, while i + step <= stop; the first i for which it is not."""
    before, head = b.block, b.append_basic_block()
    inside, after = b.append_basic_block(), b.append_basic_block()
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(_I64)
    following = b.add(i, _I64(step))
    b.cbranch(b.icmp_signed("<=", following, stop), inside, after)
    b.position_at_end(inside)
    body(i)
    i.add_incoming(start, before)
    i.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(after)
    return i


def _carry(b: Any, count: Any, value: Any, body: Callable[[Any, Any], Any]) -> None:
    """value = body(i, value) for i in range(count)."""
    before, head = b.block, b.append_basic_block()
    inside, after = b.append_basic_block(), b.append_basic_block()
    b.branch(head)
    b.position_at_end(head)
    i, carried = b.phi(_I64), b.phi(_I64)
    b.cbranch(b.icmp_signed("<", i, count), inside, after)
    b.position_at_end(inside)
    new = body(i, carried)
    i.add_incoming(_ZERO, before)
    i.add_incoming(b.add(i, _ONE), b.block)
    carried.add_incoming(value, before)
    carried.add_incoming(new, b.block)
    b.branch(head)
    b.position_at_end(after)
