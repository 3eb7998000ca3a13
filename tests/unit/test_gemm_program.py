"""The GEMM array program against plain float64, and against itself by other descriptors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handmade import Buffers, bd, bd_address, ramp
from handmade_gemm import Case, Gemm, Tiles, all_cores, packed

from npu_embed import cores
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import txn

pytestmark = pytest.mark.usefixtures("kernels")
SMALL = Tiles()
PLAIN = Gemm(SMALL, chunks=1, k_blocks=2, n_blocks=(1, 1))
WORDS = len(PLAIN.words())


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


def test_a_patched_word_changes_the_result() -> None:
    case = Case(replace(PLAIN, n_blocks=(1,)))
    plain = case.run().c
    ops = case.gemm.ops()
    changed = Case(case.gemm).run([*ops[:WORDS], *all_cores(3, 4, range(1)), *ops[WORDS:]]).c
    assert (changed != plain).any()
    assert (np.abs(to_f32(changed)) <= 1).all(), "tanh"


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


@pytest.mark.parametrize("chunks", [1, 4])
def test_c_may_lie_over_a(chunks: int) -> None:
    # All of A is read before any of C is written, however the work is cut.
    gemm = replace(PLAIN, chunks=chunks, k_blocks=2, n_blocks=(1, 1))
    case = Case(gemm)
    wide = np.zeros(max(case.buffers.bits(0).size, case.buffers.bits(2).size), np.uint16)
    wide[: case.buffers.bits(0).size] = case.buffers.bits(0)
    both = case.buffers.arguments[case.buffers.add(wide)]
    case.buffers.arguments[0] = case.buffers.arguments[2] = both
    apart = Case(gemm).run().c
    case.run()
    found = case.buffers.bits(2)[: apart.size].reshape(apart.shape)
    np.testing.assert_array_equal(found[:, : 2 * gemm.n_out], apart[:, : 2 * gemm.n_out])


@pytest.mark.parametrize("epilogue", range(5))
def test_cutting_the_work_changes_no_result(epilogue: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = replace(PLAIN, epilogue=epilogue, chunks=3, n_blocks=(2, 1), bias=True)
    whole = Case(gemm).run()
    monkeypatch.setattr(cores, "count", lambda: 3)
    monkeypatch.setattr(cores, "LEAST_MICROSECONDS", 1e-6)
    for rows in (4, 4096):  # by rows and columns, by columns
        monkeypatch.setattr(cores, "BLOCK_ROWS", rows)
        cut = Case(gemm).run()
        cut.check()
        # A product of another shape may sum in another order: the last bit may tip.
        found, wanted = to_f32(cut.c), to_f32(whole.c)
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=1e-6)
