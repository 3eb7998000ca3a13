"""Attention on the host against float64, a query at a time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed import attention
from npu_embed.attention import Rotary, attend, attend_texts

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# float32 keeps 2^-24; a sum of n terms loses at most n of those, in practice about sqrt(n).
TOLERANCE = 64 * 2.0**-24


def numbers(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heads_of(rows: int, heads: int, kv_heads: int, head_dim: int) -> tuple[F32, F32, F32]:
    """The arrays q, k and v as slices of one array, as they stand in a row buffer."""
    whole = numbers(rows, heads + 2 * kv_heads, head_dim)
    return whole[:, :heads], whole[:, heads : heads + kv_heads], whole[:, heads + kv_heads :]


def wanted_attention(q: F32, k: F32, v: F32, window: int | None) -> F64:
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.empty((rows, heads, head_dim))
    for i in range(rows):
        seen = [j for j in range(rows) if window is None or abs(i - j) <= window]
        for h in range(heads):
            scores = k[seen, h // group].astype(np.float64) @ q[i, h]
            p = np.exp(scores - scores.max())
            out[i, h] = (p / p.sum()) @ v[seen, h // group]
    return out.reshape(rows, -1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 0, 1, 5, 19, 20, 21])
def test_attention_is_the_formula(heads: int, kv_heads: int, window: int | None) -> None:
    q, k, v = heads_of(21, heads, kv_heads, 8)
    found = attend(q, k, v, window)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted_attention(q, k, v, window), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 2, 7])
@pytest.mark.parametrize("block", [1, 4, 21])
def test_blocks_of_queries_change_nothing(
    window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads_of(21, 4, 2, 8)
    monkeypatch.setattr(attention, "_QUERY_ROWS", block)
    wanted = wanted_attention(q, k, v, window)
    np.testing.assert_allclose(attend(q, k, v, window), wanted, rtol=0, atol=TOLERANCE)


def test_a_window_no_key_is_outside_of_changes_no_bit() -> None:
    q, k, v = heads_of(9, 4, 2, 8)
    np.testing.assert_array_equal(attend(q, k, v, 8), attend(q, k, v))
    assert (attend(q, k, v, 7) != attend(q, k, v)).any()


def test_large_scores_overflow_nothing() -> None:
    q, k, v = heads_of(5, 1, 1, 8)
    found = attend(q * np.float32(1e4), k, v)
    nearest = np.argmax(q[:, 0].astype(np.float64) @ k[:, 0].T, axis=1)
    np.testing.assert_allclose(found, v[nearest, 0], rtol=0, atol=TOLERANCE)


def test_texts_see_their_own_rows_alone() -> None:
    q, k, v = heads_of(12, 4, 2, 8)
    found = attend_texts(q, k, v, (0, 5, 6), (5, 1, 6), 3)
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        np.testing.assert_array_equal(found[rows], attend(q[rows], k[rows], v[rows], 3))
    np.testing.assert_allclose(found[5], np.repeat(v[5], 2, axis=0).reshape(-1), atol=TOLERANCE)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_positions_turn_pairs_half_a_head_apart(theta: float) -> None:
    x, positions = numbers(700, 3, 16), np.arange(700) % 300
    wanted = np.empty(x.shape)
    for i in range(8):
        angle = positions * theta ** (-2 * i / 16)
        turned = (x[:, :, i] + 1j * x[:, :, i + 8]) * np.exp(1j * angle)[:, None]
        wanted[:, :, i], wanted[:, :, i + 8] = turned.real, turned.imag
    Rotary(theta, 16, 300).turn(x, positions)
    np.testing.assert_allclose(x, wanted, rtol=0, atol=TOLERANCE)


def test_rotary_positions_turn_a_part_of_an_array_and_only_that() -> None:
    whole = numbers(5, 6, 8)
    kept, part = whole.copy(), whole[:, :4]
    Rotary(1e4, 8, 5).turn(part, np.arange(5))
    np.testing.assert_array_equal(whole[:, 4:], kept[:, 4:])
    np.testing.assert_array_equal(whole[0], kept[0])  # position 0 turns nothing
    assert (whole[1:, :4] != kept[1:, :4]).any(axis=2).all()


def test_a_score_depends_on_the_distance_of_two_positions_alone() -> None:
    rotary = Rotary(1e4, 16, 1000)
    scores = []
    for start in (0, 1, 500, 990):
        q, k = numbers(1, 1, 16), numbers(1, 1, 16, seed=1)
        rotary.turn(q, np.array([start + 7]))
        rotary.turn(k, np.array([start]))
        scores.append(float(np.vdot(q, k)))
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=TOLERANCE)
