"""The emulated array's machine code: right, and the same bits for any rows and registers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from array_code import built
from numpy.typing import NDArray

from npu_embed.bf16 import F32, to_bf16, to_f32
from npu_embed.cores import Scratch
from npu_embed.emulator import epilogues
from npu_embed.emulator.heads import Heads
from npu_embed.emulator.llvm import machine, tile_permission
from npu_embed.emulator.llvm.machine import Attention, Machine
from npu_embed.emulator.llvm.registers import REGISTERS, Registers

pytest.importorskip("llvmlite", reason="llvmlite is not installed: nothing is compiled")

U16 = NDArray[np.uint16]

# A chain of K float32 additions is off by at most K units in the last place of the sum of the
# products' magnitudes.
UNIT = 2.0**-24
# bfloat16 has 8 significant bits: rounding moves a number by 2^-8 of it at most.
BF16_UNIT = 2.0**-8
TILE = 64
VECTORS = [name for name, registers in REGISTERS.items() if not registers.tiles]


def width(name: str, k: int) -> int:
    """The next K that these registers take."""
    step = REGISTERS[name].step
    return -(-k // step) * step


@pytest.fixture(params=list(REGISTERS))
def registers(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def compiled(registers: str) -> Machine:
    return built(registers)


# -- products -----------------------------------------------------------------------------------


def operands(m: int, k: int, n: int, seed: int = 0) -> tuple[F32, U16]:
    """A and B of bfloat16 values; A in float32."""
    rng = np.random.default_rng(seed)
    a, b = (to_bf16(rng.standard_normal(shape, np.float32)) for shape in ((m, k), (k, n)))
    return to_f32(a), b


def row_buffer(x: F32, gap: int) -> tuple[U16, int, int]:
    """x as rows of bfloat16 with a gap between, after five elements of something else."""
    rows, width = x.shape
    elements = np.full(5 + rows * (width + gap), 0x7FC1, np.uint16)
    elements[5:].reshape(rows, -1)[:, :width] = to_bf16(x)
    return elements, 5, width + gap


def sums(compiled: Machine, a: F32, b: U16) -> F32:
    """A B of one tile of columns as it is before it is rounded."""
    m, n = len(a), b.shape[1]
    out, scratch = (np.zeros(m * n, np.uint16), 0, n), Scratch()
    compiled.gemm(row_buffer(a, 3), m, compiled.pack(b), n, None, epilogues.NONE, out, scratch)
    found: F32 = scratch.take("acc", (m, n)).copy()
    return found


@pytest.mark.parametrize("k", [1, 64, 447, 448, 449, 500, 896, 1000, 1536])
@pytest.mark.parametrize("m", [1, 7, 13, 16, 32, 39, 96])
def test_a_product_is_that_of_exact_arithmetic(
    compiled: Machine, registers: str, m: int, k: int
) -> None:
    k = width(registers, k)
    a, b = operands(m, k, 2 * TILE)
    wide = to_f32(b).astype(np.float64)
    assert (abs(sums(compiled, a, b) - a @ wide) <= k * UNIT * (abs(a) @ abs(wide))).all()


def test_a_rows_bits_do_not_depend_on_the_others(compiled: Machine) -> None:
    a, b = operands(61, 1536, TILE)
    together = sums(compiled, a, b)
    for row in range(len(a)):
        np.testing.assert_array_equal(together[row], sums(compiled, a[row : row + 1], b)[0])


@pytest.mark.parametrize("k", [384, 1000, 1536])
def test_wide_and_narrow_registers_give_the_same_bits(k: int) -> None:
    a, b = operands(11, k, TILE)
    found = [sums(built(name), a, b) for name in VECTORS]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("k", [384, 1000, 1536])
@pytest.mark.parametrize("registers", VECTORS)
def test_the_sums_are_chains_in_slices(compiled: Machine, k: int) -> None:
    # In a chain that begins with 2^24, each 1 added to it is rounded away; ones of another slice
    # are added up first.
    a = np.ones((1, k), np.float32)
    a[0, 0] = 2.0**24
    first = min(k, machine.SLICE)
    found = sums(compiled, a, np.full((k, TILE), 0x3F80, np.uint16))
    assert (found == 2.0**24 + k - first).all()


EPILOGUES = {
    "none": epilogues.NONE,
    "gelu-erf": epilogues.GELU_ERF,
    "gelu-tanh": epilogues.GELU_TANH,
    "geglu-tanh": epilogues.GEGLU_TANH,
    "tanh": epilogues.TANH,
}


@pytest.mark.parametrize("name", list(EPILOGUES))
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
def test_an_epilogue_is_numpys(compiled: Machine, name: str, biased: bool, special: bool) -> None:
    epilogue, m, k, n = EPILOGUES[name], 37, 480, 2 * TILE
    made = n // 2 if epilogue == epilogues.GEGLU_TANH else n
    a, b = operands(m, k, n)
    bias = np.linspace(-30, 30, n, dtype=np.float32) if biased else None
    if special:
        a[1], a[2], a[3], a[4, 0] = np.inf, 3e38, 0, np.nan
    tiles = (b[:, :TILE], b[:, TILE:])
    acc = np.concatenate([sums(compiled, a, np.ascontiguousarray(tile)) for tile in tiles], axis=1)
    wanted = np.full(m * (made + 2), 7, np.uint16)
    with np.errstate(all="ignore"):
        epilogues.finish(acc, bias, epilogue, TILE, (wanted, 1, made + 2), Scratch())
    found = np.full(m * (made + 2), 7, np.uint16)
    out = found, 1, made + 2
    compiled.gemm(row_buffer(a, 3), m, compiled.pack(b), TILE, bias, epilogue, out, Scratch())
    is_nan = np.isnan(to_f32(wanted))  # which NaN it is may differ
    np.testing.assert_array_equal(is_nan, np.isnan(to_f32(found)))
    wanted[is_nan] = found[is_nan] = 0
    assert (abs(to_f32(found))[abs(to_f32(wanted)) < 2.0**-120] < 2.0**-119).all()
    # The exponential is not numpy's: where the exact result is next to the middle of two bfloat16
    # numbers, the other one is taken, the next in its bits.
    steps = abs(found.astype(np.int32) - wanted)
    if epilogue in (epilogues.NONE, epilogues.GELU_ERF):
        assert steps.max() == 0
    else:
        # Nor is it told from infinity where the result is next to nothing.
        steps[abs(to_f32(wanted)) < 2.0**-120] = 0
        assert steps.max() <= 1
        assert np.count_nonzero(steps) <= steps.size / 100


@pytest.mark.parametrize("x", [1e-30, 1e-6, 0.1, 0.24999, 0.25, 0.2501, 1.0, 8.0, 90.0, np.inf])
def test_tanh_has_its_digits_near_zero_and_far_from_it(
    compiled: Machine, registers: str, x: float
) -> None:
    k = width(registers, 1)
    a = np.zeros((2, k), np.float32)
    a[:, 0] = x, -x
    ones = np.full((k, TILE), 0x3F80, np.uint16)
    out = np.zeros(2 * TILE, np.uint16)
    compiled.gemm(
        (to_bf16(a).reshape(-1), 0, k),
        *(2, compiled.pack(ones), TILE, None, epilogues.TANH),
        *((out, 0, TILE), Scratch()),
    )
    wanted = np.tanh(to_f32(to_bf16(a[:, :1])).astype(np.float64))
    assert (abs(to_f32(out).reshape(2, TILE) - wanted) <= 1.01 * BF16_UNIT * abs(wanted)).all()


def test_what_does_not_fit_is_refused_before_memory_is_touched(
    compiled: Machine, registers: str
) -> None:
    elements, out = np.zeros(4 * 64, np.uint16), np.zeros(4 * TILE, np.uint16)
    panels = compiled.pack(np.zeros((64, TILE), np.uint16))
    bias = np.zeros(TILE, np.float32)
    good: tuple[Any, ...] = (elements, 0, 64), 4, panels, TILE, bias, 0, (out, 0, TILE), Scratch()
    compiled.gemm(*good)
    for at, bad in (
        (0, (elements, 1, 64)),
        (0, (elements, -1, 64)),
        (0, (elements, 0, -64)),
        (1, 5),
        (1, 0),
        (2, panels[:, :, 1:]),
        (2, panels[:, ::2]),
        (2, compiled.pack(np.zeros((96, TILE), np.uint16))),
        (3, TILE - 1),
        (3, 2 * TILE),
        (4, bias[:-1]),
        (6, (out, 0, TILE + 1)),
    ):
        arguments = list(good)
        arguments[at] = bad
        with pytest.raises(ValueError, match=r"past|do not fit"):
            compiled.gemm(*arguments)
    if REGISTERS[registers].tiles:
        with pytest.raises(ValueError, match="do not fit"):
            compiled.gemm(good[0], 4, panels[:, :33].copy(), *good[3:])


@pytest.mark.parametrize("m", [5, 16, 37])
def test_rows_beside_a_products_are_left_alone(compiled: Machine, m: int) -> None:
    a, b = operands(m, 64, TILE)
    out = np.full((m + 2) * (TILE + 3), 7, np.uint16)
    compiled.gemm(
        row_buffer(a, 3),
        *(m, compiled.pack(b), TILE, None, epilogues.NONE),
        *((out, TILE + 3, TILE + 3), Scratch()),
    )
    rows = out.reshape(m + 2, -1)
    assert (rows[[0, -1]] == 7).all()
    assert (rows[:, TILE:] == 7).all()
    assert (rows[1:-1, :TILE] != 7).any(axis=1).all()


def test_tile_registers_take_denormal_numbers_as_zeros_and_keep_nans() -> None:
    compiled = built("amx-bf16")
    a, b = np.zeros((3, 32), np.float32), np.full((32, TILE), 0x7F00, np.uint16)  # 2^127
    elements = to_bf16(a)
    elements[0, 0], elements[1, 0], elements[2, 0] = 0x0001, 0x7FC0, 0x7F80
    out, scratch = (np.zeros(3 * TILE, np.uint16), 0, TILE), Scratch()
    panels = compiled.pack(b)
    compiled.gemm((elements.reshape(-1), 0, 32), 3, panels, TILE, None, 0, out, scratch)
    found = to_f32(out[0]).reshape(3, TILE)
    assert (found[0] == 0).all()
    assert np.isnan(found[1]).all()
    assert np.isposinf(found[2]).all()


# -- attention ----------------------------------------------------------------------------------


def heads_of(x: F32) -> Heads:
    """[heads, rows, dim] as in a row buffer, a row's heads side by side, after three elements."""
    count, rows, dim = x.shape
    elements = np.full(3 + rows * (count * dim + 2), 0x7FC1, np.uint16)
    over = elements[3:].reshape(rows, -1)[:, : count * dim]
    over[...] = to_bf16(x).transpose(1, 0, 2).reshape(rows, -1)
    return Heads(elements, 3, dim, count * dim + 2)


def attended(compiled: Machine, q: F32, k: F32, v: F32, first: int, window: int) -> F32:
    """O [heads, rows, dim]."""
    (count, rows, dim), (kv_heads, keys, _) = q.shape, k.shape
    o = heads_of(np.full(q.shape, 77, np.float32))
    of = Attention(
        *((heads_of(q), 0, 0), (heads_of(k), 0, 0), (heads_of(v), 0, 0), (o, 0, 0)),
        *(kv_heads, count // kv_heads, rows, keys, dim, first, window),
    )
    compiled.attend(of, Scratch())
    assert (o.elements[:3] == 0x7FC1).all()
    return o.widen(0, 0, np.empty(q.shape, np.float32))


def exact(q: F32, k: F32, v: F32, first: int, window: int) -> NDArray[np.float64]:
    """The same in float64, its weights not rounded."""
    share = len(q) // len(k)
    query, key = first + np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    scores = q.astype(np.float64) @ np.repeat(k, share, 0).transpose(0, 2, 1)
    scores[:, abs(query - key) > window] = -np.inf
    top = scores.max(-1, keepdims=True)
    powers = np.exp2(scores - np.where(np.isinf(top), 0, top))
    total = powers.sum(-1, keepdims=True)
    found: NDArray[np.float64] = powers / np.where(total == 0, 1, total) @ np.repeat(v, share, 0)
    return found


SHAPES = {  # kv heads, share, rows, keys, dim, first, window
    "one of each": (1, 1, 1, 1, 16, 0, 5),
    "a short text": (12, 1, 5, 7, 32, 0, 99),
    "whole vectors": (3, 1, 64, 64, 32, 0, 99),
    "rows behind": (2, 1, 30, 130, 64, 100, 999),
    "a window": (1, 3, 70, 133, 64, 10, 20),
    "wide heads": (1, 4, 33, 200, 256, 100, 16),
    "no window": (2, 1, 20, 40, 32, 5, 0),
    "queries without keys": (1, 2, 9, 4, 32, 2, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_attention_is_that_of_exact_arithmetic(compiled: Machine, shape: tuple[int, ...]) -> None:
    kv_heads, share, rows, keys, dim, first, window = shape
    rng = np.random.default_rng(1)
    q, k, v = (
        to_f32(to_bf16(rng.standard_normal(size, np.float32)))
        for size in ((kv_heads * share, rows, dim), *2 * [(kv_heads, keys, dim)])
    )
    found = attended(compiled, q, k, v, first, window)
    # Each weight and the result are rounded to bfloat16; what float32 does is far below that.
    v_most = abs(v).max(1).repeat(share, 0)[:, None]
    assert (abs(found - exact(q, k, v, first, window)) <= 2.05 * BF16_UNIT * v_most).all()


def test_attention_has_the_same_bits_for_any_registers_and_rows() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (to_f32(to_bf16(rng.standard_normal((2, 75, 32), np.float32))) for _ in range(3))
    wide, *narrower = (attended(built(name), q, k, v, 0, 30) for name in VECTORS)
    for narrow in narrower:
        np.testing.assert_array_equal(wide, narrow)
    alone = attended(built("fma"), q[:, 50:51], k, v, 50, 30)
    np.testing.assert_array_equal(wide[:, 50:51], alone)


def test_a_nan_among_the_keys_is_seen_where_it_takes_part(compiled: Machine) -> None:
    q, k, v = (np.ones((1, 40, 32), np.float32) for _ in range(3))
    k[0, 30, 3] = np.nan
    found = attended(compiled, q, k, v, 0, 5)
    seen = np.isnan(found[0]).all(axis=1)
    np.testing.assert_array_equal(seen, abs(np.arange(40) - 30) <= 5)
    assert (found[0, ~seen] == 1).all()


def test_attention_of_what_is_not_in_its_buffers_is_refused(compiled: Machine) -> None:
    x = heads_of(np.ones((2, 8, 32), np.float32))
    at = x, 0, 0
    good = Attention(at, at, at, at, 2, 1, 8, 8, 32, 0, 9)
    compiled.attend(good, Scratch())
    for bad in (
        replace(good, rows=9),
        replace(good, keys=9),
        replace(good, kv_heads=3),
        replace(good, q=(x, 0, 1)),
        replace(good, v=(Heads(x.elements, -1, 32, 66), 0, 0)),
        replace(good, dim=24),
        replace(good, keys=0),
    ):
        with pytest.raises(ValueError, match=r"not in the buffer|heads of"):
            compiled.attend(bad, Scratch())


# -- loading ------------------------------------------------------------------------------------


def test_tile_registers_are_not_used_where_they_are_not_wanted_or_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded() -> Registers | None:
        monkeypatch.setattr(machine, "_loader", machine._Loader())
        found = machine.load()
        return None if found is None else found.registers

    monkeypatch.setattr(machine, "build", lambda registers: SimpleNamespace(registers=registers))
    features = dict.fromkeys(REGISTERS, True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr(tile_permission, "granted", lambda: True)
    monkeypatch.setenv("NPU_EMBED_COMPILED", "auto")
    assert loaded() == REGISTERS["amx-bf16"]
    monkeypatch.setenv("NPU_EMBED_COMPILED", "vectors")
    assert loaded() == REGISTERS["avx512f"]
    monkeypatch.setenv("NPU_EMBED_COMPILED", "auto")
    monkeypatch.setattr(tile_permission, "granted", lambda: False)
    assert loaded() == REGISTERS["avx512f"]
    features["avx512f"] = False
    assert loaded() == REGISTERS["fma"]
    features["fma"] = False
    assert loaded() is None


def test_nothing_is_compiled_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_COMPILED", "off")
    monkeypatch.setattr(machine, "_loader", machine._Loader())
    assert machine.load() is None
