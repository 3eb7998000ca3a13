"""The compiled products: right, and the same bits for any rows and registers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bf16 import F32, to_bf16, to_f32
from npu_embed.cores import Scratch
from npu_embed.emulator import epilogues
from npu_embed.jit import product
from npu_embed.jit.product import Product
from npu_embed.jit.registers import BIAS, GELU, NONE, REGISTERS

pytest.importorskip("llvmlite", reason="llvmlite is not installed: nothing is compiled")

# A chain of K float32 additions is off by at most K units in the last place of the sum of the
# products' magnitudes.
UNIT = 2.0**-24


@functools.cache
def built(name: str) -> Product:
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get(name):
        pytest.skip(f"this machine has no {name}")
    return product.build(REGISTERS[name])


@pytest.fixture(params=list(REGISTERS))
def compiled(request: pytest.FixtureRequest) -> Product:
    return built(request.param)


def operands(m: int, k: int, n: int, seed: int = 0) -> tuple[F32, NDArray[np.uint16]]:
    """A and B of bfloat16 values; A in float32."""
    rng = np.random.default_rng(seed)
    a, b = (to_bf16(rng.standard_normal(shape, np.float32)) for shape in ((m, k), (k, n)))
    return to_f32(a), b


def multiplied(compiled: Product, a: F32, b: NDArray[np.uint16]) -> F32:
    c = np.full((len(a), b.shape[1]), np.nan, np.float32)
    compiled.multiply(a, compiled.pack(b), c)
    return c


@pytest.mark.parametrize("k", [1, 64, 447, 448, 449, 500, 896, 1000, 1536])
@pytest.mark.parametrize("m", [1, 7, 13])
def test_a_product_is_that_of_exact_arithmetic(compiled: Product, m: int, k: int) -> None:
    a, b = operands(m, k, 128)
    found = multiplied(compiled, a, b)
    wide = to_f32(b).astype(np.float64)
    assert (abs(found - a @ wide) <= k * UNIT * (abs(a) @ abs(wide))).all()


def test_a_rows_bits_do_not_depend_on_the_others(compiled: Product) -> None:
    a, b = operands(29, 1536, 64)
    together = multiplied(compiled, a, b)
    for row in range(len(a)):
        alone = multiplied(compiled, a[row : row + 1].copy(), b)
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("k", [384, 1000, 1536])
def test_wide_and_narrow_registers_give_the_same_bits(k: int) -> None:
    a, b = operands(11, k, 128)
    found = [multiplied(built(name), a, b) for name in REGISTERS]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("k", [384, 1000, 1536])
def test_the_sums_are_chains_in_slices(compiled: Product, k: int) -> None:
    # In a chain that begins with 2^24, each 1 added to it is rounded away; ones of another slice
    # are added up first.
    a = np.ones((1, k), np.float32)
    a[0, 0] = 2.0**24
    found = multiplied(compiled, a, np.full((k, compiled.columns), 0x3F80, np.uint16))
    first = product.SLICE if k > product.SLICE else k
    assert (found == 2.0**24 + k - first).all()


def row_buffer(x: F32, gap: int) -> tuple[NDArray[np.uint16], int, int]:
    """x as rows of bfloat16 with a gap between, after five elements of something else."""
    rows, width = x.shape
    elements = np.full(5 + rows * (width + gap), 0x7FC1, np.uint16)
    elements[5:].reshape(rows, -1)[:, :width] = to_bf16(x)
    return elements, 5, width + gap


@pytest.mark.parametrize(
    ("finish", "epilogue"),
    [(NONE, epilogues.NONE), (BIAS, epilogues.NONE), (GELU, epilogues.GELU_ERF)],
)
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
def test_what_is_finished_has_the_bits_of_numpys_epilogue(
    compiled: Product, finish: int, epilogue: int, special: bool
) -> None:
    m, k, n = 9, 450, 2 * compiled.columns
    a, b = operands(m, k, n)
    bias = np.linspace(-30, 30, n, dtype=np.float32) if finish else None
    if special:
        a[1], a[2], a[3], a[4, 0] = np.inf, 3e38, 0, np.nan
    buffer = row_buffer(a, 3)
    acc = multiplied(compiled, a, b)
    wanted = np.full(m * (n + 2), 7, np.uint16)
    with np.errstate(all="ignore"):
        epilogues.finish(acc.copy(), bias, epilogue, n, (wanted, 1, n + 2), Scratch())
    found = np.full(m * (n + 2), 7, np.uint16)
    work = np.empty((m, k), np.float32), np.empty((m, compiled.columns), np.float32)
    compiled.gemm(buffer, compiled.pack(b), bias, finish, (found, 1, n + 2), work)
    if special:  # which NaN it is may differ
        is_nan = np.isnan(to_f32(wanted))
        np.testing.assert_array_equal(is_nan, np.isnan(to_f32(found)))
        wanted[is_nan] = found[is_nan] = 0
    np.testing.assert_array_equal(found, wanted)


def test_what_does_not_fit_is_refused_before_memory_is_touched(compiled: Product) -> None:
    a, b = operands(4, 64, compiled.columns)
    panels, c = compiled.pack(b), np.zeros((4, compiled.columns), np.float32)
    for bad in ((a[:, :63], panels, c), (a, panels[:, ::2], c), (a, panels, c[:, ::2])):
        with pytest.raises(ValueError, match=r"product of|panels"):
            compiled.multiply(*bad)
    elements = np.zeros(4 * 64, np.uint16)
    out = np.zeros(4 * compiled.columns, np.uint16)
    work = np.empty((4, 64), np.float32), np.empty((4, compiled.columns), np.float32)
    bias = np.zeros(compiled.columns, np.float32)
    good: tuple[Any, ...] = (elements, 0, 64), panels, bias, BIAS, (out, 0, compiled.columns), work
    compiled.gemm(*good)
    for at, bad_value in (
        (0, (elements, 1, 64)),
        (0, (elements, -1, 64)),
        (4, (out, 0, compiled.columns + 1)),
        (2, bias[:-1]),
        (2, None),
        (5, (work[0], work[1][:3])),
    ):
        arguments = list(good)
        arguments[at] = bad_value
        with pytest.raises(ValueError, match=r"past|do not fit"):
            compiled.gemm(*arguments)


def test_nothing_is_compiled_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_COMPILED", "off")
    monkeypatch.setattr(product, "_loader", product._Loader())
    assert product.load() is None
