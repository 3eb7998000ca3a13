"""bfloat16 against exact neighbours: nearest, ties to even, NaN kept, every layout the same."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import F32, U16
from hypothesis import given
from hypothesis import strategies as st

from npu_embed.bf16 import BLOCK_ELEMS, round_f32, to_bf16, to_f32

ALL = np.arange(1 << 16, dtype=np.uint16)
BF16_MAX = float.fromhex("0x1.fep127")
# Half way from the largest bfloat16 to the next power of two: from here on it is infinity.
OVERFLOW = float.fromhex("0x1.ffp127")


def value(bits: int) -> float:
    """A bfloat16's value, from its fields."""
    sign, exponent, fraction = bits >> 15, bits >> 7 & 0xFF, bits & 0x7F
    if exponent == 0xFF:
        size = np.nan if fraction else np.inf
    elif exponent == 0:
        size = fraction * 2.0**-133
    else:
        size = (128 + fraction) * 2.0 ** (exponent - 134)
    return -size if sign else size


def nearest(x: float) -> int:
    """The bits of the bfloat16 nearest to x >= 0, ties to even, by search among all of them."""
    if x >= OVERFLOW:
        return 0x7F80
    low, high = 0, 0x7F7F
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if value(middle) <= x else (low, middle - 1)
    above = min(low + 1, 0x7F7F)
    down, up = x - value(low), value(above) - x
    return low if down < up or (down == up and low % 2 == 0) else above


def test_widening_is_exact() -> None:
    wanted = np.array([value(int(bits)) for bits in ALL], np.float64)
    found = to_f32(ALL)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted, equal_nan=True)
    assert (np.signbit(found) == (ALL >> 15).astype(bool)).all()


def test_what_is_a_bfloat16_already_stays_itself() -> None:
    numbers = ALL[~np.isnan(to_f32(ALL))]
    assert (to_bf16(to_f32(numbers)) == numbers).all()


def test_a_nan_stays_a_nan_of_its_sign() -> None:
    bits = np.array(
        [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32
    )
    found = to_bf16(bits.view(np.float32))
    assert np.isnan(to_f32(found)).all()
    assert (found >> 15 == bits >> 31).all()


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (1.0, 0x3F80),
        (1.0 + 2.0**-8, 0x3F80),  # half way: even
        (1.0 + 2.0**-8 + 2.0**-23, 0x3F81),
        (1.0 + 3 * 2.0**-8, 0x3F82),  # half way: even
        (1.0 + 3 * 2.0**-8 - 2.0**-23, 0x3F81),
        (-1.0 - 3 * 2.0**-8, 0xBF82),
        (0.0, 0),
        (-0.0, 0x8000),
        (2.0**-133, 1),
        (2.0**-134, 0),
        (2.0**-134 + 2.0**-149, 1),
        (BF16_MAX, 0x7F7F),
        (float(np.nextafter(np.float32(OVERFLOW), np.float32(0))), 0x7F7F),
        (OVERFLOW, 0x7F80),
        (float(np.finfo(np.float32).max), 0x7F80),
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
    ],
)
def test_rounding_is_to_nearest_even(x: float, wanted: int) -> None:
    assert int(to_bf16(np.array([x], np.float32))[0]) == wanted


@given(st.lists(st.floats(0, width=32, allow_nan=False), min_size=1, max_size=40))
def test_any_number_goes_to_its_nearest_neighbour(numbers: list[float]) -> None:
    wanted = [nearest(x) for x in numbers]
    assert to_bf16(np.array(numbers, np.float32)).tolist() == wanted
    negative = to_bf16(-np.array(numbers, np.float32))
    assert negative.tolist() == [bits | 0x8000 for bits in wanted]


def some(shape: tuple[int, ...]) -> F32:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def one_by_one(x: F32) -> U16:
    flat = [to_bf16(np.array([v], np.float32))[0] for v in x.reshape(-1)]
    return np.array(flat, np.uint16).reshape(x.shape)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4)])
def test_any_shape_is_kept(shape: tuple[int, ...]) -> None:
    x = some(shape)
    found = to_bf16(x)
    assert found.shape == shape
    assert found.dtype == np.uint16
    assert np.array_equal(found, one_by_one(x))
    assert to_f32(found).shape == shape


def test_strides_of_input_and_output_do_not_show() -> None:
    x = some((6, 10))
    wanted = to_bf16(x)
    wide = np.zeros((12, 20), np.uint16)
    for source in (x, np.asfortranarray(x), np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2]):
        assert np.array_equal(to_bf16(source), wanted)
        for out in (np.empty((6, 10), np.uint16), wide[:6, :10], wide[::2, ::2], wide.T[:6, :10]):
            assert to_bf16(source, out=out) is out
            assert np.array_equal(out, wanted)
    cube = some((2, 3, 4))
    out = np.zeros((2, 3, 8), np.uint16)[:, :, ::2]
    assert np.array_equal(to_bf16(cube, out=out), to_bf16(cube))
    line = np.zeros(20, np.uint16)[::2]
    assert np.array_equal(to_bf16(x[0], out=line), wanted[0])
    assert np.array_equal(to_bf16(x[:, 0]), wanted[:, 0])


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_do_not_show(rows: int) -> None:
    x = some((rows, BLOCK_ELEMS + 3))
    x[-1, -1] = np.nan
    x[0, 0] = np.inf
    found = to_bf16(x)
    assert np.isnan(to_f32(found[-1, -1:])).all()
    assert np.isnan(to_f32(found)).sum() == 1
    edge = slice(BLOCK_ELEMS - 2, BLOCK_ELEMS + 2)
    assert np.array_equal(found[0, edge], one_by_one(x[0, edge]))
    strided = np.zeros((rows, 2 * x.shape[1]), np.uint16)[:, ::2]
    assert np.array_equal(to_bf16(x, out=strided), found)


def test_infinities_that_cancel_are_no_nan() -> None:
    x = np.array([np.inf, -np.inf, 1.0], np.float32)
    assert to_bf16(x).tolist() == [0x7F80, 0xFF80, 0x3F80]


def test_an_output_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out has shape \(3,\), wanted \(4,\)"):
        to_bf16(some((4,)), out=np.empty(3, np.uint16))
    with pytest.raises(ValueError, match=r"out has shape \(3,\), wanted \(4,\)"):
        to_f32(np.zeros(4, np.uint16), out=np.empty(3, np.float32))


def test_rounding_and_widening_go_into_given_arrays() -> None:
    bits = to_bf16(some((3, 4)))
    out = np.empty((3, 4), np.float32)
    assert to_f32(bits, out=out) is out
    assert np.array_equal(out, to_f32(bits))
    assert np.array_equal(round_f32(some((3, 4))), out)
