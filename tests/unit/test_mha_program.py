"""The attention array program against plain float64, and against itself by other descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import array_code
import numpy as np
import pytest
from handmade import F32, NO_WINDOW, U16, Buffers, assemble, bd, ramp, rtp
from handmade_mha import Mha
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed import cores
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.cores import Job
from npu_embed.emulator import txn
from npu_embed.emulator.controller import Fault, Stall
from npu_embed.emulator.llvm.registers import LANES, REGISTERS
from npu_embed.emulator.mha_call import MhaCall

CANARY = 0x1234
NAN = 0x7FC0
PLAIN = Mha(heads=4, kv_heads=4, head_dim=8, rows=16, shares=((0, 2), (2, 2)))
# Machine code takes heads of whole vectors; the last keys are two vectors and a half.
SIZES = {
    "8": PLAIN,
    "16": replace(PLAIN, head_dim=LANES),
    "32": replace(PLAIN, head_dim=2 * LANES, rows=40),
}


@pytest.fixture(params=list(SIZES.values()), ids=list(SIZES))
def plain(request: pytest.FixtureRequest, array: str) -> Mha:
    """An attention to change a size of, on an array that computes in every way."""
    mha: Mha = request.param
    return mha


def in_machine_code(mha: Mha, array: str) -> bool:
    """Whether the array computes it so; else by BLAS."""
    return array in REGISTERS and mha.head_dim % LANES == 0


class Case:
    """An attention's operands in buffers, and what must come out."""

    def __init__(
        self, mha: Mha, seed: int = 0, stale: tuple[int, ...] = (), parts: str = "qkv"
    ) -> None:
        self.mha = mha
        self.qkv = ramp((mha.rows, mha.width), seed)
        bits = to_bf16(self.qkv)
        ends = np.cumsum([0, mha.heads, mha.kv_heads, mha.kv_heads]) * mha.head_dim
        for part in parts:
            i = "qkv".index(part)
            bits[list(stale), ends[i] : ends[i + 1]] = NAN
        self.bench = mha.bench()
        self.buffers = Buffers()
        index = self.buffers.add(bits)
        self.buffers.arguments += [self.buffers.arguments[index]] * 2  # q, k and v of one buffer
        self.buffers.add(np.full((mha.rows, mha.heads * mha.head_dim), CANARY, np.uint16))

    def run(self, ops: list[txn.Op] | None = None) -> Case:
        self.bench.run(self.mha.ops() if ops is None else ops, self.buffers)
        return self

    @property
    def bits(self) -> U16:
        """O [rows, heads, head_dim]."""
        return self.buffers.bits(3).reshape(self.mha.rows, self.mha.heads, -1)

    @property
    def o(self) -> F32:
        return to_f32(self.bits)

    def check(self, rows: slice | list[int] = slice(None)) -> None:
        wanted, off = self.mha.wanted(self.qkv)
        distance = np.abs(self.o - wanted)[rows]
        assert (distance <= off[rows]).all(), distance.max()


def assert_the_same(found: Case, wanted: Case, array: str) -> None:
    """Both right, and of the same bits where BLAS, whose order of sums is any, has no part."""
    found.check()
    wanted.check()
    if in_machine_code(wanted.mha, array):
        np.testing.assert_array_equal(found.bits, wanted.bits)


def test_heads_of_whole_vectors_are_attended_in_machine_code(
    plain: Mha, array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = array_code.recorded(monkeypatch)
    Case(plain).run().check()
    assert sum(calls.attend) == (plain.rows if in_machine_code(plain, array) else 0)


def test_blas_is_held_at_one_thread_where_it_computes(
    plain: Mha, array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    run = cores.run

    def recorded(jobs: Sequence[Job], microseconds: float, *, blas: bool = False) -> None:
        told.append(blas)
        run(jobs, microseconds, blas=blas)

    monkeypatch.setattr(cores, "run", recorded)
    Case(plain).run()
    assert told == [not in_machine_code(plain, array)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shares"),
    [
        (4, 4, ((0, 2), (2, 2))),
        (4, 4, ((0, 4),)),
        (4, 4, ((0, 3), (3, 1))),
        (4, 2, ((0, 2), (2, 2))),
        (4, 2, ((0, 3), (3, 1))),  # a group split over two columns
        (4, 1, ((0, 2), (2, 2))),
        (4, 1, ((0, 1), (1, 2), (3, 1))),
        (3, 1, ((0, 1), (1, 1), (2, 1))),
        (6, 3, ((0, 2), (2, 2), (4, 2))),
        (1, 1, ((0, 1),)),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_heads_may_share_keys_and_columns_may_share_heads(
    plain: Mha, heads: int, kv_heads: int, shares: tuple[tuple[int, int], ...], ragged: bool
) -> None:
    mha = replace(plain, heads=heads, kv_heads=kv_heads, shares=shares, ragged=ragged)
    Case(mha).run().check()


@pytest.mark.parametrize("kv", range(1, 17))
def test_keys_from_kv_on_take_no_part(plain: Mha, kv: int) -> None:
    Case(replace(plain, all_kv=kv)).run().check()


@pytest.mark.usefixtures("array")
@pytest.mark.parametrize("window", [3, 20, NO_WINDOW])
@pytest.mark.parametrize("kv", [17, 31, 32, 33, 39])
def test_keys_may_end_anywhere_in_a_vector(kv: int, window: int) -> None:
    Case(replace(SIZES["32"], all_kv=kv, all_window=window)).run().check()


@pytest.mark.parametrize("window", [0, 1, 2, 7, 14, 15, 16, 1000])
@pytest.mark.parametrize("kv", [1, 9, 16])
def test_keys_outside_the_window_take_no_part(plain: Mha, kv: int, window: int) -> None:
    Case(replace(plain, all_kv=kv, all_window=window)).run().check()


def test_a_query_with_no_key_left_gives_zeros(plain: Mha) -> None:
    case = Case(replace(plain, all_kv=3, all_window=2)).run()
    assert (case.bits[5:] == 0).all()
    assert (case.bits[:5] != 0).any(axis=(1, 2)).all()


def test_every_row_of_the_bucket_is_written(plain: Mha) -> None:
    case = Case(replace(plain, all_kv=2)).run()
    assert (case.bits != CANARY).any(axis=2).all()


@pytest.mark.parametrize("ragged", [False, True])
def test_what_lies_in_rows_past_kv_never_counts(plain: Mha, ragged: bool) -> None:
    mha = replace(plain, all_kv=9, ragged=ragged)
    clean = Case(mha).run()
    stale = Case(mha, stale=tuple(range(9, mha.rows))).run()
    assert (stale.bits[:9] == clean.bits[:9]).all()


@pytest.mark.parametrize("parts", ["k", "v", "qkv"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_key_outside_the_window_is_never_read_as_a_number(
    plain: Mha, ragged: bool, parts: str
) -> None:
    case = Case(replace(plain, all_window=2, ragged=ragged), stale=(8,), parts=parts).run()
    far = [i for i in range(plain.rows) if abs(i - 8) > 2]
    near = [i for i in range(plain.rows) if abs(i - 8) <= 2]
    case.check(far)
    assert np.isnan(case.o[near]).all()


@pytest.mark.parametrize("core", [(0, 0), (1, 1)])
@pytest.mark.parametrize("limits", [(5, 0xFFFFFFFF), (16, 1), (7, 3)])
def test_each_core_goes_by_its_own_kv_and_window(
    plain: Mha, core: tuple[int, int], limits: tuple[int, int]
) -> None:
    Case(replace(plain, kv={core: limits[0]}, window={core: limits[1]})).run().check()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"all_kv": 5},
        {"all_window": 3},
        {"kv": {(1, 0): 4}},
        {"kv_heads": 2},
        {"kv_heads": 1},
    ],
)
def test_descriptors_that_allow_no_view_give_the_same(
    plain: Mha, array: str, change: dict[str, Any]
) -> None:
    mha = replace(plain, **change)
    views = Case(mha).run()
    gathered = Case(replace(mha, ragged=True)).run()
    assert_the_same(gathered, views, array)


@pytest.mark.usefixtures("array")
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 6).map(lambda n: 2 * n),
    shape=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (3, 3), (4, 4)]),
    head_dim=st.sampled_from([2, 4, 10, 16, 32]),
    data=st.data(),
)
def test_any_small_attention_is_right(
    rows: int, shape: tuple[int, int], head_dim: int, data: st.DataObject
) -> None:
    heads, kv_heads = shape
    first = data.draw(st.integers(1, heads))
    shares = ((0, first), (first, heads - first)) if first < heads else ((0, heads),)
    mha = Mha(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rows=rows,
        shares=shares,
        all_kv=data.draw(st.integers(1, rows)),
        all_window=data.draw(st.sampled_from([0, 1, rows // 2, 0xFFFFFFFF])),
        ragged=data.draw(st.booleans()),
    )
    Case(mha, seed=data.draw(st.integers(0, 99))).run().check()


@pytest.mark.usefixtures("array")
@pytest.mark.parametrize("head_dim", [2, LANES])
def test_the_softmax_is_to_base_2_and_its_probabilities_are_rounded_to_bf16(head_dim: int) -> None:
    mha = Mha(heads=1, kv_heads=1, head_dim=head_dim, rows=4, shares=((0, 1),), all_kv=3)
    case = Case(mha)
    qkv = np.zeros((4, 3, head_dim), np.float32)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    # Three equal scores: p = 1/3, in bf16 0.333984375. The mean of these values is 1.99479, which
    # rounds to 1.9921875; with p rounded first it is 1.99869, which rounds to 2.
    v[:3, 0] = 2.0, 2.0, 1.984375
    # Scores 0, 0 and 1 on the last query row: weights 1, 1 and 2 to base 2.
    q[3, 0], k[2, 0] = 1.0, 1.0
    v[:3, 1] = 0.0, 0.0, 1.0
    memory = case.buffers.arguments[0].memory
    memory.host[:] = to_bf16(qkv).view(np.uint8).reshape(-1)
    memory.sync_to_device(0, memory.size)
    o = case.run().o[:, 0]
    assert o[0, 0] == 2.0
    assert o[3, 1] == 0.5


@pytest.mark.parametrize("size", [60.0, 3000.0])
def test_large_scores_do_not_overflow(plain: Mha, size: float) -> None:
    case = Case(plain)
    case.qkv = ramp((plain.rows, plain.width), 3, size)
    memory = case.buffers.arguments[0].memory
    memory.host[:] = to_bf16(case.qkv).view(np.uint8).reshape(-1)
    memory.sync_to_device(0, memory.size)
    assert np.isfinite(case.run().o).all()


def test_moving_kv_by_one_is_seen(plain: Mha) -> None:
    case = Case(replace(plain, all_kv=9)).run()
    case.mha = replace(plain, all_kv=10)
    with pytest.raises(AssertionError):
        case.check()


def test_swapped_arguments_give_wrong_numbers(plain: Mha) -> None:
    case = Case(plain)
    other = ramp((plain.rows, plain.width), 50)
    case.buffers.add(to_bf16(other))
    q, k, v, o, wrong = case.buffers.arguments
    case.buffers.arguments = [q, wrong, v, o, k]
    case.run()
    with pytest.raises(AssertionError):
        case.check()


# -- what must go wrong ---------------------------------------------------------------------------

WORDS = len(PLAIN.words())
OUT, Q, K, V = (list(p.words) for p in PLAIN.pushes(0))
ROW = PLAIN.head_dim // 2


def all_cores(word: int, value: int, columns: range = range(2)) -> list[txn.Op]:
    return [rtp(col, row, word, value) for col in columns for row in range(2)]


def changed(which: int, **change: int | list[int]) -> list[txn.Op]:
    """A stream with one push of column 0 changed: 0 = O, 1 = Q, 2 = K, 3 = V."""
    first = PLAIN.pushes(0)
    first[which] = replace(first[which], **change)  # type: ignore[arg-type]
    ops = PLAIN.words() + [op for push in [*first, *PLAIN.pushes(1)] for op in push.ops()]
    return [*ops, txn.sync(0, 0, 0, 1, 2, 0)]


@pytest.mark.parametrize(
    ("ops", "failure", "says"),
    [
        (changed(0, words=[OUT[0] - ROW, *OUT[1:]]), Fault, "S2MM0 of column 0 moves"),
        (changed(0, words=[OUT[0] + ROW, *OUT[1:]]), Stall, "S2MM0 of column 0 moves"),
        (changed(1, words=[Q[0] - ROW, *Q[1:]]), Stall, "MM2S0 of column 0 moves"),
        (changed(2, words=[K[0] - ROW, *K[1:]]), Stall, "MM2S1 of column 0 moves"),
        (changed(3, words=[V[0] + ROW, *V[1:]]), Fault, "MM2S1 of column 0 moves"),
        (changed(1, offset_bytes=4 * 9999), Fault, "IOMMU fault"),
        (changed(1, arg=4), Fault, "uses buffer 4, the run has 4"),
    ],
)
def test_a_descriptor_that_does_not_fit_ends_the_run(
    ops: list[txn.Op], failure: type[Exception], says: str
) -> None:
    case = Case(PLAIN)
    with pytest.raises(failure, match=says):
        case.run(ops)
    assert (case.bits == CANARY).all()


@pytest.mark.parametrize(
    ("ops", "failure", "says"),
    [
        (all_cores(0, 8), Fault, "moves|keys"),
        (all_cores(0, 18), Stall, "moves"),
        (all_cores(0, 17), Fault, "17 rows"),
        (all_cores(0, 0), Fault, "0 rows"),
        (all_cores(0, 65536), Stall, "moves"),
        (all_cores(0, 65537), Stall, "is 65537"),
        (all_cores(1, 0), Fault, "0 keys, wanted 1 to 16"),
        (all_cores(1, 17), Fault, "17 keys, wanted 1 to 16"),
        (all_cores(1, 0xFFFFFFFF), Fault, "keys"),
        ([rtp(1, 1, 1, 0)], Fault, r"core \(1, 1\): 0 keys"),
        (all_cores(3, 3, range(1)), Fault, "heads 3 to 4 of 4"),
        (all_cores(3, 0xFFFFFFFF, range(1)), Stall, "word 3 of column 0"),
        (all_cores(4, 3, range(1)), Stall, "moves"),
        (all_cores(4, 1, range(1)), Fault, "moves"),
        (all_cores(4, 0), Stall, "no column has work"),
        (all_cores(4, 0, range(1)), Stall, "column 1 works while column 0 is idle"),
        (all_cores(4, 0xFFFFFFFF), Stall, "is 4294967295"),
        ([rtp(0, 1, 0, 8)], Stall, "disagree about word 0"),
        ([rtp(0, 1, 3, 1)], Stall, "disagree about word 3"),
        ([rtp(0, 1, 4, 1)], Stall, "disagree about word 4"),
        (all_cores(0, 8, range(1)), Stall, "disagree about word 0"),
    ],
)
def test_wrong_run_time_words_end_the_run(
    ops: list[txn.Op], failure: type[Exception], says: str
) -> None:
    good = PLAIN.ops()
    with pytest.raises(failure, match=says):
        Case(PLAIN).run([*good[:WORDS], *ops, *good[WORDS:]])


def test_waiting_before_the_values_are_pushed_waits_for_ever() -> None:
    mha = replace(PLAIN, shares=((0, 4),))
    o, q, k, v = mha.pushes(0)
    ops = mha.words() + [op for push in (o, q, k) for op in push.ops()]
    ops += [txn.sync(0, 0, 0, 1, 1, 0), *v.ops()]
    with pytest.raises(Stall, match="operands pushed so far give 0"):
        Case(mha).run(ops)


def test_quadratic_work_from_a_small_buffer_is_refused_before_memory_is_taken() -> None:
    rows = 65536
    mha = Mha(heads=1, kv_heads=1, head_dim=2, rows=rows, shares=((0, 1),))
    over_and_over = bd(rows, (64, 1), (64, 1), 1)
    ops = mha.words()
    for push in mha.pushes(0):
        ops += replace(push, words=over_and_over, offset_bytes=0).ops()
    with pytest.raises(Fault, match="elements to compute with"):
        mha.bench().run([*ops, txn.sync(0, 0, 0, 1, 1, 0)], Buffers())


# --- how the work is cut ------------------------------------------------------------------------


@pytest.mark.parametrize(("query_rows", "score_elems"), [(4, 1), (16, 1 << 8), (1 << 10, 1 << 30)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [3, NO_WINDOW])
def test_cutting_the_work_changes_no_result(
    plain: Mha,
    array: str,
    window: int,
    ragged: bool,
    query_rows: int,
    score_elems: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    design = replace(plain, all_kv=9, all_window=window, ragged=ragged)
    whole = Case(design).run()
    monkeypatch.setattr("npu_embed.emulator.mha_call.QUERY_ROWS", query_rows)
    monkeypatch.setattr("npu_embed.emulator.mha_call.SCORE_ELEMS", score_elems)
    cut = Case(design).run()
    if window == NO_WINDOW:
        assert_the_same(cut, whole, array)
    else:  # each part begins with keys of its own, whose powers are added in another order
        cut.check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shares"),
    [
        (4, 4, ((0, 2), (2, 2))),
        (4, 1, ((0, 2), (2, 2))),  # both columns read the same keys
        (4, 2, ((0, 1), (1, 1), (2, 2))),
        (6, 3, ((0, 2), (2, 2), (4, 2))),
    ],
)
def test_columns_that_line_up_are_computed_in_place(
    plain: Mha, heads: int, kv_heads: int, shares: tuple[tuple[int, int], ...]
) -> None:
    mha = replace(plain, heads=heads, kv_heads=kv_heads, shares=shares)
    case = Case(mha)
    call, args = case.bench.array.bind(assemble(mha.ops()), case.buffers.arguments)
    even = len({count for _, count in shares}) == 1
    assert isinstance(call, MhaCall)
    assert call.in_place(args) == even
    case.run().check()
