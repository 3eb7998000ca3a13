"""Host operations against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.hostops import (
    POOLINGS,
    first_row,
    layer_norm,
    max_pool,
    mean_pool,
    rms_norm,
    row_numbers,
    unit_rows,
)

F32 = NDArray[np.float32]

# float32 keeps 2^-24; a sum of n terms loses at most n of those, in practice about sqrt(n).
TOLERANCE = 64 * 2.0**-24


def numbers(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 700])  # 700 rows of 64 are more than one block
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm_is_the_formula(rows: int, with_residual: bool) -> None:
    x, residual = numbers(rows, 64), numbers(rows, 64, seed=1) if with_residual else None
    weight, bias = numbers(1, 64, seed=2)[0], numbers(1, 64, seed=3)[0]
    y = x.astype(np.float64) + (0 if residual is None else residual)
    y -= y.mean(axis=1, keepdims=True)
    wanted = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + 1e-12) * weight + bias
    kept = None if residual is None else residual.copy()
    found = layer_norm(x, weight, bias, 1e-12, residual)
    assert found is x
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * TOLERANCE)
    if residual is not None:
        np.testing.assert_array_equal(residual, kept)


def test_layer_norm_of_equal_values_is_the_bias() -> None:
    bias = numbers(1, 8)[0]
    x = np.full((2, 8), 3, np.float32)
    np.testing.assert_array_equal(layer_norm(x, np.ones(8, np.float32), bias, 1e-12), [bias, bias])


def test_layer_norm_eps_counts() -> None:
    x = np.array([[1e-3, -1e-3]], np.float32)
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    found = layer_norm(x, ones, zeros, 1e-6)
    np.testing.assert_allclose(found, [[2**-0.5, -(2**-0.5)]], rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 64), (700, 64), (1, 3, 8), (90, 5, 128)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_is_the_formula_over_the_last_axis(shape: tuple[int, ...], weighted: bool) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal(shape[1:]).astype(np.float32)
    y = x.astype(np.float64)
    wanted = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 0.25) * (weight if weighted else 1)
    kept = x.copy()
    found = rms_norm(x, weight if weighted else None, 0.25)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * TOLERANCE)
    np.testing.assert_array_equal(x, kept)


def test_rms_norm_may_overwrite_a_part_of_an_array_and_only_that() -> None:
    x = np.random.default_rng(0).standard_normal((300, 6, 32)).astype(np.float32)
    wanted, rest = rms_norm(x[:, 1:4].copy(), None, 1e-6), x[:, 4:].copy()
    part = x[:, 1:4]
    assert rms_norm(part, None, 1e-6, out=part) is part
    np.testing.assert_array_equal(x[:, 1:4], wanted)
    np.testing.assert_array_equal(x[:, 4:], rest)


STARTS, LENGTHS = (0, 3, 4), (3, 1, 5)


def test_poolings_take_the_rows_of_their_text_alone() -> None:
    x = numbers(9, 4)
    parts = [x[s : s + n].astype(np.float64) for s, n in zip(STARTS, LENGTHS, strict=True)]
    np.testing.assert_allclose(
        mean_pool(x, STARTS, LENGTHS), [p.mean(axis=0) for p in parts], atol=TOLERANCE
    )
    np.testing.assert_array_equal(max_pool(x, STARTS, LENGTHS), [p.max(axis=0) for p in parts])
    np.testing.assert_array_equal(first_row(x, STARTS, LENGTHS), [p[0] for p in parts])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooled_rows_are_float32_of_their_own(pooling: str) -> None:
    x = numbers(9, 4)
    pooled = POOLINGS[pooling](x, STARTS, LENGTHS)
    assert pooled.dtype == np.float32
    assert not np.shares_memory(pooled, x)


def test_unit_rows_have_length_one_and_keep_their_direction() -> None:
    x = numbers(5, 384)
    unit = unit_rows(x)
    assert unit.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(unit.astype(np.float64), axis=1), 1, atol=TOLERANCE)
    wanted = x / np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
    np.testing.assert_allclose(unit, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("scale", [6e-13, 1.0, 1e30])
def test_unit_rows_of_the_smallest_and_largest_have_length_one(scale: float) -> None:
    unit = unit_rows(np.full((1, 4), scale, np.float32))
    assert float(np.linalg.norm(unit)) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("bad", [0.0, 4e-13, 1e-30, 3e38, np.inf, np.nan])
def test_a_row_without_a_direction_is_nan_and_spoils_no_other(bad: float) -> None:
    unit = unit_rows(np.array([[3, 4], [bad, bad], [0, 5]], np.float32))
    assert np.isnan(unit[1]).all()
    wanted = np.array([[0.6, 0.8], [0, 1]])
    np.testing.assert_allclose(unit[[0, 2]], wanted, atol=TOLERANCE)


def test_unit_rows_of_a_slice_does_not_touch_the_slice() -> None:
    x = numbers(3, 8)
    kept = x.copy()
    unit_rows(x[:, :5])
    np.testing.assert_array_equal(x, kept)


def test_row_numbers_begin_anew_with_each_text() -> None:
    assert row_numbers(STARTS, LENGTHS).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
