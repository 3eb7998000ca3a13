"""Compiled kernels of the Gemma encoders give the bits of numpy, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_embed import heads, jit, rms
from npu_embed.attention import Rotary
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.device import Session
from npu_embed.heads import HeadStep
from npu_embed.rms import Put, add_rms_norm, put_gated, put_rms_norm
from npu_embed.rows import Rows

F32 = NDArray[np.float32]
Arrays = Sequence[NDArray[Any]]
POSITIONS = 40

EXAMPLES = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)
rows_of_x = st.one_of(st.integers(1, 40), st.just(300))
lanes = st.integers(1, 40).map(lambda n: 16 * n)
epsilons = st.sampled_from([1e-12, 1e-6, 0.5])
scales = st.sampled_from([1.0, -1.0, 0.1, 3.7e-3])
# Powers of two that numbers are scaled by: squares, and so sums, underflow or overflow.
exponents = st.sampled_from([-140, -80, -70, -20, 0, 20, 63, 64, 100])


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open("emulated")


def numbers(rng: np.random.Generator, exponent: int, *shape: int) -> F32:
    """Numbers about 2^exponent; some are zero of either sign, some much larger or smaller."""
    x = np.ldexp(rng.standard_normal(shape), exponent)
    odd = rng.random(shape)
    x[odd < 0.02] = 0.0
    x[(odd >= 0.02) & (odd < 0.04)] = -0.0
    x[odd > 0.98] *= 2.0**12
    x[(odd > 0.96) & (odd <= 0.98)] *= 2.0**-12
    return x.clip(-3e38, 3e38).astype(np.float32)


def written(session: Session, x: F32) -> Rows:
    """A row buffer with x and 8 columns more."""
    rows = Rows(session, len(x), x.shape[1] + 8)
    rows.put(x)
    return rows


def in_parts(rows: int, width: int, part: Callable[[int, int], None]) -> None:
    """As cores.run_rows where there are many rows and cores."""
    for start in range(0, rows, 17):
        part(start, min(start + 17, rows))


def assert_same_bits(compiled: ModuleType, compute: Callable[[], Arrays]) -> None:
    """`compute` gives the same bits by numpy and compiled; a NaN's sign and payload are free."""
    found: list[Arrays] = []
    for kernels in (None, compiled):
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(jit, "kernels", kernels)
            for module in (heads, rms):
                patch.setattr(module, "run_rows", in_parts)
            found.append(compute())
    for numpys, others in zip(*found, strict=True):
        nans = np.isnan(numpys)
        np.testing.assert_array_equal(nans, np.isnan(others))
        bits = f"u{numpys.itemsize}"
        np.testing.assert_array_equal(numpys.view(bits)[~nans], others.view(bits)[~nans])


@EXAMPLES
@given(seeds, rows_of_x, lanes, exponents, epsilons)
def test_put_rms_norm(
    session: Session,
    compiled_kernels: ModuleType,
    seed: int,
    rows: int,
    width: int,
    exponent: int,
    eps: float,
) -> None:
    x = numbers(np.random.default_rng(seed), exponent, rows, width)

    def compute() -> Arrays:
        out = Rows(session, rows, width)
        put_rms_norm(x, eps, out)
        return (out.get(rows),)

    assert_same_bits(compiled_kernels, compute)


@EXAMPLES
@given(
    seeds,
    rows_of_x,
    lanes,
    st.tuples(exponents, exponents),
    epsilons,
    scales,
    st.integers(1, 3),
    st.sampled_from(["norm", "x", None]),
)
def test_add_rms_norm(
    session: Session,
    compiled_kernels: ModuleType,
    seed: int,
    rows: int,
    width: int,
    both: tuple[int, int],
    eps: float,
    scale: float,
    runs: int,
    put: Put,
) -> None:
    rng = np.random.default_rng(seed)
    x, weight = numbers(rng, both[0], rows, width), read_only(numbers(rng, 0, width))
    ys = [written(session, numbers(rng, both[1], rows, width)) for _ in range(runs)]

    def compute() -> Arrays:
        z, out = x.copy(), Rows(session, rows, width)
        add_rms_norm(z, ys, weight, eps, scale=np.float32(scale), out=out, put=put)
        return z, out.get(rows)

    assert_same_bits(compiled_kernels, compute)


@EXAMPLES
@given(seeds, rows_of_x, lanes, st.tuples(exponents, exponents), epsilons, st.integers(0, 3))
def test_put_gated(
    session: Session,
    compiled_kernels: ModuleType,
    seed: int,
    rows: int,
    width: int,
    both: tuple[int, int],
    eps: float,
    column: int,
) -> None:
    rng = np.random.default_rng(seed)
    gate = written(session, numbers(rng, both[0], rows, width))
    weight = read_only(numbers(rng, 0, width))
    columns = written(session, numbers(rng, both[1], rows, width + column))
    elements, first, stride = columns.receive(rows, width + column)

    def compute() -> Arrays:
        out = Rows(session, rows, width)
        put_gated(gate, (elements, first + column, stride), rows, weight, eps, out)
        return (out.get(rows),)

    assert_same_bits(compiled_kernels, compute)


@EXAMPLES
@given(
    seeds,
    rows_of_x,
    st.integers(1, 16).map(lambda n: 16 * n),
    st.sampled_from([1, 2]),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    exponents,
    epsilons,
)
def test_heads(
    session: Session,
    compiled_kernels: ModuleType,
    seed: int,
    rows: int,
    head_dim: int,
    parts: int,
    counts: tuple[int, int, int],
    exponent: int,
    eps: float,
) -> None:
    rng = np.random.default_rng(seed)
    count, turned, normed = counts[0], min(counts[:2]), min(counts[0], counts[2])
    qkv = written(session, numbers(rng, exponent, rows, count * head_dim))
    positions = rng.integers(0, POSITIONS, (rows, parts))
    rotary = Rotary(1e4, head_dim // parts, POSITIONS)
    step = HeadStep(count, turned, numbers(rng, 0, normed, head_dim), eps, rotary)

    def compute() -> Arrays:
        out = Rows(session, rows, count * head_dim)
        step.put(qkv, positions, out)
        return out.get(rows), step.get(qkv, positions)

    assert_same_bits(compiled_kernels, compute)


@pytest.mark.parametrize("offset", [0, 1])  # bytes: a bundle's tensors need not be aligned
@pytest.mark.parametrize("width", [1, 40, 64])
def test_rows_of_a_table(compiled_kernels: ModuleType, width: int, offset: int) -> None:
    rng = np.random.default_rng(0)
    bits = to_bf16(numbers(rng, 0, 50, width))
    stored = bytes(offset) + bits.tobytes()
    table = np.frombuffer(stored, np.uint16, offset=offset).reshape(bits.shape)
    ids = rng.integers(0, 50, 300).astype(np.int32)
    found = np.empty((300, width), np.float32)
    compiled_kernels.table_rows(table, ids, np.float32(22.627417), found)
    wanted = to_f32(bits[ids]) * np.float32(22.627417)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def read_only(x: F32) -> F32:
    """x as a bundle's weights are: not writable, at an odd address."""
    found: F32 = np.frombuffer(b"-" + x.tobytes(), np.float32, offset=1)
    assert not found.flags.writeable
    assert not found.flags.aligned
    return found
