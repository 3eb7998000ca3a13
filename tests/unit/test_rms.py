"""RMS norms against float64, alone and with what is before and behind them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bf16 import round_f32
from npu_embed.device import Session
from npu_embed.rms import ONE, Put, add_rms_norm, put_gated, put_rms_norm, rms_norm
from npu_embed.rows import Rows

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
EPS = 0.25

# float32 keeps 2^-24; a sum of n terms loses at most n of those, in practice about sqrt(n).
TOLERANCE = 64 * 2.0**-24
BF16_TOLERANCE = 2.0**-8 + TOLERANCE  # a bfloat16 keeps 2^-9 of its own size
UNTOUCHED = 7.0


@pytest.fixture
def session() -> Session:
    return Session.open("emulated")


def numbers(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normed64(x: F32 | F64, weight: F32 | float = 1.0) -> F64:
    y = x.astype(np.float64)
    found: F64 = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + EPS) * weight
    return found


def written(session: Session, x: F32, *, more: int = 8) -> Rows:
    """A row buffer with x, as if the device had written it, and `more` columns."""
    rows = Rows(session, len(x), x.shape[1] + more)
    rows.put(np.full((len(x), x.shape[1] + more), UNTOUCHED, np.float32))
    rows.put(x)
    return rows


@pytest.mark.parametrize("shape", [(1, 64), (700, 64), (1, 3, 8), (90, 5, 128)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_is_the_formula_over_the_last_axis(shape: tuple[int, ...], weighted: bool) -> None:
    x = numbers(*shape)
    weight = numbers(*shape[1:], seed=1) if weighted else None
    kept = x.copy()
    found = rms_norm(x, weight, EPS)
    assert found.dtype == np.float32
    wanted = normed64(x, 1.0 if weight is None else weight)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * TOLERANCE)
    np.testing.assert_array_equal(x, kept)


def test_rms_norm_may_overwrite_a_part_of_an_array_and_only_that() -> None:
    x = numbers(300, 6, 32)
    wanted, rest = rms_norm(x[:, 1:4].copy(), None, 1e-6), x[:, 4:].copy()
    part = x[:, 1:4]
    assert rms_norm(part, None, 1e-6, out=part) is part
    np.testing.assert_array_equal(x[:, 1:4], wanted)
    np.testing.assert_array_equal(x[:, 4:], rest)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 40])  # whole lanes, and not
@pytest.mark.parametrize("rows", [1, 700])
def test_the_norm_of_rows_is_put_and_they_stay(session: Session, rows: int, width: int) -> None:
    x, out = numbers(rows, width), written(session, numbers(rows, width, seed=1))
    kept = x.copy()
    put_rms_norm(x, EPS, out)
    np.testing.assert_array_equal(x, kept)
    found = out.get(rows)
    np.testing.assert_allclose(found[:, :width], normed64(x), rtol=BF16_TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(found[:, width:], UNTOUCHED)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("put", ["norm", "x", None])
@pytest.mark.parametrize("scale", [1.0, -0.75])
def test_what_runs_gave_is_summed_normed_added_and_put(
    session: Session, width: int, runs: int, put: Put, scale: float
) -> None:
    rows = 90
    x, weight = numbers(rows, width), numbers(width, seed=1)
    given = [round_f32(numbers(rows, width, seed=2 + i)) for i in range(runs)]
    wanted = (x + normed64(np.stack(given).sum(axis=0, dtype=np.float64), weight)) * scale
    out = written(session, numbers(rows, width, seed=9))
    before = out.get(rows)
    ys = [written(session, y) for y in given]
    add_rms_norm(x, ys, weight, EPS, scale=np.float32(scale), out=out, put=put)
    np.testing.assert_allclose(x, wanted, rtol=0, atol=16 * TOLERANCE)
    found = out.get(rows)
    if put == "norm":
        wanted = normed64(x)
        np.testing.assert_allclose(found[:, :width], wanted, rtol=BF16_TOLERANCE, atol=TOLERANCE)
    else:
        np.testing.assert_array_equal(found[:, :width], round_f32(x) if put else before[:, :width])
    np.testing.assert_array_equal(found[:, width:], UNTOUCHED)


@pytest.mark.usefixtures("kernels")
def test_slices_are_summed_in_their_order(session: Session) -> None:
    first = np.full((1, 16), 2.0**24, np.float32)
    given = [first, np.ones((1, 16), np.float32), -first]  # 2^24 + 1 is 2^24 in float32
    x, out = np.zeros((1, 16), np.float32), Rows(session, 1, 16)
    ys = [written(session, y) for y in given]
    add_rms_norm(x, ys, np.ones(16, np.float32), 1.0, scale=ONE, out=out, put=None)
    np.testing.assert_array_equal(x, 0.0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 40])
def test_a_gate_is_multiplied_by_the_norm_of_its_columns(session: Session, width: int) -> None:
    rows, column = 90, 24
    gate, c = round_f32(numbers(rows, width)), round_f32(numbers(rows, width + column, seed=1))
    weight, out = numbers(width, seed=2), written(session, numbers(rows, width, seed=3))
    elements, first, stride = written(session, c).receive(rows, width + column)
    columns = elements, first + column, stride
    put_gated(written(session, gate), columns, rows, weight, EPS, out)
    found, wanted = out.get(rows), gate * normed64(c[:, column:], weight)
    np.testing.assert_allclose(found[:, :width], wanted, rtol=BF16_TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(found[:, width:], UNTOUCHED)
