"""LLVM code of O = softmax2(Q K^T) V for some query rows of some heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from . import vectors
from .panel_code import Panels, widen_rows
from .registers import LANES, Registers
from .vectors import (
    BITS,
    FLOATS,
    I64,
    INDICES,
    ONE,
    ZERO,
    at,
    between,
    carry,
    constant,
    loop,
)

# The fields of a call, all int64: addresses of bfloat16 heads with the elements from a head to the
# next and from a row to the next; sizes; and float32 or bfloat16 to work in.
FIELDS = (
    *(
        "q",
        "q_head",
        "q_row",
        "k",
        "k_head",
        "k_row",
        "v",
        "v_head",
        "v_row",
        "o",
        "o_head",
        "o_row",
    ),
    *("kv_heads", "share", "rows", "keys", "dim", "first", "window"),
    *("wide_q", "keys_by_dim", "scores", "sums"),
)


def attention(module: Any, registers: Registers, panels: Panels, fma: Any) -> None:
    """Add `attention`, of fields: O = softmax2(Q K^T) V, rounded, for query rows of some heads.

    `share` query heads have a key/value head's keys.

    Row i is query first + i in key positions; key j takes part if j < keys and abs(first + i - j)
    <= window. A query without a key gets zeros. dim is a multiple of LANES. Of a width w(keys), the
    keys filled up to a multiple of LANES: wide_q [rows, dim] and sums [rows, dim] float32, scores
    [rows, w] float32, keys_by_dim [w * dim] bfloat16.
    """
    made, b = vectors.function(module, "attention", (INDICES,))
    f = {name: b.load(at(b, made.args[0], i)) for i, name in enumerate(FIELDS)}
    kinds = {"wide_q": FLOATS, "scores": FLOATS, "sums": FLOATS}
    for name in ("q", "k", "v", "o", "wide_q", "keys_by_dim", "scores", "sums"):
        f[name] = b.inttoptr(f[name], kinds.get(name, BITS))
    width = b.mul(b.sdiv(b.add(f["keys"], I64(LANES - 1)), I64(LANES)), I64(LANES))
    one_slice = b.alloca(I64, size=2)

    def kv_head(g: Any) -> None:
        keys, values = (at(b, f[x], b.mul(g, f[f"{x}_head"])) for x in ("k", "v"))
        _turn(b, registers, keys, width, f)

        def query_head(s: Any) -> None:
            head = b.add(b.mul(g, f["share"]), s)
            source = at(b, f["q"], b.mul(head, f["q_head"]))
            widen_rows(b, (source, f["q_row"]), (f["wide_q"], f["dim"]), f["rows"], f["dim"])
            b.store(f["dim"], one_slice)

            def score(vectors_wide: int, left: Any) -> None:
                panel = at(b, f["keys_by_dim"], b.mul(left, f["dim"]))
                target = at(b, f["scores"], left)
                rows = f["wide_q"], f["dim"], f["rows"]
                stride = I64(vectors_wide * LANES)
                function = panels.of_width[vectors_wide]
                b.call(function, (*rows, panel, stride, target, width, one_slice, ONE))

            _by_panels(b, registers, width, score)
            loop(b, ZERO, f["rows"], 1, lambda i: _softmax(b, i, width, f, fma))
            b.store(f["keys"], one_slice)

            def weigh(vectors_wide: int, left: Any) -> None:
                rows = f["scores"], width, f["rows"]
                panel, target = at(b, values, left), at(b, f["sums"], left)
                function = panels.of_width[vectors_wide]
                b.call(function, (*rows, panel, f["v_row"], target, f["dim"], one_slice, ONE))

            _by_panels(b, registers, f["dim"], weigh)
            _store(b, head, f)

        loop(b, ZERO, f["share"], 1, query_head)

    loop(b, ZERO, f["kv_heads"], 1, kv_head)
    b.ret_void()


def _by_panels(b: Any, registers: Registers, width: Any, body: Any) -> None:
    """Do body(vectors, left) for panels of a width, a multiple of LANES, side by side."""
    left: Any = ZERO
    for wide in registers.widths:
        left = loop(b, left, width, wide * LANES, partial(body, wide))


def _turn(b: Any, registers: Registers, keys: Any, width: Any, f: Any) -> None:
    """keys_by_dim = K^T in panels [dim, columns] side by side; past the keys the last one again."""
    last = b.sub(f["keys"], ONE)

    def panel(wide: int, left: Any) -> None:
        target = at(b, f["keys_by_dim"], b.mul(left, f["dim"]))

        def square(j: Any) -> None:
            rows = []
            for i in range(LANES):
                key = b.add(b.add(left, j), I64(i))
                key = _smaller_of(b, key, last)
                rows.append(at(b, keys, b.mul(key, f["k_row"])))

            def some(d: Any) -> None:
                columns = vectors.turned(b, [vectors.load_halves(b, at(b, row, d)) for row in rows])
                for i, column in enumerate(columns):
                    place = b.mul(b.add(d, I64(i)), I64(wide * LANES))
                    vectors.store(b, column, at(b, target, place, j))

            loop(b, ZERO, f["dim"], LANES, some)

        loop(b, ZERO, I64(wide * LANES), LANES, square)

    _by_panels(b, registers, width, panel)


def _softmax(b: Any, i: Any, width: Any, f: Any, fma: Any) -> None:
    """A row of scores s becomes 2^(s - max) / sum over the keys that take part, rounded.

    Only vectors at the ends of the keys that take part have some that do not.
    """
    row = at(b, f["scores"], b.mul(i, width))
    query = b.add(f["first"], i)
    low, high = b.sub(query, f["window"]), b.add(b.add(query, f["window"]), ONE)
    low = _smaller_of(b, _larger_of(b, low, ZERO), f["keys"])
    high = _larger_of(b, _smaller_of(b, high, f["keys"]), low)
    # Vectors from `outer` on have keys that take part, from `inner` on nothing else, up to
    # `inner_end`; the last one begins before `outer_end`.
    mask = I64(-LANES)
    outer, inner_end = b.and_(low, mask), b.and_(high, mask)
    inner, outer_end = (b.and_(b.add(x, I64(LANES - 1)), mask) for x in (low, high))
    inner = b.select(b.icmp_signed("<", inner, inner_end), inner, outer_end)
    inner_end = _larger_of(b, inner_end, inner)
    parts = ((outer, inner, True), (inner, inner_end, False), (inner_end, outer_end, True))
    lowest = constant(float("-inf"))

    def every(value: Any, step: Any) -> Any:
        """value = step(place, value, what takes part) along the row."""
        for start, stop, partly in parts:

            def vector(j: Any, value: Any, partly: bool = partly) -> Any:
                some = between(b, j, low, high) if partly else None
                return step(at(b, row, j), value, some)

            _, value = carry(b, (start, stop, LANES), value, vector)
        return value

    def larger(place: Any, top: Any, some: Any) -> Any:
        x = vectors.load(b, place)
        x = x if some is None else b.select(some, x, lowest)
        return _larger(b, x, top)

    top = vectors.repeated(b, _across(b, every(lowest, larger), _larger))

    def power(place: Any, total: Any, some: Any) -> Any:
        p = vectors.exp2_of_negative(b, b.fsub(vectors.load(b, place), top), fma)
        p = p if some is None else b.select(some, p, constant(0.0))
        vectors.store(b, p, place)
        return b.fadd(total, p)

    total = _across(b, every(constant(0.0), power), lambda b, x, y: b.fadd(x, y))
    one = vectors.F32(1.0)
    without_key = b.fcmp_ordered("==", total, vectors.F32(0.0))  # all weights are 0 already
    inverse = vectors.repeated(b, b.fdiv(one, b.select(without_key, one, total)))

    def clear(j: Any) -> None:
        vectors.store(b, constant(0.0), at(b, row, j))

    def weight(j: Any) -> None:
        weights = b.fmul(vectors.load(b, at(b, row, j)), inverse)
        vectors.store(b, vectors.rounded_in_place(b, weights), at(b, row, j))

    loop(b, ZERO, outer, LANES, clear)
    loop(b, outer, outer_end, LANES, weight)
    loop(b, outer_end, width, LANES, clear)


def _smaller_of(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), x, y)


def _larger_of(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _across(b: Any, x: Any, combine: Any) -> Any:
    """All lanes of a vector combined, by halves."""
    wide = LANES
    while wide > 1:
        wide //= 2
        lanes = (
            ir.Constant(ir.VectorType(vectors.I32, wide), list(range(start, start + wide)))
            for start in (0, wide)
        )
        x = combine(b, *[b.shuffle_vector(x, x, part) for part in lanes])
    return b.extract_element(x, vectors.I32(0))


def _store(b: Any, head: Any, f: Any) -> None:
    """The sums, rounded, to the head's rows of O."""
    first = at(b, f["o"], b.mul(head, f["o_head"]))

    def row(i: Any) -> None:
        source, target = at(b, f["sums"], b.mul(i, f["dim"])), at(b, first, b.mul(i, f["o_row"]))

        def some(j: Any) -> None:
            vectors.store(
                b, vectors.rounded(b, vectors.load(b, at(b, source, j))), at(b, target, j)
            )

        loop(b, ZERO, f["dim"], LANES, some)

    loop(b, ZERO, f["rows"], 1, row)
