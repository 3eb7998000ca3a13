"""Attentions that are computed at once give what they give one after another."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import array_code
import numpy as np
import pytest
from handmade import F32, NO_WINDOW, U16, assemble, ramp
from handmade_mha import Mha
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_embed import jit
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import array as array_program
from npu_embed.emulator.flows import Argument
from npu_embed.emulator.heads import Heads
from npu_embed.emulator.llvm.registers import LANES, REGISTERS
from npu_embed.emulator.memory import Memory
from npu_embed.emulator.mha_list import visible_spans
from npu_embed.emulator.softmax import padded, softmax2

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8).map(
    lambda found: sorted((first, first + rows) for first, rows in found)
)


@settings(deadline=None)
@given(spans)
def test_what_is_visible_is_written_once_and_by_the_last(written: list[tuple[int, int]]) -> None:
    last: dict[int, int] = {}
    for number, (first, end) in enumerate(written):
        last.update(dict.fromkeys(range(first, end), number))
    found: dict[int, int] = {}
    for number, own in enumerate(visible_spans(written)):
        for start, stop in own:
            assert start < stop
            for row in range(start, stop):
                assert row not in found
                found[row] = number
    assert found == last


WIDE = Mha(heads=4, kv_heads=2, head_dim=8, rows=0, shares=((0, 2), (2, 2)))
ROWS = 64
# Two results of one sum in another order, each of whose weights and itself is rounded to bfloat16:
# each may be off by 2 * 2^-8 of the largest value, and a little for float32.
TIPPED = 2 * 2.05 * 2.0**-8
texts = st.lists(
    st.tuples(
        st.integers(0, 40),  # first row
        st.sampled_from([2, 8, 16]),  # the bucket's rows
        st.integers(1, 16),  # keys
        st.sampled_from([0, 1, 3, NO_WINDOW]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(params=[8, LANES], ids=["8", "16"])
def wide(request: pytest.FixtureRequest, array: str) -> Mha:
    """A model's attention: of a head_dim for BLAS, and of one for machine code."""
    return replace(WIDE, head_dim=request.param)


def in_machine_code(mha: Mha, array: str) -> bool:
    """Whether the array computes it so; else by BLAS."""
    return array in REGISTERS and mha.head_dim % LANES == 0


class List:
    """Attentions over parts of one q k v buffer into parts of one o buffer."""

    def __init__(self, mha: Mha, same_buffer: bool = False) -> None:
        self.mha = mha
        self.bench = mha.bench()
        qkv = to_bf16(ramp((ROWS, mha.width)))
        self.qkv = Memory(qkv.nbytes, None)
        self.qkv.host[:] = qkv.view(np.uint8).reshape(-1)
        self.qkv.sync_to_device(0, qkv.nbytes)
        self.width = mha.width if same_buffer else mha.heads * mha.head_dim
        self.o = self.qkv if same_buffer else Memory(2 * ROWS * self.width, None)

    def bound(self, row: int, rows: int, kv: int, window: int) -> array_program.Bound:
        mha = replace(self.mha, rows=rows, all_kv=min(kv, rows), all_window=window)
        at = 2 * row * mha.width
        read = Argument(self.qkv, at, self.qkv.size - at)
        base = 2 * row * self.width
        arguments = [read, read, read, Argument(self.o, base, self.o.size - base)]
        return self.bench.array.bind(assemble(mha.ops()), arguments)


def both(mha: Mha, found: list[tuple[int, int, int, int]], same_buffer: bool = False) -> list[U16]:
    """O after one call of compute for all, and after one for each."""
    results = []
    for at_once in (True, False):
        some = List(mha, same_buffer)
        if at_once:
            array_program.compute([some.bound(*text) for text in found])
        else:
            for text in found:
                array_program.compute([some.bound(*text)])
        results.append(some.o.device.view(np.uint16).copy())
    return results


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(found=texts, ascending=st.booleans())
def test_attentions_at_once_give_what_they_give_in_turn(
    wide: Mha, array: str, found: list[tuple[int, int, int, int]], ascending: bool
) -> None:
    found = sorted(found) if ascending else found
    at_once, in_turn = both(wide, found)
    written = at_once != 0xFFFF  # what nobody wrote is the poison of unsynced memory
    np.testing.assert_array_equal(written, in_turn != 0xFFFF)
    if in_machine_code(wide, array) and all(window == NO_WINDOW for *_, window in found):
        np.testing.assert_array_equal(at_once, in_turn)
    values = ramp((ROWS, wide.width))[:, -wide.kv_heads * wide.head_dim :]
    # BLAS may sum a product of fewer rows in another order, and with a window fewer rows begin
    # with other keys.
    distance = np.abs(to_f32(at_once)[written] - to_f32(in_turn)[written])
    assert distance.max() <= TIPPED * np.abs(values).max()


def test_an_attention_that_reads_what_an_earlier_one_wrote_sees_it(wide: Mha) -> None:
    found = [(0, 8, 8, NO_WINDOW), (4, 8, 8, NO_WINDOW)]
    at_once, in_turn = both(wide, found, same_buffer=True)
    np.testing.assert_array_equal(at_once, in_turn)


def test_rows_that_a_later_text_writes_over_are_not_computed(
    wide: Mha, array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_numpy: list[int] = []
    widen = Heads.widen

    def counted(self: Heads, head: int, row: int, out: F32) -> F32:
        if out.shape[0] == wide.heads:
            by_numpy.append(out.shape[1])
        return widen(self, head, row, out)

    monkeypatch.setattr(Heads, "widen", counted)
    calls = array_code.recorded(monkeypatch)
    some = List(wide)
    array_program.compute([some.bound(row, 16, 5, NO_WINDOW) for row in (0, 5, 10)])
    computed = calls.attend, by_numpy
    expected = ([5, 5, 16], []) if in_machine_code(wide, array) else ([], [5, 5, 16])
    assert tuple(map(sorted, computed)) == expected


@pytest.mark.parametrize(
    ("keys", "first", "window"), [(5, 0, 100), (37, 0, 3), (9, 6, 2), (4, 9, 1)]
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_compiled_softmax_gives_the_bits_of_numpys(
    keys: int,
    first: int,
    window: int,
    scale: float,
    compiled_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(keys)
    scores = (rng.standard_normal((3, 7, padded(keys))) * scale).astype(np.float32)
    scores[0, 0, 0] = scores[0, 0, 1] = 0.0
    scores[0, 0, 2] = -0.0
    scores[1, 1, 0] = -np.inf
    scores[:, :, keys:] = np.nan  # whatever was there
    found = []
    for kernels in (None, compiled_kernels):
        monkeypatch.setattr(jit, "kernels", kernels)
        p = scores.copy()
        with np.errstate(all="ignore"):
            softmax2(p, keys, first, window)
        found.append(p.view(np.uint32))
    np.testing.assert_array_equal(*found)
    assert (found[0].view(np.float32)[:, :, keys:] == 0).all()
    assert np.isfinite(found[0].view(np.float32)).all()
