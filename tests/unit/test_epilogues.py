"""Epilogues against float64 and math.erf."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from handmade import F32_ULP
from handmade_gemm import GELU_ABSOLUTE, epilogue64

from npu_embed import jit
from npu_embed.bf16 import round_f32, to_bf16, to_f32
from npu_embed.cores import Scratch
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


pytestmark = pytest.mark.usefixtures("kernels")


def finish(acc: np.ndarray, bias: np.ndarray | None, epilogue: int) -> np.ndarray:
    """What the epilogue writes, as bfloat16 bits; between and behind the rows nothing is."""
    rows, n = acc.shape
    n_out = n // 2 if epilogue == epilogues.GEGLU_TANH else n
    stride, first = n_out + 3, 2
    elements = np.full(first + rows * stride, 0xABCD, np.uint16)
    with np.errstate(all="ignore"):  # as the program does: the cube of 3e38
        out = elements, first, stride
        epilogues.finish(acc.astype(np.float32), bias, epilogue, N_TILE, out, Scratch())
    found = elements[first:].reshape(rows, stride)
    assert (elements[:first] == 0xABCD).all()
    assert (found[:, n_out:] == 0xABCD).all()
    return found[:, :n_out]


def column(epilogue: int, x: np.ndarray) -> np.ndarray:
    return finish(x.reshape(-1, 1), None, epilogue)[:, 0]


def assert_rounds(found: np.ndarray, wanted: np.ndarray, off: np.ndarray) -> None:
    """The bits are those of a number within `off` of `wanted`: rounding keeps order."""
    low, high = (round_f32((wanted + sign * off).astype(np.float32)) for sign in (-1, 1))
    value = to_f32(found)
    assert ((low <= value) & (value <= high)).all(), np.abs(value - wanted).max()


@pytest.mark.parametrize(
    "epilogue", [epilogues.NONE, epilogues.GELU_ERF, epilogues.GELU_TANH, epilogues.TANH]
)
def test_an_epilogue_is_its_formula(epilogue: int) -> None:
    with np.errstate(over="ignore"):
        wanted = epilogue64(LINE.astype(np.float64), epilogue, N_TILE)
        off = FEW_ULPS * np.abs(wanted) + GELU_ABSOLUTE
        assert_rounds(column(epilogue, LINE), wanted, off)


def test_gelu_is_that_of_math_erf() -> None:
    for x in np.linspace(-5, 5, 1001, dtype=np.float32):
        wanted = x / 2 * (1 + math.erf(x / math.sqrt(2)))
        found = column(epilogues.GELU_ERF, np.array([x], np.float32))
        assert_rounds(found, np.array([wanted]), FEW_ULPS * abs(wanted) + GELU_ABSOLUTE)


@pytest.mark.parametrize("epilogue", [epilogues.GELU_ERF, epilogues.GELU_TANH])
def test_gelu_of_a_large_negative_number_is_zero_and_of_a_large_positive_one_itself(
    epilogue: int,
) -> None:
    large = np.array([50.0, 1e6, 1e30], np.float32)
    assert (column(epilogue, large) == to_bf16(large)).all()
    assert (to_f32(column(epilogue, -large)) == 0).all()


def test_the_two_gelus_differ_where_they_should() -> None:
    # The tanh form is an approximation; their greatest distance is near 2.0 and 4.7e-4 wide.
    line = LINE[(np.abs(LINE) > 2.0) & (np.abs(LINE) < 4.0) & (LINE < 0)]  # where bfloat16 shows it
    erf, tanh = (to_f32(column(e, line)) for e in (epilogues.GELU_ERF, epilogues.GELU_TANH))
    assert 4e-4 < np.abs(erf - tanh).max() < 8e-4


def test_a_geglu_pair_takes_gates_first_and_halves_the_columns() -> None:
    rng = np.random.default_rng(0)
    acc = rng.standard_normal((5, 3 * N_TILE)).astype(np.float32)
    bias = rng.standard_normal(3 * N_TILE).astype(np.float32)
    wanted = epilogue64(acc.astype(np.float64) + bias, epilogues.GEGLU_TANH, N_TILE)
    found = finish(acc, bias, epilogues.GEGLU_TANH)
    off = 2 * FEW_ULPS * max(1, np.abs(wanted).max())
    assert_rounds(found, wanted, np.full_like(wanted, off))


@pytest.mark.parametrize("epilogue", range(5))
def test_blocks_of_rows_do_not_show(epilogue: int) -> None:
    rng = np.random.default_rng(1)
    n = N_TILE * 128
    rows = 3 * epilogues.BLOCK_ELEMS // n + 1
    acc = rng.standard_normal((rows, n)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    whole = finish(acc, bias, epilogue)
    for row in (0, rows // 2, rows - 1):
        alone = finish(acc[row : row + 1], bias, epilogue)
        assert (whole[row] == alone[0]).all()


def test_without_a_bias_nothing_is_added() -> None:
    acc = np.ones((2, N_TILE), np.float32)
    assert (to_f32(finish(acc, None, epilogues.NONE)) == 1).all()
    assert (to_f32(finish(acc, acc[0].copy(), epilogues.NONE)) == 2).all()


@pytest.mark.parametrize("epilogue", range(5))
@pytest.mark.parametrize("biased", [False, True])
def test_compiled_epilogues_give_the_bits_of_numpys(
    epilogue: int, biased: bool, compiled_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(epilogue)
    acc = (rng.standard_normal((37, 5 * N_TILE)) * 10.0 ** rng.integers(-3, 3, (37, 1))).astype(
        np.float32
    )
    acc[3, :8] = [0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40]
    bias = rng.standard_normal(acc.shape[1]).astype(np.float32) if biased else None
    found = {}
    for name, kernels in (("numpy", None), ("compiled", compiled_kernels)):
        monkeypatch.setattr(jit, "kernels", kernels)
        found[name] = finish(acc, bias, epilogue)
    np.testing.assert_array_equal(to_f32(found["numpy"]), to_f32(found["compiled"]))
    number = ~np.isnan(to_f32(found["numpy"]))
    np.testing.assert_array_equal(found["numpy"][number], found["compiled"][number])
