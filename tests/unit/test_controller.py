"""The command processor: registers, address patches, queues, tokens, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from handmade import DEV_GEN, QUEUES, TOKEN, Push, bd, bd_address, wait

from npu_embed.emulator import txn
from npu_embed.emulator.controller import (
    MAX_PIECES,
    RESET_MEMORY,
    Execution,
    Fault,
    Stall,
    execute,
    reset_value,
)
from npu_embed.emulator.dma import Piece

COLUMNS = 4
CORE = txn.address(1, 2, 0x400)
BD = bd_address(0, 3)
QUEUE = txn.address(0, 0, QUEUES["MM2S0"])
OUT_QUEUE = txn.address(0, 0, QUEUES["S2MM0"])


def patched(words: Sequence[int], bd_id: int = 3, arg: int = 0, plus: int = 0) -> list[txn.Op]:
    """A descriptor of column 0 with its address."""
    return [
        txn.block_write(bd_address(0, bd_id), words),
        txn.ddr_patch(bd_address(0, bd_id, 1), arg, plus),
    ]


def run(ops: Sequence[txn.Op], entry: dict[int, int] | None = None) -> Execution:
    execution = Execution(COLUMNS, entry or {}, num_ops=len(ops))
    execute(execution, txn.assemble(ops, dev_gen=DEV_GEN, num_cols=8), dev_gen=DEV_GEN)
    return execution


# -- registers ------------------------------------------------------------------------------------


def test_writes_land_in_registers_in_order() -> None:
    found = run([txn.write(CORE, 1), txn.block_write(CORE, [2, 3]), txn.write(CORE + 4, 4)])
    assert found.writes == {CORE: 2, CORE + 4: 4}
    assert found.core_word(1, 0, 0x400) == 2


@pytest.mark.parametrize(
    ("before", "value", "mask", "after"),
    [
        (0xAAAAAAAA, 0x0000FFFF, 0x00FF00FF, 0xAA00AAFF),
        (0xFFFFFFFF, 0, 0, 0xFFFFFFFF),
        (0, 0x12345678, 0xFFFFFFFF, 0x12345678),
        (0x0F0F0F0F, 0xFFFFFFFF, 0x1F00, 0x0F0F1F0F),
    ],
)
def test_a_mask_write_changes_only_the_masked_bits(
    before: int, value: int, mask: int, after: int
) -> None:
    assert run([txn.write(CORE, before), txn.mask_write(CORE, value, mask)]).writes[CORE] == after
    found = run([txn.mask_write(CORE, value, mask)], entry={CORE: before})
    assert found.writes[CORE] == after
    assert found.entry_reads == {CORE: before}


def test_what_nobody_wrote_reads_as_after_a_reset() -> None:
    found = run([])
    assert found.core_word(1, 0, 0x400) == RESET_MEMORY
    assert found.read(BD) == 0
    assert found.entry_reads == {CORE: RESET_MEMORY, BD: 0}
    assert reset_value(CORE) == RESET_MEMORY


def test_only_what_a_stream_has_not_written_itself_counts_as_read() -> None:
    found = run([txn.write(CORE, 7), txn.mask_write(CORE, 1, 1)], entry={CORE: 99})
    assert found.entry_reads == {}


# -- descriptors and queues -----------------------------------------------------------------------


def test_a_push_moves_its_descriptor_from_the_patched_address() -> None:
    found = run([*patched(bd(16), arg=2, plus=40), txn.write(QUEUE, 3)])
    assert found.flows == {(0, "MM2S", 0): [Piece(2, 10, (1, 1, 1, 16), (0, 1, 1, 1))]}


@pytest.mark.parametrize(
    ("channel", "key"), [("S2MM0", "S2MM"), ("S2MM1", "S2MM"), ("MM2S0", "MM2S"), ("MM2S1", "MM2S")]
)
def test_each_channel_has_its_queue(channel: str, key: str) -> None:
    ops = list(Push(2, channel, 0, bd(4)).ops())
    number = int(channel[-1])
    if key == "S2MM":
        ops.append(wait(2, number))
    assert list(run(ops).flows) == [(2, key, number)]


@pytest.mark.parametrize("repeats", [1, 2, 3, 256])
def test_the_repeat_count_is_stored_minus_one(repeats: int) -> None:
    found = run([*patched(bd(16)), txn.write(QUEUE, 3 | (repeats - 1) << 16)])
    (flow,) = found.flows.values()
    assert sum(piece.words for piece in flow) == 16 * repeats


def test_the_iteration_is_kept_in_the_descriptor_from_push_to_push_and_run_to_run() -> None:
    words = bd(4, iteration=(3, 100))
    first = run([*patched(words), txn.write(QUEUE, 3), txn.write(QUEUE, 3 | 1 << 16)])
    (flow,) = first.flows.values()
    assert [p.offset for p in flow] == [0, 100]
    assert flow[1].strides[0] == 100
    assert first.writes[BD + 24] >> 26 == 0, "three steps of three: begins again"
    once = run([*patched(words), txn.write(QUEUE, 3)])
    assert once.writes[BD + 24] >> 26 == 1
    later = run([txn.ddr_patch(BD + 4, 0, 0), txn.write(QUEUE, 3)], entry=once.writes)
    (flow,) = later.flows.values()
    assert flow[0].offset == 100


def test_a_chain_moves_one_descriptor_after_another() -> None:
    ops = [*patched(bd(4, next_bd=7)), *patched(bd(6), bd_id=7, arg=1), txn.write(QUEUE, 3)]
    (flow,) = run(ops).flows.values()
    assert [(p.arg, p.words) for p in flow] == [(0, 4), (1, 6)]


def test_the_later_arguments_carry_the_arrays_view_of_memory_in_the_patch() -> None:
    found = run([*patched(bd(4), arg=5, plus=0x80000000 + 8), txn.write(QUEUE, 3)])
    (flow,) = found.flows.values()
    assert (flow[0].arg, flow[0].offset) == (5, 2)


def test_a_token_comes_for_each_push_that_asks_and_is_taken_once() -> None:
    push = [*patched(bd(4)), txn.write(OUT_QUEUE, 3 | TOKEN)]
    run([*push, wait(0)])
    run([*push, push[-1], wait(0), wait(0)])
    with pytest.raises(Stall) as stall:
        run([*push, wait(0), wait(0)])
    assert stall.value.op_index == 4


def test_one_wait_takes_the_tokens_of_several_columns() -> None:
    ops = [op for col in range(3) for op in Push(col, "S2MM0", 0, bd(4)).ops()]
    run([*ops, txn.sync(0, 0, 0, 1, 3, 0)])
    with pytest.raises(Stall, match="column 3"):
        run([*ops, txn.sync(0, 0, 0, 1, 4, 0)])


def test_inputs_may_be_waited_for_too() -> None:
    run([*Push(1, "MM2S1", 0, bd(4), token=True).ops(), txn.sync(1, 0, 1, 1, 1, 1)])


def test_a_poll_waits_for_a_registers_value() -> None:
    def poll(value: int) -> txn.Op:
        raw = (4, 0, CORE, 0, value, 0xFF, 28)
        return txn.MaskPoll(CORE, value, 0xFF, False, word=0, raw=raw)

    run([txn.write(CORE, 0x1234), poll(0x34)])
    with pytest.raises(Stall, match="polls register"):
        run([txn.write(CORE, 0x1234), poll(0x35)])


@pytest.mark.parametrize("raw", [(5,), (6,), (6 | 2 << 8,)])
def test_no_operations_and_preemption_points_do_nothing(raw: tuple[int, ...]) -> None:
    op = txn.Noop(word=0, raw=raw) if raw == (5,) else txn.Preempt(raw[0] >> 8, word=0, raw=raw)
    assert run([op]).writes == {}


# -- what ends a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "op_index", "says"),
    [
        ([txn.write(txn.address(4, 2, 0x400), 1)], 0, "outside the partition"),
        ([txn.write(CORE, 1), txn.write(txn.address(0, 6, 0), 1)], 1, "outside the partition"),
        ([txn.write(txn.address(0, 1, 0), 1)], 0, "not emulated"),
        ([txn.write(txn.address(0, 2, 0x10000), 1)], 0, "core register"),
        ([txn.write(txn.address(0, 0, 0x3F000), 1)], 0, "not emulated"),
        ([txn.write(txn.address(0, 0, 0x1D228), 1)], 0, "not emulated"),
        ([txn.write(CORE + 2, 1)], 0, "multiple of 4"),
        ([txn.ddr_patch(CORE, 0, 0)], 0, "no shim descriptor's word 1"),
        ([txn.ddr_patch(BD, 0, 0)], 0, "no shim descriptor's word 1"),
        ([txn.ddr_patch(bd_address(4, 0, 1), 0, 0)], 0, "no shim descriptor's word 1"),
        ([txn.ddr_patch(BD + 4, 0, 2)], 0, "multiple of 4"),
        ([txn.ddr_patch(BD + 4, 5, 0)], 0, "multiple of 4 >= 0"),
        ([txn.write(QUEUE, 3)], 0, "valid bit"),
        ([txn.block_write(BD, bd(4)), txn.write(QUEUE, 3)], 1, "no argument's address"),
        ([*patched(bd(4)), txn.write(BD + 4, 64), txn.write(QUEUE, 3)], 3, "no argument's"),
        ([*patched(bd(4)), txn.write(BD + 8, 0), txn.write(QUEUE, 3)], 3, "no argument's"),
        ([*reversed(patched(bd(4))), txn.write(QUEUE, 3)], 2, "no argument's"),
        ([*patched(bd(4, next_bd=3)), txn.write(QUEUE, 3)], 2, "chains to itself"),
        ([*patched(bd(4, next_bd=9)), txn.write(QUEUE, 3)], 2, "descriptor 9"),
        ([*patched(bd(0)), txn.write(QUEUE, 3)], 2, "length is 0"),
        ([*patched(bd(4)), txn.write(OUT_QUEUE, 3 | TOKEN)], 3, "0 of the 4 words of S2MM0"),
        ([*patched(bd(4)), txn.write(OUT_QUEUE, 3)], 3, "0 of the 4 words of S2MM0"),
        (
            [*patched(bd(4)), *[txn.write(OUT_QUEUE, 3 | TOKEN)] * 2, wait(0)],
            5,
            "4 of the 8 words of S2MM0",
        ),
        (
            [*patched(bd(4)), txn.write(OUT_QUEUE, 3 | TOKEN), txn.write(OUT_QUEUE, 3), wait(0)],
            5,
            "4 of the 8 words of S2MM0",
        ),
        ([txn.LoadPdi(1, 16, 0, word=0, raw=(8 | 1 << 16, 16, 0, 0))], 0, "LoadPdi"),
        ([txn.Other(0xD, "UPDATE_SCRATCH", word=0, raw=(0xD,))], 0, "Other"),
    ],
)
def test_a_wrong_stream_ends_in_an_error_at_its_operation(
    ops: list[txn.Op], op_index: int, says: str
) -> None:
    with pytest.raises(Fault, match=says) as fault:
        run(ops)
    assert fault.value.op_index == op_index


@pytest.mark.parametrize(
    ("sync", "says"),
    [
        (wait(0), "token of S2MM0 of column 0"),
        (txn.sync(1, 0, 0, 1, 1, 0), "token of MM2S0"),
        (txn.sync(0, 0, 0, 1, 1, 1), "token of S2MM1"),
        (txn.sync(0, 2, 0, 1, 1, 0), "rows 2 to 2"),
        (txn.sync(0, 0, 0, 2, 1, 0), "rows 0 to 1"),
        (txn.sync(0, 0, 9, 1, 1, 0), "column 9"),
    ],
)
def test_a_token_that_never_comes_is_waited_for_for_ever(sync: txn.Op, says: str) -> None:
    with pytest.raises(Stall, match=says) as stall:
        run([txn.write(CORE, 0), sync])
    assert stall.value.op_index == 1


def test_a_stream_for_another_generation_is_refused() -> None:
    stream = txn.assemble([], dev_gen=3, num_cols=4)
    with pytest.raises(Fault, match="generation 3, this NPU is 4") as fault:
        execute(Execution(COLUMNS, {}), stream, dev_gen=DEV_GEN)
    assert fault.value.op_index == -1


def test_endless_pieces_are_refused_before_they_fill_memory() -> None:
    ragged = bd(7, (2, 1), (2, 5), 100, iteration=(2, 9))
    push = txn.write(QUEUE, 3 | 255 << 16)
    with pytest.raises(Fault, match=f"more than {MAX_PIECES} pieces"):
        run([*patched(ragged), *[push] * 200])


def test_results_may_be_waited_for_by_the_last_token_alone() -> None:
    silent = txn.write(OUT_QUEUE, 3)
    run([*patched(bd(4)), silent, txn.write(OUT_QUEUE, 3 | TOKEN), wait(0)])


def test_a_wait_knows_what_had_been_pushed_by_then() -> None:
    out = list(Push(0, "S2MM0", 0, bd(4)).ops())
    feed = list(Push(0, "MM2S0", 0, bd(6), bd_id=1).ops())
    found = run([*out, *feed, wait(0), *feed])
    (waited,) = found.waits
    assert (waited.op_index, waited.channel, waited.words) == (6, (0, "S2MM", 0), 4)
    assert waited.moved == {(0, "S2MM", 0): 4, (0, "MM2S", 0): 6}
