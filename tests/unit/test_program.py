"""Array programs by name: what a PDI may hold, and the plans that streams become."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from handmade import DEV_GEN, Buffers, assemble, pdi
from handmade_gemm import Gemm, Tiles
from handmade_mha import Mha

from npu_embed.emulator import array as array_module
from npu_embed.emulator import txn
from npu_embed.emulator.array import Array, PlanCache, compute, load_program
from npu_embed.emulator.controller import Fault, Stall
from npu_embed.emulator.gemm import GemmProgram
from npu_embed.emulator.mha import MhaProgram
from npu_embed.emulator.program import NoArrayProgram, read_constants

GEMM: dict[str, object] = dict(
    program="gemm", columns=4, core_rows=4, rows_per_core=16, k_tile=64, n_tile=64, rtp_offset=1024
)
MHA: dict[str, object] = dict(
    program="mha", columns=4, core_rows=4, heads=12, kv_heads=4, head_dim=32, rtp_offset=1024
)
MAGIC = bytes.fromhex("DD00000044332211") + b"NPUEMBED"


def test_a_pdi_names_its_program() -> None:
    assert load_program(pdi(**GEMM), 4) == GemmProgram(4, 4, 16, 64, 64, 1024)
    assert load_program(pdi(**GEMM, row_tile=4), 4) == GemmProgram(4, 4, 16, 64, 64, 1024, 4)
    assert load_program(pdi(**MHA) + bytes(64), 8) == MhaProgram(4, 4, 12, 4, 32, 1024)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"", "code for real AIE cores"),
        (bytes.fromhex("DD00000044332211") + bytes(100), "code for real AIE cores"),
        (b"x" * 200, "code for real AIE cores"),
        (MAGIC, "code for real AIE cores"),
        (MAGIC + struct.pack("<II", 2, 2) + b"{}", "format 2 of 2 bytes, wanted format 1"),
        (MAGIC + struct.pack("<II", 1, 3) + b"{}", "within 26 bytes"),
        (MAGIC + struct.pack("<II", 1, 0xFFFFFFFF) + b"{}", "of 4294967295 bytes"),
        (MAGIC + struct.pack("<II", 1, 2) + b"{x", "not JSON"),
        (MAGIC + struct.pack("<II", 1, 2) + b"\xff\xfe", "not JSON"),
        (MAGIC + struct.pack("<II", 1, 2) + b"[]", "no JSON object"),
        (MAGIC + struct.pack("<II", 1, 60_000) + b"[" * 60_000, "not JSON"),
        (MAGIC + struct.pack("<II", 1, 65_537) + bytes(65_537), "of 65537 bytes, wanted at most"),
    ],
)
def test_what_names_no_array_program_is_refused(image: bytes, says: str) -> None:
    with pytest.raises(NoArrayProgram, match=says):
        read_constants(image)


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (GEMM, {"program": "conv"}, "'conv', this emulator knows gemm, mha"),
        (GEMM, {"program": None}, "None"),
        (GEMM, {"program": ["gemm"]}, "knows gemm, mha"),
        (GEMM, {"k_tile": 0}, "k_tile=0"),
        (GEMM, {"k_tile": -8}, "k_tile=-8"),
        (GEMM, {"k_tile": 64.0}, "k_tile=64.0"),
        (GEMM, {"k_tile": True}, "k_tile=True"),
        (GEMM, {"k_tile": "64"}, "k_tile='64'"),
        (GEMM, {"k_tile": 1 << 21}, "small integer"),
        (GEMM, {"k_tile": 60}, "contradict"),
        (GEMM, {"n_tile": 24}, "contradict"),
        (GEMM, {"row_tile": 0}, "row_tile=0"),
        (GEMM, {"row_tile": 5}, "contradict"),
        (GEMM, {"row_tile": 32}, "contradict"),
        (GEMM, {"extra": 1}, "extra"),
        (GEMM, {"columns": 5}, "partition of 4 columns"),
        (GEMM, {"columns": 1 << 20, "core_rows": 1 << 20}, "contradict"),
        (GEMM, {"core_rows": 5, "columns": 4}, "4 core rows"),
        (GEMM, {"columns": 2}, "contradict"),
        (GEMM, {"rtp_offset": 1026}, "contradict"),
        (GEMM, {"rtp_offset": 0x10000 - 4}, "contradict"),
        (MHA, {"kv_heads": 5}, "contradict"),
        (MHA, {"head_dim": 33}, "contradict"),
        (MHA, {"core_rows": 5}, "contradict"),
    ],
)
def test_constants_a_program_cannot_have_are_refused(
    base: dict[str, object], change: dict[str, object], says: str
) -> None:
    with pytest.raises(NoArrayProgram, match=says):
        load_program(pdi(**{**base, **change}), 4)


def test_a_missing_constant_is_named() -> None:
    with pytest.raises(NoArrayProgram, match="k_tile"):
        load_program(pdi(**{k: v for k, v in GEMM.items() if k != "k_tile"}), 4)


def test_json_is_all_that_counts_not_its_spelling() -> None:
    text = json.dumps(GEMM, indent=3).encode()
    image = MAGIC + struct.pack("<II", 1, len(text)) + text + b"\0" * 7
    assert load_program(image, 4) == load_program(pdi(**GEMM), 4)


# -- plans ----------------------------------------------------------------------------------------

SMALL = Gemm(Tiles(), chunks=1, k_blocks=1, n_blocks=(1,), bias=False)
WORDS = len(SMALL.words())


class Partition:
    """An array with countable plans."""

    def __init__(self) -> None:
        self.plans = PlanCache()
        image = pdi(
            program="gemm",
            columns=3,
            core_rows=2,
            rows_per_core=4,
            k_tile=16,
            n_tile=16,
            rtp_offset=1024,
        )
        self.array = Array(image, DEV_GEN, self.plans, 3)
        self.buffers = Buffers()
        for elements in (8 * 16, 16 * 16, 8 * 16):
            self.buffers.add(np.zeros(elements, np.uint16))

    def run(self, stream: bytes) -> None:
        compute([self.array.bind(stream, self.buffers.arguments)])

    @property
    def made(self) -> int:
        return sum(map(len, self.plans._plans.values()))


def test_a_stream_is_executed_once_while_nothing_it_reads_changes() -> None:
    partition = Partition()
    stream = assemble(SMALL.ops())
    for _ in range(3):
        partition.run(stream)
    assert partition.made == 1
    partition.array.reset()
    partition.run(stream)
    assert partition.made == 1, "it writes all it reads"


def test_a_stream_is_executed_again_when_a_word_it_relies_on_changed() -> None:
    partition = Partition()
    rest = assemble(SMALL.ops()[WORDS:])
    for _ in range(2):
        with pytest.raises(Stall):
            partition.run(rest)
    assert partition.made == 1
    partition.run(assemble(SMALL.ops()))
    partition.run(rest)
    partition.run(rest)
    assert partition.made == 3
    partition.array.reset()
    with pytest.raises(Stall):
        partition.run(rest)
    assert partition.made == 3


def test_a_remembered_failure_is_a_new_exception_each_time() -> None:
    partition = Partition()
    caught = []
    for _ in range(2):
        with pytest.raises(Stall) as stall:
            partition.run(assemble([]))
        caught.append(stall.value)
    assert caught[0] is not caught[1]


def test_old_plans_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_module, "MAX_PLANS", 3)
    monkeypatch.setattr(array_module, "MAX_STATES", 2)
    partition = Partition()
    for value in range(5):
        partition.run(assemble([txn.write(txn.address(0, 2, 0x2000), value), *SMALL.ops()]))
    assert len(partition.plans._plans) == 3
    rest = assemble(SMALL.ops()[WORDS:])
    for epilogue in (0, 1, 2, 4):
        gemm = Gemm(SMALL.tiles, 1, 1, (1,), epilogue=epilogue, bias=False)
        partition.run(assemble(gemm.ops()))
        partition.run(rest)
    assert len(partition.plans._plans) == 3
    assert partition.made <= 4


def test_plans_of_long_streams_are_dropped_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition()
    streams = [
        assemble([txn.write(txn.address(0, 2, 0x2000), value), *SMALL.ops()]) for value in range(5)
    ]
    monkeypatch.setattr(array_module, "MAX_PLAN_BYTES", 2 * len(streams[0]))
    for stream in streams:
        partition.run(stream)
    assert [stream for _, stream in partition.plans._plans] == streams[3:]
    monkeypatch.setattr(array_module, "MAX_PLAN_BYTES", 0)
    partition.run(streams[0])
    assert not partition.plans._plans


def test_a_buffer_may_be_longer_than_its_stream() -> None:
    Partition().run(assemble(SMALL.ops()) + b"\xff" * 64)


@pytest.mark.parametrize(
    ("stream", "op_index"),
    [
        (b"", -1),
        (b"\xff" * 64, -1),
        (assemble(SMALL.ops())[:-4], -1),
        (assemble([txn.write(txn.address(0, 2, 0x400), 1)])[:-24] + b"\x77" + bytes(23), 0),
    ],
)
def test_words_that_are_no_stream_end_the_run(stream: bytes, op_index: int) -> None:
    with pytest.raises(Fault) as fault:
        Partition().run(stream)
    assert fault.value.op_index == op_index


def test_programs_on_one_device_do_not_share_plans() -> None:
    plans = PlanCache()
    mha = Mha(heads=1, kv_heads=1, head_dim=2, rows=2, shares=((0, 1),))
    gemm_array = Array(pdi(**GEMM), DEV_GEN, plans, 4)
    mha_array = Array(
        pdi(**{**MHA, "core_rows": 2, "heads": 1, "kv_heads": 1, "head_dim": 2}), DEV_GEN, plans, 4
    )
    buffers = Buffers()
    for _ in range(4):
        buffers.add(np.zeros((2, 6), np.uint16))
    ops = [*mha.words(), *(op for p in mha.pushes(0) for op in p.ops()), txn.sync(0, 0, 0, 1, 1, 0)]
    stream = assemble(
        [*ops[:20], *[txn.write(txn.address(3, r, 0x410), 0) for r in (2, 3)], *ops[20:]]
    )
    compute([mha_array.bind(stream, buffers.arguments)])
    with pytest.raises((Fault, Stall)):
        compute([gemm_array.bind(stream, buffers.arguments)])
