"""GEMM streams, buffers and run-time words that do not fit: the run ends as on hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from handmade import Buffers, bd, rtp
from handmade_gemm import Case, Gemm, Tiles, all_cores

from npu_embed.emulator import txn
from npu_embed.emulator.controller import Fault, Stall

SMALL = Tiles()
PLAIN = Gemm(SMALL, chunks=1, k_blocks=2, n_blocks=(1, 1))
WORDS = len(PLAIN.words())


def shorter(push_words: list[int], words: int) -> list[int]:
    return [push_words[0] - words, *push_words[1:]]


def pushes(gemm: Gemm, changed: dict[str, dict[str, Any] | None]) -> list[txn.Op]:
    """A plain two-column stream with pushes changed or (None) left out, named a0, a1, b0 ... c1."""
    found = {f"c{c}": gemm.c_push(c) for c in range(2)}
    found |= {f"a{r}": gemm.a_push(r) for r in range(2)}
    found |= {f"b{c}": gemm.b_push(c) for c in range(2)}
    ops = gemm.words()
    for name, push in found.items():
        change = changed.get(name, {})
        if change is not None:
            ops += replace(push, **change).ops()
    return [*ops, txn.sync(0, 0, 0, 1, 2, 0)]


A_ROW_WORDS = PLAIN.k // 2
C_ROW_WORDS = PLAIN.n_out // 2
A, B, C = (list(p.words) for p in (PLAIN.a_push(0), PLAIN.b_push(0), PLAIN.c_push(0)))


@pytest.mark.parametrize(
    ("changed", "failure", "says"),
    [
        ({"a0": {"words": shorter(A, A_ROW_WORDS)}}, Stall, "MM2S0 of column 0 moves"),
        ({"b1": {"words": shorter(B, 1)}}, Stall, "MM2S1 of column 1 moves"),
        ({"c0": {"words": shorter(C, C_ROW_WORDS)}}, Fault, "S2MM0 of column 0 moves"),
        ({"a1": {"words": shorter(A, -1)}}, Fault, "MM2S0 of column 1 moves"),
        ({"c1": {"words": shorter(C, -C_ROW_WORDS)}}, Stall, "S2MM0 of column 1 moves"),
        ({"a0": {"repeat": 2}}, Fault, "MM2S0 of column 0 moves"),
        ({"b0": {"repeat": 2}}, Fault, "MM2S1 of column 0 moves"),
        ({"a0": None}, Stall, "MM2S0 of column 0 moves 0"),
        ({"b1": None}, Stall, "MM2S1 of column 1 moves 0"),
        ({"c1": None}, Stall, "token of S2MM0 of column 1"),
        ({"c1": {"token": False}}, Stall, "token of S2MM0 of column 1"),
        ({"a0": {"offset_bytes": 4 * 10000}}, Fault, "IOMMU fault"),
        ({"a0": {"arg": 7}}, Fault, "address patch"),
        ({"a0": {"arg": 3}}, Fault, "uses buffer 3, the run has 3"),
        ({"c0": {"offset_bytes": 4 * 10000}}, Fault, "IOMMU fault"),
    ],
)
def test_a_descriptor_that_does_not_fit_ends_the_run(
    changed: dict[str, dict[str, Any] | None], failure: type[Exception], says: str
) -> None:
    case = Case(PLAIN)
    before = [case.buffers.bits(i) for i in range(3)]
    with pytest.raises(failure, match=says):
        case.run(pushes(case.gemm, changed))
    for i, bits in enumerate(before):
        assert (case.buffers.bits(i) == bits).all(), f"buffer {i} was touched"


@pytest.mark.parametrize(
    ("col", "row", "word", "value", "failure"),
    [
        (0, 0, 0, 2, Stall),  # one core counts other chunks than its column
        (1, 1, 1, 3, Stall),
        (0, 1, 2, 2, Stall),
        (2, 0, 2, 1, Stall),  # a core of an idle column believes it has work
        (0, 0, 3, 1, Stall),
    ],
)
def test_cores_that_disagree_wait_for_ever(
    col: int, row: int, word: int, value: int, failure: type[Exception]
) -> None:
    with pytest.raises(failure, match="disagree"):
        Case(PLAIN).run([*PLAIN.words(), rtp(col, row, word, value), *PLAIN.ops()[WORDS:]])


@pytest.mark.parametrize(
    ("ops", "failure", "says"),
    [
        (all_cores(0, 2), Stall, "moves"),
        (all_cores(0, 0), Fault, "moves"),
        (all_cores(1, 1), Fault, "moves"),
        (all_cores(1, 3), Stall, "moves"),
        (all_cores(1, 0), Fault, "moves"),
        (all_cores(2, 2), Stall, "moves"),
        (all_cores(2, 0), Stall, "no column has work"),
        (all_cores(2, 0, range(1)), Stall, "column 1 works while column 0 is idle"),
        (all_cores(3, 5), Fault, "epilogue 5"),
        (all_cores(3, 3), Stall, "moves"),
        (all_cores(4, 2), Fault, "bias 2"),
        (all_cores(4, 0), Fault, "moves"),
        (all_cores(0, 65536), Stall, "moves"),
        (all_cores(1, 65536), Stall, "moves"),
        (all_cores(0, 65537), Stall, "is 65537"),
        (all_cores(1, 0xFFFFFFFF), Stall, "is 4294967295"),
        (all_cores(2, 0xFFFFFFFF), Stall, "is 4294967295"),
    ],
)
def test_wrong_run_time_words_end_the_run(
    ops: list[txn.Op], failure: type[Exception], says: str
) -> None:
    with pytest.raises(failure, match=says):
        Case(PLAIN).run([*PLAIN.ops()[:WORDS], *ops, *PLAIN.ops()[WORDS:]])


def test_a_swapped_buffer_gives_wrong_numbers_or_a_fault() -> None:
    square = Gemm(SMALL, chunks=2, k_blocks=1, n_blocks=(1,), bias=False)
    case = Case(square)  # A and B have the same size
    a, b, c = case.buffers.arguments
    case.buffers.arguments = [b, a, c]
    case.run()
    with pytest.raises(AssertionError):
        case.check()


def test_a_patch_that_names_another_argument_gives_wrong_numbers() -> None:
    case = Case(PLAIN).run(pushes(PLAIN, {"a0": {"arg": 1}}))
    with pytest.raises(AssertionError):
        case.check()


def test_waiting_before_the_operands_are_pushed_waits_for_ever() -> None:
    gemm = replace(PLAIN, n_blocks=(1,))
    early = [*gemm.words(), *gemm.c_push(0).ops(), txn.sync(0, 0, 0, 1, 1, 0)]
    rest = [op for p in (gemm.a_push(0), gemm.a_push(1), gemm.b_push(0)) for op in p.ops()]
    with pytest.raises(Stall, match="operands pushed so far") as stall:
        Case(gemm).run([*early, *rest])
    assert stall.value.op_index == len(early) - 1


def test_data_pushed_where_no_core_takes_it_is_a_fault() -> None:
    stray = replace(PLAIN.b_push(0), col=2)
    with pytest.raises(Fault, match="MM2S1 of column 2 is not used"):
        Case(PLAIN).run([*PLAIN.words(), *stray.ops(), *PLAIN.ops()[WORDS:]])


def test_a_small_buffer_read_over_and_over_is_refused_before_memory_is_taken() -> None:
    # Overlapping strides let 200 bytes stand for gigabytes of operands.
    gemm = Gemm(SMALL, chunks=1, k_blocks=65536, n_blocks=(1,), bias=False)
    chunks = 256

    def overlapping(words: int) -> list[int]:
        return bd(words, (64, 1), (64, 1), 1)

    ops: list[txn.Op] = []
    for col in range(SMALL.columns):
        for row in range(2):
            for word, value in enumerate((chunks, 65536, int(col == 0), 0, 0)):
                ops.append(rtp(col, row, word, value))
    a_words = SMALL.rows_per_core * gemm.k // 2
    for push in (
        replace(gemm.c_push(0), words=overlapping(SMALL.rows * 8), repeat=chunks),
        replace(gemm.a_push(0), words=overlapping(a_words), repeat=chunks, offset_bytes=0),
        replace(gemm.a_push(1), words=overlapping(a_words), repeat=chunks, offset_bytes=0),
        replace(gemm.b_push(0), words=overlapping(SMALL.n_tile * gemm.k // 2), repeat=chunks),
    ):
        ops += push.ops()
    ops.append(txn.sync(0, 0, 0, 1, 1, 0))
    with pytest.raises(Fault, match="elements to compute with"):
        SMALL.bench().run(ops, Buffers())


def test_words_last_only_until_the_array_is_lost() -> None:
    case = Case(PLAIN).run()
    case.run(case.gemm.ops()[WORDS:]).check()  # the words are still there
    case.bench.array.reset()
    with pytest.raises(Stall):
        case.run(case.gemm.ops()[WORDS:])
    case.run().check()
    case.run(case.gemm.ops()[WORDS:]).check()  # the failure is not remembered


def test_a_stream_of_another_generation_is_refused() -> None:
    stream = txn.assemble(PLAIN.ops(), dev_gen=3, num_cols=4).encode()
    case = Case(PLAIN)
    with pytest.raises(Fault, match="generation 3, this NPU is 4"):
        case.bench.array.bind(stream, case.buffers.arguments)


def test_a_token_waited_for_twice_never_comes() -> None:
    ops = PLAIN.ops()
    with pytest.raises(Stall) as stall:
        Case(PLAIN).run([*ops, ops[-1]])
    assert stall.value.op_index == len(ops)
