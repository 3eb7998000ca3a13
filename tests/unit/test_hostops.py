"""Host operations against float64."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed import jit
from npu_embed.bf16 import round_f32
from npu_embed.device import Session
from npu_embed.hostops import (
    POOLINGS,
    add_layer_norm,
    first_row,
    layer_norm,
    max_pool,
    mean_pool,
    put_layer_norm,
    row_numbers,
    unit_rows,
)
from npu_embed.rows import Rows

F32 = NDArray[np.float32]
EPS = 1e-12


@pytest.fixture
def session() -> Session:
    return Session.open("emulated")


# float32 keeps 2^-24; a sum of n terms loses at most n of those, in practice about sqrt(n).
TOLERANCE = 64 * 2.0**-24


def numbers(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("width", [64, 40])  # whole lanes, and not
@pytest.mark.parametrize("rows", [1, 2, 700])  # 700 rows of 64 are more than one block
def test_layer_norm_is_the_formula(rows: int, width: int) -> None:
    x = numbers(rows, width)
    weight, bias = numbers(1, width, seed=2)[0], numbers(1, width, seed=3)[0]
    wanted = layer_norm64(x, weight, bias)
    found = layer_norm(x, weight, bias, EPS)
    assert found is x
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * TOLERANCE)


def layer_norm64(x: F32, weight: F32, bias: F32) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    y -= y.mean(axis=1, keepdims=True)
    wanted: NDArray[np.float64] = (
        y / np.sqrt((y * y).mean(axis=1, keepdims=True) + EPS) * weight + bias
    )
    return wanted


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("rows", [1, 700])
@pytest.mark.parametrize("put", [True, False])
def test_what_follows_a_gemm_is_added_normed_and_put_in_one_step(
    session: Session, rows: int, width: int, put: bool
) -> None:
    x, weight, bias = numbers(rows, width), numbers(1, width, 2)[0], numbers(1, width, 3)[0]
    y, out = Rows(session, rows, width + 8), Rows(session, rows, width + 16)
    added = round_f32(numbers(rows, width, 4))
    y.put(added)  # as if the device had written it
    out.put(np.full((rows, width + 16), 7.0, np.float32))
    wanted = layer_norm64(x + added, weight, bias)
    add_layer_norm(x, y, weight, bias, EPS, out if put else None)
    np.testing.assert_allclose(x, wanted, rtol=0, atol=8 * TOLERANCE)
    device = out.get(rows)
    np.testing.assert_array_equal(device[:, :width], round_f32(x) if put else 7.0)
    np.testing.assert_array_equal(device[:, width:], 7.0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("rows", "width"), [(8, 64), (9, 48)])
def test_a_step_that_would_leave_a_row_buffer_is_refused(
    session: Session, rows: int, width: int
) -> None:
    x, weight, bias = numbers(9, 64), numbers(1, 64, 2)[0], numbers(1, 64, 3)[0]
    small, large = Rows(session, rows, width), Rows(session, 9, 64)
    with pytest.raises(ValueError, match=r"\[9, 64\] at \(0, 0\) leaves rows"):
        put_layer_norm(x, weight, bias, EPS, small)
    for y, out in ((small, large), (large, small)):
        with pytest.raises(ValueError, match=r"\[9, 64\] at \(0, 0\) leaves rows"):
            add_layer_norm(x, y, weight, bias, EPS, out)


@pytest.mark.usefixtures("kernels")
def test_embeddings_are_normed_and_put_in_one_step(session: Session) -> None:
    x, weight, bias = numbers(9, 64), numbers(1, 64, 2)[0], numbers(1, 64, 3)[0]
    out = Rows(session, 12, 64)
    wanted = layer_norm(x.copy(), weight, bias, EPS)
    put_layer_norm(x, weight, bias, EPS, out)
    np.testing.assert_array_equal(x, wanted)
    np.testing.assert_array_equal(out.get(9), round_f32(wanted))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 1e18])
@pytest.mark.parametrize("width", [16, 384, 1040])
def test_compiled_norms_give_the_bits_of_numpys(
    session: Session,
    width: int,
    scale: float,
    compiled_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 300
    x, y = numbers(rows, width) * np.float32(scale), Rows(session, rows, width)
    x[0] = 0.0
    y.put(numbers(rows, width, 5))
    weight, bias = numbers(1, width, 2)[0], numbers(1, width, 3)[0]
    found = []
    for kernels in (None, compiled_kernels):
        monkeypatch.setattr(jit, "kernels", kernels)
        z, out = x.copy(), Rows(session, rows, width)
        with np.errstate(over="ignore", invalid="ignore"):
            put_layer_norm(z, weight, bias, EPS, out)
            add_layer_norm(z, y, weight, bias, EPS, out)
        found.append((z.view(np.uint32), out.bits(rows)))
    for numpys, compiled in zip(*found, strict=True):
        np.testing.assert_array_equal(numpys, compiled)


def test_layer_norm_of_equal_values_is_the_bias() -> None:
    bias = numbers(1, 8)[0]
    x = np.full((2, 8), 3, np.float32)
    np.testing.assert_array_equal(layer_norm(x, np.ones(8, np.float32), bias, 1e-12), [bias, bias])


def test_layer_norm_eps_counts() -> None:
    x = np.array([[1e-3, -1e-3]], np.float32)
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    found = layer_norm(x, ones, zeros, 1e-6)
    np.testing.assert_allclose(found, [[2**-0.5, -(2**-0.5)]], rtol=1e-4)


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
