"""No stream makes the emulated array read or write outside its arguments.

Machine code and compiled kernels check no bounds: what the array's accounts let through must be
inside, whatever the descriptors say.
"""

from __future__ import annotations

from dataclasses import replace

import array_code
import numpy as np
import pytest
from fuzz.run import SEEDS
from fuzz.targets import TARGETS, WIDE_TILES
from guards import guarded_run
from handmade import RTP_OFFSET, Push, assemble, bd, pdi
from handmade_gemm import Gemm, Tiles
from handmade_mha import Mha
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from npu_embed.emulator import program, txn
from npu_embed.emulator.llvm.registers import LANES, REGISTERS

COLUMNS = 3
TILES = Tiles(columns=COLUMNS)
WIDE = replace(WIDE_TILES, columns=COLUMNS)
SMALL_WORK = 1 << 18  # elements of a run here
EVERY_ARRAY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

GEMMS = [
    Gemm(TILES, 1, 1, (1,), bias=False),
    Gemm(TILES, 2, 1, (1, 1), epilogue=1),
    Gemm(TILES, 2, 2, (1, 2), epilogue=2, lda=40, c_stride=50),
    Gemm(TILES, 1, 1, (2, 2), epilogue=3),
    Gemm(TILES, 2, 1, (1,), epilogue=4, ragged=True),
    # In machine code.
    Gemm(WIDE, 1, 1, (1,), bias=False),
    Gemm(WIDE, 2, 2, (1, 1), epilogue=2, lda=80, c_stride=160),
    Gemm(WIDE, 2, 1, (1, 2), epilogue=3),
    Gemm(WIDE, 1, 1, (2,), epilogue=4, ragged=True),
]
MHAS = [
    Mha(heads=2, kv_heads=1, head_dim=8, rows=4, shares=((0, 1), (1, 1))),
    Mha(heads=2, kv_heads=2, head_dim=4, rows=8, shares=((0, 2),), all_kv=5, all_window=2),
    Mha(heads=3, kv_heads=1, head_dim=4, rows=4, shares=((0, 2), (2, 1)), ragged=True),
    # In machine code.
    Mha(heads=2, kv_heads=1, head_dim=16, rows=4, shares=((0, 1), (1, 1))),
    Mha(heads=2, kv_heads=2, head_dim=32, rows=18, shares=((0, 2),), all_kv=17, all_window=3),
    Mha(heads=3, kv_heads=1, head_dim=16, rows=4, shares=((0, 2), (2, 1)), ragged=True),
]
Case = Gemm | Mha


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch, array: str) -> None:
    """In every way of computing, and no run of seconds."""
    monkeypatch.setattr(program, "MAX_ELEMS", SMALL_WORK)


def in_machine_code(case: Case, array: str) -> bool:
    """Whether the array computes it so; else by numpy."""
    if isinstance(case, Gemm):
        return array in REGISTERS and case.tiles == WIDE
    return array in REGISTERS and case.head_dim % LANES == 0


def image(case: Case) -> bytes:
    """The PDI of a case's program."""
    constants: dict[str, object] = {"columns": COLUMNS, "core_rows": 2, "rtp_offset": RTP_OFFSET}
    if isinstance(case, Gemm):
        tiles = case.tiles
        constants |= {"program": "gemm", "rows_per_core": tiles.rows_per_core}
        constants |= {"k_tile": tiles.k_tile, "n_tile": tiles.n_tile}
    else:
        constants |= {"program": "mha", "heads": case.heads, "kv_heads": case.kv_heads}
        constants |= {"head_dim": case.head_dim}
    return pdi(**constants)


def pushes_of(case: Case) -> list[Push]:
    """What a case moves, by whole descriptors."""
    if isinstance(case, Mha):
        return [push for col in range(len(case.shares)) for push in case.pushes(col)]
    columns = range(len(case.n_blocks))
    pushes = [case.c_push(col) for col in columns]
    pushes += [case.a_push(row) for row in range(case.tiles.core_rows)]
    return pushes + [case.b_push(col) for col in columns]


def sizes_of(case: Case) -> list[int]:
    """The bytes of a case's arguments, none too many."""
    extents: dict[int, int] = {}
    for push in pushes_of(case):
        length, _, _, w3, w4, w5, w6, _ = push.words
        d0, d1 = w3 >> 20 or length, w4 >> 20 or 1
        d2 = length // (d0 * d1)
        last = (d0 - 1) + (d1 - 1) * ((w4 & 0xFFFFF) + 1) + (d2 - 1) * ((w5 & 0xFFFFF) + 1)
        last += (push.repeat - 1) * ((w6 & 0xFFFFF) + 1) if w6 >> 20 & 0x3F else 0
        end = push.offset_bytes + 4 * (last + 1)
        extents[push.arg] = max(extents.get(push.arg, 0), end)
    return [extents[arg] for arg in sorted(extents)]


def stream_of(case: Case, pushes: list[Push]) -> bytes:
    """A stream that moves so instead."""
    ops = case.words() + [op for push in pushes for op in push.ops()]
    waits = [op for op in case.ops() if isinstance(op, txn.Sync)]
    columns = {op.col: op for op in waits}
    return assemble(
        [*ops, *(columns[push.col] for push in pushes if push.channel.startswith("S2MM"))]
    )


@st.composite
def reshaped(draw: st.DrawFn, push: Push) -> Push:
    """A push of as many words, at other places: strides of any size, also none; other arguments."""
    words = push.words[0] * push.repeat
    repeat = draw(st.sampled_from([n for n in range(1, 65) if words % n == 0]))
    left = words // repeat
    d0 = draw(st.sampled_from([n for n in range(1, min(left, 1023) + 1) if left % n == 0]))
    rows = left // d0
    d1 = draw(st.sampled_from([n for n in range(1, min(rows, 1023) + 1) if rows % n == 0]))
    stride = st.one_of(st.integers(1, 8), st.sampled_from([d0, d0 + 1, d0 * d1, 16, 20, 1 << 20]))
    iterations = draw(st.sampled_from([1, repeat, max(1, repeat // 2)]))
    descriptor = bd(
        left,
        (d0, draw(st.sampled_from([1, 1, 1, 2, 3]))),
        (d1, draw(stride)),
        draw(stride),
        (iterations, draw(stride)),
        draw(st.integers(0, iterations - 1)),
    )
    offset = draw(st.one_of(st.just(push.offset_bytes), st.integers(0, 64).map(lambda n: 4 * n)))
    arg = draw(st.one_of(st.just(push.arg), st.integers(0, 3)))
    return replace(push, words=descriptor, repeat=repeat, offset_bytes=offset, arg=arg)


@pytest.mark.parametrize("case", [*GEMMS, *MHAS])
def test_some_cases_are_computed_in_machine_code(
    case: Case, array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = array_code.recorded(monkeypatch)
    guarded_run(image(case), COLUMNS, assemble(case.ops()), sizes_of(case))
    found = calls.gemm if isinstance(case, Gemm) else calls.attend
    assert bool(found) == in_machine_code(case, array)


def test_a_fuzzed_run_is_computed_in_machine_code(
    array: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = array_code.recorded(monkeypatch)
    for seed in sorted((SEEDS / "runs").iterdir()):
        before = len(calls.gemm), len(calls.attend)
        TARGETS["runs"](seed.read_bytes())
        made = len(calls.gemm) > before[0], len(calls.attend) > before[1]
        compiled = array in REGISTERS and "wide" in seed.name
        assert made == (compiled and "gemm" in seed.name, compiled and "mha" in seed.name)


@pytest.mark.parametrize("case", [*GEMMS, *MHAS])
def test_a_sound_stream_needs_no_byte_more_than_its_views(case: Case) -> None:
    sizes = sizes_of(case)
    found = guarded_run(image(case), COLUMNS, assemble(case.ops()), sizes)
    assert not isinstance(found, str), found
    for i in range(len(sizes)):
        short = [size - 4 * (i == arg) for arg, size in enumerate(sizes)]
        failed = guarded_run(image(case), COLUMNS, assemble(case.ops()), short)
        assert f"of buffer {i}, which has" in str(failed)


@pytest.mark.slow
@EVERY_ARRAY
@given(st.data(), st.sampled_from([*GEMMS, *MHAS]))
def test_descriptors_of_any_shape_stay_inside(data: st.DataObject, case: Case) -> None:
    pushes = pushes_of(case)
    for i in data.draw(st.sets(st.integers(0, len(pushes) - 1), max_size=4)):
        pushes[i] = data.draw(reshaped(pushes[i]))
    room = data.draw(st.sampled_from([0, 64, 4096]))
    sizes = [size + room for size in sizes_of(case)] + [4096] * isinstance(case, Gemm)
    stream = stream_of(case, pushes)
    base = data.draw(st.sampled_from([0, 4, 64, 4092]))
    nans = data.draw(st.booleans())
    found = guarded_run(image(case), COLUMNS, stream, sizes, nans, base)
    event("failed" if isinstance(found, str) else "ran")


@EVERY_ARRAY
@given(
    st.sampled_from([*GEMMS, *MHAS]),
    st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.one_of(
                st.integers(0, 70),
                st.sampled_from([0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1 << 16, 1 << 20]),
                st.builds(lambda n, s: n << 20 | s, st.integers(0, 1023), st.integers(0, 64)),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 3),
)
def test_words_of_any_value_stay_inside(
    case: Case, changes: list[tuple[float, int]], size: int
) -> None:
    words = np.frombuffer(assemble(case.ops()), "<u4").copy()
    for place, value in changes:
        words[4 + int(place * (len(words) - 4))] = value
    sizes = [(n, 4 * n, 4096, 65536)[size] for n in sizes_of(case)]
    found = guarded_run(image(case), COLUMNS, words.tobytes(), sizes)
    event("failed" if isinstance(found, str) else "ran")


@pytest.mark.parametrize("case", [MHAS[1], MHAS[4]])
def test_results_of_every_row_in_one_place_stay_there(case: Mha) -> None:
    pushes = pushes_of(case)
    (o,) = [push for push in pushes if push.channel == "S2MM0"]
    length = case.head_dim // 2
    repeats = o.words[0] // length
    pushes[pushes.index(o)] = replace(o, words=bd(length), repeat=repeats)
    sizes = sizes_of(case)
    sizes[3] = 4 * length
    found = guarded_run(image(case), COLUMNS, stream_of(case, pushes), sizes)
    assert not isinstance(found, str), found


@pytest.mark.parametrize("channel", ["MM2S0", "MM2S1", "S2MM0"])
@pytest.mark.parametrize("case", [GEMMS[1], GEMMS[6], MHAS[0], MHAS[3]])
def test_columns_in_descending_order_stay_inside(case: Case, channel: str) -> None:
    pushes = pushes_of(case)
    own = [i for i, push in enumerate(pushes) if push.channel == channel]
    first, *_, last = own
    offsets = pushes[first].offset_bytes, pushes[last].offset_bytes
    pushes[first] = replace(pushes[first], offset_bytes=offsets[1])
    pushes[last] = replace(pushes[last], offset_bytes=offsets[0])
    found = guarded_run(image(case), COLUMNS, stream_of(case, pushes), sizes_of(case))
    assert not isinstance(found, str) or channel == "MM2S1", found


def test_weights_that_differ_from_chunk_to_chunk_count_as_often_as_they_are_unpacked() -> None:
    case = Gemm(Tiles(columns=COLUMNS, k_tile=64, n_tile=64), 64, 2, (4,), bias=False)
    same = guarded_run(image(case), COLUMNS, assemble(case.ops()), sizes_of(case))
    assert not isinstance(same, str), same
    pushes = pushes_of(case)
    (b,) = [push for push in pushes if push.channel == "MM2S1"]
    # As many words, from the same place, but a piece a push: nobody can tell they are the same.
    pushes[pushes.index(b) :] = [replace(b, repeat=1) for _ in range(case.chunks)]
    found = guarded_run(image(case), COLUMNS, stream_of(case, pushes), sizes_of(case))
    assert "elements to compute with, the emulated NPU takes" in str(found)
