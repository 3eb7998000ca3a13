"""Run-time word 5 of the GEMM program: how many of its rows each core computes in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import rtp
from handmade_gemm import CANARY, Case, Gemm, Tiles

from npu_embed.bf16 import to_f32
from npu_embed.emulator.controller import Fault, Stall

ROWS_WORD = 5
FULL = Tiles(columns=4, core_rows=4, rows_per_core=16, k_tile=64, n_tile=64, row_tile=4)
SMALL = Tiles(rows_per_core=8, row_tile=4)
PLAIN = Gemm(SMALL, chunks=1, k_blocks=2, n_blocks=(1, 1), rows_word=4)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("rows_word", [0, 4, 8, 12, 16])
def test_a_run_computes_its_rows_and_leaves_the_others(
    rows_word: int, chunks: int, ragged: bool
) -> None:
    whole = Gemm(FULL, chunks=3, k_blocks=2, n_blocks=(1, 1), epilogue=1, lda=130, c_stride=136)
    some = replace(whole, chunks=chunks, rows_word=rows_word, ragged=ragged)
    assert some.rows == chunks * 4 * (rows_word or 16)
    case = Case(whole).run(some.ops())
    wanted, off = whole.wanted(case.a, case.b, case.bias)
    found = to_f32(case.c[: some.rows, : wanted.shape[1]])
    assert (abs(found - wanted[: some.rows]) <= off[: some.rows]).all()
    assert (case.c[some.rows :] == CANARY).all(), "rows past the run's were written"


@pytest.mark.parametrize("epilogue", range(5))
def test_every_epilogue_is_of_the_rows_of_the_run(epilogue: int) -> None:
    Case(replace(PLAIN, epilogue=epilogue, chunks=3, n_blocks=(3, 1, 2))).run().check()


def test_a_run_may_follow_one_of_other_rows() -> None:
    case = Case(replace(PLAIN, rows_word=0))
    for rows_word in (8, 4, 0, 4):
        case.run(replace(PLAIN, rows_word=rows_word).ops())
    case.run(replace(PLAIN, rows_word=0).ops()).check()


def test_weights_are_unpacked_once_for_any_rows() -> None:
    case = Case(replace(PLAIN, rows_word=8))
    for rows_word in (8, 4):
        case.run(replace(PLAIN, rows_word=rows_word).ops())
    assert len(case.buffers.arguments[1].memory.derived) == 1


@pytest.mark.parametrize("rows_word", [1, 2, 3, 5, 6, 10, 12, 20, 65536])
def test_rows_a_core_cannot_compute_are_a_fault(rows_word: int) -> None:
    ops = replace(PLAIN, rows_word=8).ops()
    words = len(PLAIN.words())
    bad = [rtp(c, r, ROWS_WORD, rows_word) for c in range(2) for r in range(2)]
    says = rf"{rows_word} rows a core, wanted a multiple of 4 up to 8, or 0 for those"
    with pytest.raises(Fault, match=says):
        Case(replace(PLAIN, rows_word=8)).run([*ops[:words], *bad, *ops[words:]])


@pytest.mark.parametrize("rows_word", [0, 8])
def test_descriptors_of_other_rows_than_the_word_end_the_run(rows_word: int) -> None:
    moved = PLAIN.ops()[len(PLAIN.words()) :]
    with pytest.raises(Stall, match="MM2S0 of column 0 moves"):
        Case(PLAIN).run([*replace(PLAIN, rows_word=rows_word).words(), *moved])


@pytest.mark.parametrize(("cores", "col"), [([(1, 1)], 1), ([(0, 0)], 0), ([(1, 0), (1, 1)], 1)])
def test_cores_that_disagree_about_their_rows_wait_for_ever(
    cores: list[tuple[int, int]], col: int
) -> None:
    words = len(PLAIN.words())
    other = [rtp(*core, ROWS_WORD, 8) for core in cores]
    with pytest.raises(Stall, match=rf"columns? .*{col} disagree about word 5"):
        Case(PLAIN).run([*PLAIN.words(), *other, *PLAIN.ops()[words:]])


def test_a_program_that_takes_the_word_wants_it_written() -> None:
    older = replace(PLAIN, rows_word=None)
    with pytest.raises(Stall, match="word 5 of column 0 is 4294967295"):
        Case(older).run()


def test_a_program_compiled_without_the_word_does_not_read_it() -> None:
    older = Gemm(replace(SMALL, row_tile=0), chunks=2, k_blocks=1, n_blocks=(1,))
    ops = older.ops()
    words = len(older.words())
    Case(older).run([*ops[:words], rtp(0, 0, ROWS_WORD, 4), *ops[words:]]).check()
