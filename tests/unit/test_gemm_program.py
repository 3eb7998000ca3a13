"""The GEMM array program against plain float64, and against itself by other descriptors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from handmade import F32, U16, Buffers, bd, bd_address, ramp, rtp
from handmade_gemm import Gemm, Tiles, packed

from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import txn
from npu_embed.emulator.controller import Fault, Stall

SMALL = Tiles()
PLAIN = Gemm(SMALL, chunks=1, k_blocks=2, n_blocks=(1, 1))
CANARY = 0x1234
WORDS = len(PLAIN.words())


class Case:
    """A GEMM's operands in buffers, and what must come out."""

    def __init__(self, gemm: Gemm, seed: int = 0) -> None:
        self.gemm = gemm
        self.a = ramp((gemm.rows, gemm.k), seed)
        self.b = ramp((gemm.k, gemm.n), seed + 1, 1 / np.sqrt(gemm.k))
        self.bias: F32 | None = None
        if gemm.bias:
            self.bias = np.random.default_rng(seed + 2).standard_normal(gemm.n).astype(np.float32)
        self.bench = gemm.tiles.bench()
        self.buffers = Buffers()
        a_rows = np.full((gemm.rows, gemm.a_stride), CANARY, np.uint16)
        a_rows[:, : gemm.k] = to_bf16(self.a)
        self.buffers.add(a_rows)
        self.buffers.add(packed(self.b, self.bias, gemm.tiles))
        self.buffers.add(np.full((gemm.rows, gemm.out_stride), CANARY, np.uint16))

    def run(self, ops: list[txn.Op] | None = None) -> Case:
        self.bench.run(self.gemm.ops() if ops is None else ops, self.buffers)
        return self

    @property
    def c(self) -> U16:
        """The whole result buffer [rows, c_stride]."""
        return self.buffers.bits(2).reshape(self.gemm.rows, -1)

    def check(self) -> None:
        width = sum(self.gemm.n_blocks) * self.gemm.n_out
        wanted, off = self.gemm.wanted(self.a, self.b, self.bias)
        found = to_f32(np.ascontiguousarray(self.c[:, :width]))
        assert (np.abs(found - wanted) <= off).all(), np.abs(found - wanted).max()
        assert (self.c[:, width:] == CANARY).all(), "columns past the result were written"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epilogue", range(5))
def test_every_epilogue_is_what_the_page_says(epilogue: int, bias: bool) -> None:
    Case(replace(PLAIN, epilogue=epilogue, bias=bias, chunks=2)).run().check()


@pytest.mark.parametrize("n_blocks", [(1,), (2,), (1, 1), (2, 1), (1, 3), (3, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_columns_may_share_blocks_unevenly(chunks: int, n_blocks: tuple[int, ...]) -> None:
    Case(replace(PLAIN, chunks=chunks, n_blocks=n_blocks)).run().check()


@pytest.mark.parametrize("k_blocks", [1, 2, 3, 5])
def test_all_blocks_of_k_are_summed(k_blocks: int) -> None:
    Case(replace(PLAIN, k_blocks=k_blocks)).run().check()


def test_rows_may_lie_apart() -> None:
    Case(replace(PLAIN, chunks=3, lda=40, c_stride=44)).run().check()


@pytest.mark.parametrize("epilogue", range(5))
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("n_blocks", [(2, 2), (3, 1, 2)])
def test_descriptors_that_allow_no_view_give_the_same_bits(
    n_blocks: tuple[int, ...], chunks: int, epilogue: int
) -> None:
    gemm = replace(PLAIN, chunks=chunks, n_blocks=n_blocks, epilogue=epilogue, lda=48, c_stride=200)
    views = Case(gemm).run()
    gathered = Case(replace(gemm, ragged=True)).run()
    gathered.check()
    assert (gathered.c == views.c).all()


def test_columns_that_write_crosswise_give_the_same_numbers() -> None:
    gemm = replace(PLAIN, n_blocks=(1, 1))
    straight = Case(gemm).run()
    width = gemm.n_out
    swapped = [
        replace(gemm.c_push(0), offset_bytes=2 * width),
        replace(gemm.c_push(1), offset_bytes=0),
    ]
    ops = gemm.words()
    pushes = [*swapped, *(gemm.a_push(r) for r in range(2)), *(gemm.b_push(c) for c in range(2))]
    ops += [op for push in pushes for op in push.ops()]
    ops += [txn.sync(0, 0, 0, 1, 2, 0)]
    crosswise = Case(gemm).run(ops)
    assert (crosswise.c == np.roll(straight.c, width, axis=1)).all()


def test_weights_may_differ_from_chunk_to_chunk() -> None:
    gemm = replace(PLAIN, chunks=2, n_blocks=(1,))
    case = Case(gemm)
    other = ramp((gemm.k, gemm.n), 9)
    block = packed(case.b, case.bias, SMALL)
    both = np.concatenate([block, packed(other, case.bias, SMALL)])
    case.buffers.arguments.pop(1)
    case.buffers.add(both)
    case.buffers.arguments.insert(1, case.buffers.arguments.pop())
    words = len(block) // 2
    b = replace(gemm.b_push(0), words=bd(words, iteration=(2, words)))
    pushes = [gemm.c_push(0), gemm.a_push(0), gemm.a_push(1), b]
    ops = gemm.words() + [op for push in pushes for op in push.ops()] + [txn.sync(0, 0, 0, 1, 1, 0)]
    case.run(ops)
    half = SMALL.rows
    for rows, b_matrix in ((slice(0, half), case.b), (slice(half, None), other)):
        wanted, off = gemm.wanted(case.a[rows], b_matrix, case.bias)
        assert (np.abs(to_f32(case.c[rows]) - wanted) <= off).all()


def test_changed_weights_are_seen_after_their_sync() -> None:
    case = Case(PLAIN).run()
    case.b = ramp((PLAIN.k, PLAIN.n), 77)
    memory = case.buffers.arguments[1].memory
    memory.host[:] = packed(case.b, case.bias, SMALL).view(np.uint8)
    memory.sync_to_device(0, memory.size)
    case.run().check()


def test_a_nan_stays_in_its_row() -> None:
    case = Case(PLAIN)
    memory = case.buffers.arguments[0].memory
    memory.host.view(np.uint16).reshape(PLAIN.rows, -1)[3] = 0x7FC0
    memory.sync_to_device(0, memory.size)
    clean = Case(PLAIN).run().c
    found = case.run().c
    assert np.isnan(to_f32(found[3])).all()
    assert (np.delete(found, 3, axis=0) == np.delete(clean, 3, axis=0)).all()


def test_sums_are_float32_and_rounded_once_to_nearest_even() -> None:
    # 1 + 2^-8 lies half way between two bfloat16 neighbours, 1 + 3 * 2^-8 too: even wins.
    gemm = replace(PLAIN, k_blocks=1, n_blocks=(1,), bias=False)
    case = Case(gemm)
    a = np.zeros((gemm.rows, gemm.k), np.float32)
    a[:, :3] = 1
    b = np.zeros((gemm.k, gemm.n), np.float32)
    b[0], b[1, 0::2], b[1, 1::2] = 1.0, 2.0**-8, 3 * 2.0**-8
    case.buffers = Buffers()
    for content in (to_bf16(a), packed(b, None, SMALL), np.zeros((gemm.rows, gemm.n), np.uint16)):
        case.buffers.add(content)
    found = to_f32(case.run().c)
    assert (found[:, 0::2] == 1.0).all()
    assert (found[:, 1::2] == 1.0 + 4 * 2.0**-8).all()


# -- what must go wrong ---------------------------------------------------------------------------


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


def all_cores(word: int, value: int, columns: range = range(2)) -> list[txn.Op]:
    return [rtp(col, row, word, value) for col in columns for row in range(2)]


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


def test_each_chunk_may_be_waited_for_before_the_next_is_pushed() -> None:
    gemm = replace(PLAIN, chunks=2, n_blocks=(1,))
    ops = gemm.words()
    for chunk in range(2):
        a_bytes, c_bytes = chunk * SMALL.rows * gemm.k * 2, chunk * SMALL.rows * gemm.n_out * 2
        row_bytes = SMALL.rows_per_core * gemm.k * 2
        for push in (
            replace(gemm.c_push(0), offset_bytes=c_bytes, repeat=1),
            replace(gemm.a_push(0), offset_bytes=a_bytes, repeat=1),
            replace(gemm.a_push(1), offset_bytes=a_bytes + row_bytes, repeat=1),
            replace(gemm.b_push(0), repeat=1),
        ):
            ops += push.ops()
        ops.append(txn.sync(0, 0, 0, 1, 1, 0))
    Case(gemm).run(ops).check()


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


def test_a_patched_word_changes_the_result() -> None:
    case = Case(replace(PLAIN, n_blocks=(1,)))
    plain = case.run().c
    ops = case.gemm.ops()
    changed = Case(case.gemm).run([*ops[:WORDS], *all_cores(3, 4, range(1)), *ops[WORDS:]]).c
    assert (changed != plain).any()
    assert (np.abs(to_f32(changed)) <= 1).all(), "tanh"


def test_words_last_only_until_the_array_is_lost() -> None:
    case = Case(PLAIN).run()
    case.run(case.gemm.ops()[WORDS:]).check()  # the words are still there
    case.bench.array.reset()
    with pytest.raises(Stall):
        case.run(case.gemm.ops()[WORDS:])
    case.run().check()
    case.run(case.gemm.ops()[WORDS:]).check()  # the failure is not remembered


def test_the_full_size_array_packs_the_same_way() -> None:
    tiles = Tiles(columns=4, core_rows=4, rows_per_core=16, k_tile=64, n_tile=64)
    Case(Gemm(tiles, chunks=2, k_blocks=1, n_blocks=(2, 1), epilogue=3)).run().check()


def test_an_unfinished_iteration_goes_on_with_the_next_push() -> None:
    gemm = replace(PLAIN, chunks=2, n_blocks=(1,))
    ops = gemm.words()
    for push in (gemm.c_push(0), gemm.a_push(1), gemm.b_push(0)):
        ops += push.ops()
    *first, push_a = replace(gemm.a_push(0), repeat=1).ops()
    ops += [*first, push_a, push_a, txn.sync(0, 0, 0, 1, 1, 0)]
    Case(gemm).run(ops).check()


def test_a_chained_descriptor_moves_after_the_first() -> None:
    gemm = replace(PLAIN, n_blocks=(1,))
    half = gemm.b_push(0).words[0] // 2
    ops = gemm.words()
    for push in (gemm.c_push(0), gemm.a_push(0), gemm.a_push(1)):
        ops += push.ops()
    ops += [
        txn.block_write(bd_address(0, 4), bd(half)),
        txn.ddr_patch(bd_address(0, 4, 1), 1, half * 4),
        *replace(gemm.b_push(0), words=bd(half, next_bd=4)).ops(),
        txn.sync(0, 0, 0, 1, 1, 0),
    ]
    Case(gemm).run(ops).check()


def test_a_stream_of_another_generation_is_refused() -> None:
    stream = txn.assemble(PLAIN.ops(), dev_gen=3, num_cols=4).encode()
    case = Case(PLAIN)
    with pytest.raises(Fault, match="generation 3, this NPU is 4"):
        case.bench.array.run(stream, case.buffers.arguments, None)  # type: ignore[arg-type]


def test_a_token_waited_for_twice_never_comes() -> None:
    ops = PLAIN.ops()
    with pytest.raises(Stall) as stall:
        Case(PLAIN).run([*ops, ops[-1]])
    assert stall.value.op_index == len(ops)


def test_programs_of_other_tiles_do_not_share_unpacked_weights() -> None:
    # 512 elements as B of 16 x 32 and of 32 x 16: the same words, in another order.
    sizes = ((16, 32), (32, 16))
    wide, tall = (
        Gemm(replace(SMALL, k_tile=k, n_tile=n), chunks=1, k_blocks=1, n_blocks=(1,), bias=False)
        for k, n in sizes
    )
    first, second = Case(wide), Case(tall)
    first.buffers.arguments[1] = second.buffers.arguments[1]
    first.run()
    second.run().check()
