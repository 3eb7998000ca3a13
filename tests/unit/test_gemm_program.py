"""The GEMM array program against plain float64, and against itself by other descriptors."""

from __future__ import annotations

from dataclasses import replace

import array_code
import numpy as np
import pytest
from handmade import Buffers, bd, bd_address, ramp
from handmade_gemm import Case, Gemm, Tiles, all_cores, packed
from references import sums_depend_on_place

from npu_embed import cores
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import txn
from npu_embed.emulator.llvm.registers import REGISTERS

# WIDE's products are what every machine code takes; SMALL's are left to numpy by all.
SMALL, WIDE = Tiles(), Tiles(k_tile=32, n_tile=64)


@pytest.fixture(params=[SMALL, WIDE], ids=["small", "wide"])
def plain(request: pytest.FixtureRequest, array: str) -> Gemm:
    """A GEMM to change a size of, on an array that computes in every way."""
    return Gemm(request.param, chunks=1, k_blocks=2, n_blocks=(1, 1))


def in_machine_code(gemm: Gemm, array: str) -> bool:
    """Whether the array computes it so; else by BLAS."""
    return array in REGISTERS and gemm.tiles.n_tile == WIDE.n_tile


def test_wide_products_are_made_in_machine_code(
    plain: Gemm, array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = array_code.recorded(monkeypatch)
    Case(replace(plain, chunks=2)).run().check()
    assert sum(calls.gemm) == (2 * plain.rows if in_machine_code(plain, array) else 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epilogue", range(5))
def test_every_epilogue_is_what_the_page_says(plain: Gemm, epilogue: int, bias: bool) -> None:
    Case(replace(plain, epilogue=epilogue, bias=bias, chunks=2)).run().check()


@pytest.mark.parametrize("n_blocks", [(1,), (2,), (1, 1), (2, 1), (1, 3), (3, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_columns_may_share_blocks_unevenly(
    plain: Gemm, chunks: int, n_blocks: tuple[int, ...]
) -> None:
    Case(replace(plain, chunks=chunks, n_blocks=n_blocks)).run().check()


@pytest.mark.parametrize("k_blocks", [1, 2, 3, 5])
def test_all_blocks_of_k_are_summed(plain: Gemm, k_blocks: int) -> None:
    Case(replace(plain, k_blocks=k_blocks)).run().check()


def test_rows_may_lie_apart(plain: Gemm) -> None:
    Case(replace(plain, chunks=3, lda=plain.k + 8, c_stride=plain.n + 12)).run().check()


@pytest.mark.parametrize("epilogue", range(5))
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("n_blocks", [(2, 2), (3, 1, 2)])
def test_descriptors_that_allow_no_view_give_the_same_bits(
    plain: Gemm, array: str, n_blocks: tuple[int, ...], chunks: int, epilogue: int
) -> None:
    gemm = replace(plain, chunks=chunks, n_blocks=n_blocks, epilogue=epilogue, lda=plain.k + 16)
    gemm = replace(gemm, c_stride=gemm.n + 104)
    views = Case(gemm).run()
    gathered = Case(replace(gemm, ragged=True)).run()
    for found in (views, gathered):
        found.check()
    # Ragged chunks are multiplied one by one, which some BLAS' last bits depend on.
    if array in REGISTERS or not sums_depend_on_place():
        assert (gathered.c == views.c).all()


def test_columns_that_write_crosswise_give_the_same_numbers(plain: Gemm) -> None:
    gemm = replace(plain, n_blocks=(1, 1))
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


def test_weights_may_differ_from_chunk_to_chunk(plain: Gemm) -> None:
    gemm = replace(plain, chunks=2, n_blocks=(1,))
    case = Case(gemm)
    other = ramp((gemm.k, gemm.n), 9)
    block = packed(case.b, case.bias, plain.tiles)
    both = np.concatenate([block, packed(other, case.bias, plain.tiles)])
    case.buffers.arguments.pop(1)
    case.buffers.add(both)
    case.buffers.arguments.insert(1, case.buffers.arguments.pop())
    words = len(block) // 2
    b = replace(gemm.b_push(0), words=bd(words, iteration=(2, words)))
    pushes = [gemm.c_push(0), gemm.a_push(0), gemm.a_push(1), b]
    ops = gemm.words() + [op for push in pushes for op in push.ops()] + [txn.sync(0, 0, 0, 1, 1, 0)]
    case.run(ops)
    half = plain.tiles.rows
    for rows, b_matrix in ((slice(0, half), case.b), (slice(half, None), other)):
        wanted, off = gemm.wanted(case.a[rows], b_matrix, case.bias)
        assert (np.abs(to_f32(case.c[rows]) - wanted) <= off).all()


def test_changed_weights_are_seen_after_their_sync(plain: Gemm) -> None:
    case = Case(plain).run()
    case.b = ramp((plain.k, plain.n), 77)
    memory = case.buffers.arguments[1].memory
    memory.host[:] = packed(case.b, case.bias, plain.tiles).view(np.uint8)
    memory.sync_to_device(0, memory.size)
    case.run().check()


def test_a_nan_stays_in_its_row(plain: Gemm) -> None:
    case = Case(plain)
    memory = case.buffers.arguments[0].memory
    memory.host.view(np.uint16).reshape(plain.rows, -1)[3] = 0x7FC0
    memory.sync_to_device(0, memory.size)
    clean = Case(plain).run().c
    found = case.run().c
    assert np.isnan(to_f32(found[3])).all()
    assert (np.delete(found, 3, axis=0) == np.delete(clean, 3, axis=0)).all()


def test_sums_are_float32_and_rounded_once_to_nearest_even(plain: Gemm) -> None:
    # 1 + 2^-8 lies half way between two bfloat16 neighbours, 1 + 3 * 2^-8 too: even wins.
    gemm = replace(plain, k_blocks=1, n_blocks=(1,), bias=False)
    case = Case(gemm)
    a = np.zeros((gemm.rows, gemm.k), np.float32)
    a[:, :3] = 1
    b = np.zeros((gemm.k, gemm.n), np.float32)
    b[0], b[1, 0::2], b[1, 1::2] = 1.0, 2.0**-8, 3 * 2.0**-8
    case.buffers = Buffers()
    c = np.zeros((gemm.rows, gemm.n), np.uint16)
    for content in (to_bf16(a), packed(b, None, gemm.tiles), c):
        case.buffers.add(content)
    found = to_f32(case.run().c)
    assert (found[:, 0::2] == 1.0).all()
    assert (found[:, 1::2] == 1.0 + 4 * 2.0**-8).all()


def test_each_chunk_may_be_waited_for_before_the_next_is_pushed(plain: Gemm) -> None:
    gemm = replace(plain, chunks=2, n_blocks=(1,))
    ops = gemm.words()
    for chunk in range(2):
        row = chunk * gemm.chunk_rows
        a_bytes, c_bytes = row * gemm.k * 2, row * gemm.n_out * 2
        row_bytes = gemm.rows_per_core * gemm.k * 2
        for push in (
            replace(gemm.c_push(0), offset_bytes=c_bytes, repeat=1),
            replace(gemm.a_push(0), offset_bytes=a_bytes, repeat=1),
            replace(gemm.a_push(1), offset_bytes=a_bytes + row_bytes, repeat=1),
            replace(gemm.b_push(0), repeat=1),
        ):
            ops += push.ops()
        ops.append(txn.sync(0, 0, 0, 1, 1, 0))
    Case(gemm).run(ops).check()


def test_a_patched_word_changes_the_result(plain: Gemm) -> None:
    case = Case(replace(plain, n_blocks=(1,)))
    before = case.run().c
    ops, words = case.gemm.ops(), len(case.gemm.words())
    changed = Case(case.gemm).run([*ops[:words], *all_cores(3, 4, range(1)), *ops[words:]]).c
    assert (changed != before).any()
    assert (np.abs(to_f32(changed)) <= 1).all(), "tanh"


@pytest.mark.usefixtures("array")
def test_the_full_size_array_packs_the_same_way() -> None:
    tiles = Tiles(columns=4, core_rows=4, rows_per_core=16, k_tile=64, n_tile=64)
    Case(Gemm(tiles, chunks=2, k_blocks=1, n_blocks=(2, 1), epilogue=3)).run().check()


def test_an_unfinished_iteration_goes_on_with_the_next_push(plain: Gemm) -> None:
    gemm = replace(plain, chunks=2, n_blocks=(1,))
    ops = gemm.words()
    for push in (gemm.c_push(0), gemm.a_push(1), gemm.b_push(0)):
        ops += push.ops()
    *first, push_a = replace(gemm.a_push(0), repeat=1).ops()
    ops += [*first, push_a, push_a, txn.sync(0, 0, 0, 1, 1, 0)]
    Case(gemm).run(ops).check()


def test_a_chained_descriptor_moves_after_the_first(plain: Gemm) -> None:
    gemm = replace(plain, n_blocks=(1,))
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


@pytest.mark.usefixtures("array")
@pytest.mark.parametrize("sizes", [((16, 32), (32, 16)), ((64, 128), (128, 64))])
def test_programs_of_other_tiles_do_not_share_unpacked_weights(
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    # As many elements as B of k x n and of n x k: the same words, in another order.
    wide, tall = (
        Gemm(replace(SMALL, k_tile=k, n_tile=n), chunks=1, k_blocks=1, n_blocks=(1,), bias=False)
        for k, n in sizes
    )
    first, second = Case(wide), Case(tall)
    first.buffers.arguments[1] = second.buffers.arguments[1]
    first.run()
    second.run().check()


@pytest.mark.parametrize("block_rows", [4, 4096])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("n_blocks", [(1, 1), (2, 2)])
def test_c_may_lie_over_a(
    plain: Gemm,
    n_blocks: tuple[int, ...],
    chunks: int,
    block_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All of A is read before any of C is written, however the work is cut: C's rows are up to four
    # times as long as A's, so that those of the first block lie over A's of the next.
    monkeypatch.setattr(cores, "BLOCK_ROWS", block_rows)
    gemm = replace(plain, chunks=chunks, n_blocks=n_blocks)
    case = Case(gemm)
    wide = np.zeros(max(case.buffers.bits(0).size, case.buffers.bits(2).size), np.uint16)
    wide[: case.buffers.bits(0).size] = case.buffers.bits(0)
    both = case.buffers.arguments[case.buffers.add(wide)]
    case.buffers.arguments[0] = case.buffers.arguments[2] = both
    apart = Case(gemm).run().c
    case.run()
    found = case.buffers.bits(2)[: apart.size].reshape(apart.shape)
    np.testing.assert_array_equal(found, apart)


@pytest.mark.parametrize("epilogue", range(5))
def test_cutting_the_work_changes_no_result(
    plain: Gemm, array: str, epilogue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = replace(plain, epilogue=epilogue, chunks=3, n_blocks=(2, 1), bias=True)
    whole = Case(gemm).run()
    whole.check()
    monkeypatch.setattr(cores, "count", lambda: 3)
    monkeypatch.setattr(cores, "LEAST_MICROSECONDS", 1e-6)
    for rows in (4, 4096):  # by rows and columns, by columns
        monkeypatch.setattr(cores, "BLOCK_ROWS", rows)
        cut = Case(gemm).run()
        # BLAS may sum a product of another shape in another order.
        cut.check()
        if in_machine_code(gemm, array):
            np.testing.assert_array_equal(cut.c, whole.c)
