"""Epilogues against float64 and math.erf."""

from __future__ import annotations

import math

import numpy as np
import pytest
from handmade import F32_ULP
from handmade_gemm import GELU_ABSOLUTE, epilogue64

from npu_embed.emulator import epilogues

N_TILE = 16
LINE = np.concatenate(
    [
        np.linspace(-12, 12, 4801),
        [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 3e38, -3e38],
    ]
).astype(np.float32)
# A handful of float32 operations: a few units in the last place of the result.
FEW_ULPS = 8 * F32_ULP


def column(epilogue: int, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # as the program does: the cube of 3e38
        return epilogues.apply(x.reshape(-1, 1).copy(), None, epilogue, N_TILE)[:, 0]


@pytest.mark.parametrize(
    "epilogue", [epilogues.NONE, epilogues.GELU_ERF, epilogues.GELU_TANH, epilogues.TANH]
)
def test_an_epilogue_is_its_formula(epilogue: int) -> None:
    with np.errstate(over="ignore"):
        wanted = epilogue64(LINE.astype(np.float64), epilogue, N_TILE)
    off = np.abs(column(epilogue, LINE) - wanted)
    assert (off <= FEW_ULPS * np.abs(wanted) + GELU_ABSOLUTE).all(), off.max()


def test_gelu_is_that_of_math_erf() -> None:
    for x in np.linspace(-5, 5, 1001, dtype=np.float32):
        wanted = x / 2 * (1 + math.erf(x / math.sqrt(2)))
        found = column(epilogues.GELU_ERF, np.array([x], np.float32))[0]
        assert abs(found - wanted) <= FEW_ULPS * abs(wanted) + GELU_ABSOLUTE


@pytest.mark.parametrize("epilogue", [epilogues.GELU_ERF, epilogues.GELU_TANH])
def test_gelu_of_a_large_negative_number_is_zero_and_of_a_large_positive_one_itself(
    epilogue: int,
) -> None:
    large = np.array([50.0, 1e6, 1e30], np.float32)
    assert (column(epilogue, large) == large).all()
    assert (column(epilogue, -large) == 0).all()


def test_the_two_gelus_differ_where_they_should() -> None:
    # The tanh form is an approximation; their greatest distance is near 2.0 and 4.7e-4 wide.
    distance = np.abs(column(epilogues.GELU_ERF, LINE) - column(epilogues.GELU_TANH, LINE))
    assert 4e-4 < distance[np.abs(LINE) < 12].max() < 6e-4


def test_a_geglu_pair_takes_gates_first_and_halves_the_columns() -> None:
    rng = np.random.default_rng(0)
    acc = rng.standard_normal((5, 3 * N_TILE)).astype(np.float32)
    bias = rng.standard_normal(3 * N_TILE).astype(np.float32)
    wanted = epilogue64(acc.astype(np.float64) + bias, epilogues.GEGLU_TANH, N_TILE)
    found = epilogues.apply(acc.copy(), bias, epilogues.GEGLU_TANH, N_TILE)
    assert found.shape == (5, 3 * N_TILE // 2)
    assert np.abs(found - wanted).max() <= 2 * FEW_ULPS * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("epilogue", range(5))
def test_blocks_of_rows_do_not_show(epilogue: int) -> None:
    rng = np.random.default_rng(1)
    n = N_TILE * 128
    rows = 3 * epilogues.BLOCK_ELEMS // n + 1
    acc = rng.standard_normal((rows, n)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    whole = epilogues.apply(acc.copy(), bias, epilogue, N_TILE)
    for row in (0, rows // 2, rows - 1):
        alone = epilogues.apply(acc[row : row + 1].copy(), bias, epilogue, N_TILE)
        assert (whole[row] == alone[0]).all()


def test_without_a_bias_nothing_is_added() -> None:
    acc = np.ones((2, N_TILE), np.float32)
    assert (epilogues.apply(acc.copy(), None, epilogues.NONE, N_TILE) == 1).all()
    assert (epilogues.apply(acc, acc[0].copy(), epilogues.NONE, N_TILE) == 2).all()
