"""LLVM code for vectors of LANES numbers, and for loops; importing this imports llvmlite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from ..erf import CLAMP, DENOMINATOR, NUMERATOR, RSQRT2
from .registers import LANES

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, BITS, INDICES = (kind.as_pointer() for kind in (F32, I16, I64))
ZERO, ONE = I64(0), I64(1)

VECTOR = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)

# 2^f = 1 + f P(f) for f in [-1/2, 1/2], to 2e-7. Source: Cephes' exp2f.
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)  # tanh x = x S(x^2), to 1e-8 below _NEAR
_NEAR = 0.25
_LOWEST, _HIGHEST = -126.0, 128.0  # below, 2^x is taken as 0; at the highest it is infinity
_ROUNDER = 1.5 * 2.0**23  # added to a float it leaves the nearest integer in the low bits


def function(
    module: Any, name: str, kinds: Sequence[Any], apart: Sequence[int] = (), *, inside: bool = False
) -> tuple[Any, Any]:
    """A function and a builder at its start.

    apart: the pointers to what overlaps no other's; inside: called from this module only.
    """
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    if inside:
        made.linkage = "internal"
    for index in apart:
        made.args[index].add_attribute("noalias")
    return made, ir.IRBuilder(made.append_basic_block())


def constant(value: float) -> Any:
    """A vector of one float32."""
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def words(value: int) -> Any:
    """A vector of one int32."""
    return ir.Constant(_WORDS, [value] * LANES)


def at(b: Any, base: Any, *indices: Any) -> Any:
    """The address so many elements from base on; Python's ints are elements too."""
    for index in indices:
        base = b.gep(base, [I64(index) if isinstance(index, int) else index])
    return base


def load(b: Any, base: Any) -> Any:
    """Float32 from an element on."""
    return b.load(b.bitcast(base, VECTOR.as_pointer()), align=4)


def store(b: Any, x: Any, base: Any) -> None:
    """Store float32 or bfloat16 from an element on."""
    b.store(x, b.bitcast(base, x.type.as_pointer()), align=2 if x.type == HALVES else 4)


def repeated(b: Any, value: Any) -> Any:
    """A vector of one value."""
    kind = ir.VectorType(value.type, LANES)
    some = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(some, value, I32(0)), some, words(0))


def widened(b: Any, base: Any) -> Any:
    """bfloat16 from an element on, as float32: bf16.to_f32."""
    return b.bitcast(b.shl(b.zext(load_halves(b, base), _WORDS), words(16)), VECTOR)


def rounded(b: Any, x: Any) -> Any:
    """The bfloat16 nearest to x, ties to even, a NaN quiet: bf16.to_bf16."""
    bits = b.bitcast(x, _WORDS)
    upper = b.lshr(bits, words(16))
    up = b.add(b.add(bits, words(0x7FFF)), b.and_(upper, words(1)))
    is_nan = b.fcmp_unordered("uno", x, x)
    chosen = b.select(is_nan, b.or_(upper, words(0x40)), b.lshr(up, words(16)))
    return b.trunc(chosen, HALVES)


def rounded_in_place(b: Any, x: Any) -> Any:
    """x rounded to bfloat16, as float32; a NaN's lower half is zeros, as widened ones' are."""
    bits = b.bitcast(x, _WORDS)
    up = b.add(b.add(bits, words(0x7FFF)), b.and_(b.lshr(bits, words(16)), words(1)))
    return b.bitcast(b.and_(up, words(-0x10000)), VECTOR)


def turned(b: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of LANES vectors of bfloat16, each as a vector."""
    half, found = LANES // 2, list(rows)
    lower = [i // 2 + LANES * (i % 2) for i in range(LANES)]
    parts = [
        ir.Constant(_WORDS, [i + start for i in lower]) for start in (0, half)
    ]  # two vectors' lower halves lane by lane, and their upper ones
    # Each time a vector's number gains a bit of its elements' place, and they one of its number.
    for _ in range(LANES.bit_length() - 1):
        pairs = zip(found[:half], found[half:], strict=True)
        found = [b.shuffle_vector(x, y, part) for x, y in pairs for part in parts]
    return found


def load_halves(b: Any, base: Any) -> Any:
    """bfloat16 from an element on, as it is."""
    return b.load(b.bitcast(base, HALVES.as_pointer()), align=2)


def between(b: Any, first: Any, low: Any, high: Any) -> Any:
    """Which of the elements first, first + 1, ... are in [low, high); int64s of less than 2^31."""
    steps = ir.Constant(_WORDS, list(range(LANES)))
    index = b.add(repeated(b, b.trunc(first, I32)), steps)
    above = b.icmp_signed(">=", index, repeated(b, b.trunc(low, I32)))
    return b.and_(above, b.icmp_signed("<", index, repeated(b, b.trunc(high, I32))))


def exp2(b: Any, x: Any, fma: Any) -> Any:
    """2^x; 0 below 2^-126, infinity from 2^127.5 on, NaN of NaN."""
    x = b.select(b.fcmp_ordered(">", x, constant(_HIGHEST)), constant(_HIGHEST), x)
    return exp2_of_negative(b, x, fma)


def exp2_of_negative(b: Any, x: Any, fma: Any) -> Any:
    """2^x of x up to 0; 0 below 2^-126, NaN of NaN."""
    tiny = b.fcmp_ordered("<", x, constant(_LOWEST))
    x = b.select(tiny, constant(_LOWEST), x)
    shifted = b.fadd(x, constant(_ROUNDER))
    f = b.fsub(x, b.fsub(shifted, constant(_ROUNDER)))
    whole = b.add(b.shl(b.bitcast(shifted, _WORDS), words(23)), words(127 << 23))
    p = constant(_EXP2[0])
    for coefficient in (*_EXP2[1:], 1.0):
        p = b.call(fma, [p, f, constant(coefficient)])
    return b.select(tiny, constant(0.0), b.fmul(p, b.bitcast(whole, VECTOR)))


def gelu_erf(b: Any, x: Any) -> Any:
    """x/2 (1 + erf(x/sqrt 2)), operation by operation as emulator.epilogues."""
    z = b.fmul(x, constant(RSQRT2))
    for limit, beyond in ((-CLAMP, "<"), (CLAMP, ">")):  # a NaN is neither, and stays
        z = b.select(b.fcmp_ordered(beyond, z, constant(limit)), constant(limit), z)
    square = b.fmul(z, z)
    over = b.fmul(_polynomial(b, NUMERATOR, square), z)
    ratio = b.fdiv(over, _polynomial(b, DENOMINATOR, square))
    return b.fmul(b.fmul(x, constant(0.5)), b.fadd(ratio, constant(1.0)))


def _polynomial(b: Any, coefficients: Sequence[float], x: Any) -> Any:
    """Horner's scheme, highest power first; a product and a sum, each rounded."""
    result = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = b.fadd(b.fmul(result, x), constant(coefficient))
    return result


def gelu_tanh(b: Any, x: Any, fma: Any) -> Any:
    """x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), as x / (1 + e^(-2 u))."""
    square = b.fmul(b.fmul(x, x), constant(0.044715))
    inner = b.fmul(b.fadd(square, constant(1.0)), x)
    power = exp2(b, b.fmul(inner, constant(-2.0 * np.sqrt(2.0 / np.pi) / np.log(2.0))), fma)
    return b.fdiv(x, b.fadd(power, constant(1.0)))


def tanh(b: Any, x: Any, fma: Any) -> Any:
    """The tanh of x, as 1 - 2 / (1 + e^(2 x)); near 0 its power series, for its digits."""
    power = exp2(b, b.fmul(x, constant(2.0 / np.log(2.0))), fma)
    far = b.fsub(constant(1.0), b.fdiv(constant(2.0), b.fadd(power, constant(1.0))))
    square = b.fmul(x, x)
    near = constant(_TANH[0])
    for coefficient in _TANH[1:]:
        near = b.call(fma, [near, square, constant(coefficient)])
    is_near = b.fcmp_ordered("<", square, constant(_NEAR * _NEAR))
    return b.select(is_near, b.fmul(near, x), far)


def loop(b: Any, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> Any:
    """Do body(i) for i from start on, while i + step <= stop; the first i for which it is not."""

    def carrying(i: Any, _: Any) -> Any:
        body(i)
        return ZERO

    return carry(b, (start, stop, step), ZERO, carrying)[0]


def carry(
    b: Any, steps: tuple[Any, Any, int], value: Any, body: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """Do value = body(i, value) for i as in loop(); the first i that is not done, and the value."""
    start, stop, step = steps
    before, head = b.block, b.append_basic_block()
    inside, after = b.append_basic_block(), b.append_basic_block()
    b.branch(head)
    b.position_at_end(head)
    i, carried = b.phi(I64), b.phi(value.type)
    following = b.add(i, I64(step))
    b.cbranch(b.icmp_signed("<=", following, stop), inside, after)
    b.position_at_end(inside)
    new = body(i, carried)
    for phi, first, then in ((i, start, following), (carried, value, new)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, b.block)
    b.branch(head)
    b.position_at_end(after)
    return i, carried


def where(b: Any, wanted: Any, x: Any, change: Callable[[Any], Any]) -> Any:
    """What change(x) makes, if wanted, else x."""
    before, inside, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.cbranch(wanted, inside, after)
    b.position_at_end(inside)
    changed, changed_in = change(x), b.block
    b.branch(after)
    b.position_at_end(after)
    result = b.phi(x.type)
    result.add_incoming(x, before)
    result.add_incoming(changed, changed_in)
    return result
