"""Sums of a row in the order of `lanes`, compiled: the lanes are one vector, two AVX registers.

Written as vector instructions: the compiler may not reorder a sum of floats by itself, and numba
leaves sixteen sums in sixteen variables one number at a time, several times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import LANES

_FLOAT = ir.FloatType()
_LANES = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(32)


@intrinsic
def sum_of(typingctx: Any, x: Any) -> Any:
    """The sum of x [n] by lanes, C-contiguous float32; n a multiple of LANES."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _sum(context, builder, signature.args[0], args[0], lambda lanes: lanes)

    return (types.float32(x), generate) if _is_row(x) else None


@intrinsic
def sum_of_squares(typingctx: Any, x: Any, shift: Any) -> Any:
    """The sum of (x - shift)^2 by lanes; x as in sum_of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(_undefined(_LANES), args[1], _INDEX(0))
        shifts = builder.shuffle_vector(first, _undefined(_LANES), _mask([0] * LANES))

        def square(lanes: Any) -> Any:
            off = builder.fsub(lanes, shifts)
            return builder.fmul(off, off)

        return _sum(context, builder, signature.args[0], args[0], square)

    return (types.float32(x, types.float32), generate) if _is_row(x) else None


def _is_row(x: Any) -> bool:
    """Whether a type is that of numbers side by side."""
    return isinstance(x, types.Array) and (x.dtype, x.ndim, x.layout) == (types.float32, 1, "C")


def _sum(
    context: Any, builder: Any, array_type: Any, array: Any, term: Callable[[Any], Any]
) -> Any:
    """Code for the sum of term(x) by lanes."""
    x = context.make_array(array_type)(context, builder, array)
    total = cgutils.alloca_once_value(builder, ir.Constant(_LANES, [0.0] * LANES))
    n = builder.extract_value(x.shape, 0)
    with cgutils.for_range_slice(builder, n.type(0), n, n.type(LANES), n.type) as (j, _):
        some = builder.bitcast(builder.gep(x.data, [j]), _LANES.as_pointer())
        lanes = builder.load(some, align=4 if array_type.aligned else 1)
        builder.store(builder.fadd(builder.load(total), term(lanes)), total)
    lanes, width = builder.load(total), LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(lanes, _undefined(lanes.type), _mask(range(at, at + width)))
            for at in (0, width)
        )
        lanes = builder.fadd(low, high)
    return builder.extract_element(lanes, _INDEX(0))


def _undefined(of: Any) -> Any:
    return ir.Constant(of, ir.Undefined)


def _mask(lanes: Any) -> Any:
    """Which lanes a shuffle takes."""
    return ir.Constant(ir.VectorType(_INDEX, len(lanes)), list(lanes))
