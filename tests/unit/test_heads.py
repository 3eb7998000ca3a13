"""The step between q, k, v and attention against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.attention import Rotary
from npu_embed.bf16 import round_f32
from npu_embed.device import Session
from npu_embed.heads import HeadStep
from npu_embed.rows import Rows

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
EPS, THETA, POSITIONS = 0.25, 100.0, 50

# float32 keeps 2^-24; a sum of n terms loses at most n of those, in practice about sqrt(n).
TOLERANCE = 64 * 2.0**-24
# A bfloat16 keeps 2^-9 of its own size; a number turned to nearly 0 is as exact as its pair.
BF16_TOLERANCE = 2.0**-8
UNTOUCHED = 7.0

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def session() -> Session:
    return Session.open("emulated")


def numbers(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wanted_heads(step: HeadStep, x: F32, positions: NDArray[np.intp]) -> F64:
    """x [rows, heads, head_dim] normed and turned, pair by pair."""
    y = x.astype(np.float64)
    normed = y[:, : len(step.norm)]
    normed *= step.norm / np.sqrt((normed * normed).mean(axis=-1, keepdims=True) + EPS)
    parts = positions.shape[1]
    size = x.shape[2] // parts
    for p in range(parts):
        for i in range(size // 2):
            first, second = p * size + i, p * size + i + size // 2
            angle = positions[:, p] * THETA ** (-2 * i / size)
            pair = y[:, : step.turned, first] + 1j * y[:, : step.turned, second]
            pair = pair * np.exp(1j * angle)[:, None]
            y[:, : step.turned, first], y[:, : step.turned, second] = pair.real, pair.imag
    return y


@pytest.mark.parametrize("head_dim", [32, 24])  # whole lanes, and not
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("turned", "normed"), [(4, 4), (4, 6), (6, 4), (1, 6), (6, 1)])
def test_heads_are_normed_and_turned_and_the_rest_is_as_it_was(
    session: Session, head_dim: int, parts: int, turned: int, normed: int
) -> None:
    rows, heads = 70, 6
    x = round_f32(numbers(rows, heads, head_dim))
    positions = np.random.default_rng(1).integers(0, POSITIONS, (rows, parts))
    norm = numbers(normed, head_dim, seed=2)
    step = HeadStep(heads, turned, norm, EPS, Rotary(THETA, head_dim // parts, POSITIONS))
    qkv, out = Rows(session, rows, heads * head_dim + 8), Rows(session, rows, heads * head_dim + 16)
    qkv.put(x.reshape(rows, -1))
    out.put(np.full((rows, out.width), UNTOUCHED, np.float32))

    wanted = wanted_heads(step, x, positions)
    found = step.get(qkv, positions)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=16 * TOLERANCE)
    plain = slice(max(turned, normed), None)
    np.testing.assert_array_equal(found[:, plain], x[:, plain])

    step.put(qkv, positions, out)
    put = out.get(rows)
    np.testing.assert_array_equal(put[:, heads * head_dim :], UNTOUCHED)
    np.testing.assert_array_equal(put[:, : heads * head_dim].reshape(found.shape), round_f32(found))
