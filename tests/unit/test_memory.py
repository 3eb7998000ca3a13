"""Host and device sides of a buffer, in both modes, alone and under a kernel."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from boards import COPY, Loaded, copying_design

from npu_embed.bf16 import to_f32
from npu_embed.emulator import pyxrt
from npu_embed.emulator.memory import LINE_BYTES, POISON, Memory

SIZE = 4 * LINE_BYTES + 10  # whole lines, and one that is not
STALE = 0xFF


def strict(size: int = SIZE) -> Memory:
    return Memory(size, None)


def device_writes(memory: Memory, offset: int, content: bytes) -> None:
    memory.device[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
    memory.device_wrote(offset, (len(content) // 2,), (2,), 2)


# -- strict ---------------------------------------------------------------------------------------


def test_the_device_sees_poison_until_a_sync() -> None:
    memory = strict()
    memory.host[:] = 1
    assert (memory.device == POISON).all()
    assert np.isnan(to_f32(memory.device[:2].view(np.uint16))).all()
    memory.sync_to_device(0, SIZE)
    assert (memory.device == 1).all()


def test_a_later_host_write_is_not_seen_without_another_sync() -> None:
    memory = strict()
    memory.sync_to_device(0, SIZE)
    memory.host[:] = 2
    assert (memory.device == 0).all()


def test_the_host_sees_poison_of_what_the_device_wrote_until_a_sync() -> None:
    memory = strict()
    memory.sync_to_device(0, SIZE)
    device_writes(memory, 64, b"\x05" * 16)
    assert (memory.host[64:80] == STALE).all()
    assert (memory.host[:64] == 0).all()
    memory.sync_from_device(64, 16)
    assert (memory.host[64:80] == 5).all()


def test_a_second_write_is_stale_again() -> None:
    memory = strict()
    for value in (b"\x05", b"\x06"):
        device_writes(memory, 0, value * 8)
        assert (memory.host[:8] == STALE).all()
        memory.sync_from_device(0, 8)
        assert (memory.host[:8] == value[0]).all()


def test_syncing_a_device_written_buffer_towards_the_device_loses_the_results() -> None:
    memory = strict()
    memory.sync_to_device(0, SIZE)
    device_writes(memory, 0, b"\x05" * 16)
    memory.sync_to_device(0, 16)
    assert (memory.device[:16] != 5).all()
    memory.sync_from_device(0, 16)
    assert (memory.host[:16] != 5).all()


@pytest.mark.parametrize(
    ("offset", "size", "start", "stop"),
    [
        (0, 1, 0, 64),
        (63, 1, 0, 64),
        (63, 2, 0, 128),
        (64, 64, 64, 128),
        (130, 1, 128, 192),
        (SIZE - 1, 1, 256, SIZE),
        (0, SIZE, 0, SIZE),
    ],
)
def test_a_sync_moves_whole_cache_lines(offset: int, size: int, start: int, stop: int) -> None:
    inside = np.zeros(SIZE, bool)
    inside[start:stop] = True
    memory = strict()
    memory.host[:] = 1
    memory.sync_to_device(offset, size)
    assert ((memory.device == 1) == inside).all()
    memory.device[:] = 7
    memory.sync_from_device(offset, size)
    assert ((memory.host == 7) == inside).all()


def test_the_version_grows_with_every_change_of_the_devices_side() -> None:
    memory = strict()
    versions = [memory.version]
    memory.sync_to_device(0, 8)
    versions.append(memory.version)
    device_writes(memory, 0, b"\x01" * 8)
    versions.append(memory.version)
    memory.sync_from_device(0, 8)
    assert versions == sorted(set(versions))
    assert memory.version == versions[-1]


# -- loose ----------------------------------------------------------------------------------------


def loose(seed: int = 0, size: int = 64 * LINE_BYTES + 10) -> Memory:
    return Memory(size, random.Random(seed))


def lines(side: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[int]:
    return [int(side[i]) for i in range(0, len(side), LINE_BYTES)]


def test_a_cache_writes_some_dirty_lines_back_by_itself() -> None:
    memory = loose()
    memory.host[:] = 1
    memory.evict_lines()
    assert set(lines(memory.device)) == {0, 1}
    whole = memory.device[: 64 * LINE_BYTES].reshape(-1, LINE_BYTES)
    assert (whole == whole[:, :1]).all(), "a line moves as a whole"
    version = memory.version
    for _ in range(60):
        memory.evict_lines()
    assert (memory.device == 1).all()
    assert memory.version > version


def test_a_cache_drops_some_clean_lines_by_itself() -> None:
    memory = loose()
    memory.device[:] = 5
    memory.device_wrote(0, (memory.size // 2,), (2,), 2)
    assert set(lines(memory.host)) == {0}
    memory.evict_lines()
    assert set(lines(memory.host)) == {0, 5}
    memory.sync_from_device(0, memory.size)
    assert (memory.host == 5).all()


def test_a_dirty_line_that_is_written_back_destroys_what_the_device_wrote() -> None:
    memory = loose()
    memory.host[:] = 1
    memory.device[:] = 5
    memory.evict_lines()
    assert set(lines(memory.device)) == {1, 5}


def test_what_is_synced_is_safe_from_the_cache() -> None:
    memory = loose()
    memory.host[:] = 3
    memory.sync_to_device(0, memory.size)
    for _ in range(20):
        memory.evict_lines()
    assert (memory.device == 3).all()
    assert (memory.host == 3).all()


def test_seeds_decide_which_lines_move() -> None:
    found = []
    for seed in (0, 0, 1):
        memory = loose(seed)
        memory.host[:] = 1
        memory.evict_lines()
        found.append(tuple(lines(memory.device)))
    assert found[0] == found[1]
    assert found[0] != found[2]


# -- under a kernel -------------------------------------------------------------------------------


@pytest.fixture(params=["strict", "loose"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", request.param)
    return str(request.param)


def load(tmp_path: Path) -> Loaded:
    return Loaded(pyxrt, pyxrt.device(0), copying_design(tmp_path))


@pytest.mark.parametrize("seed", range(4))
def test_a_correct_program_is_right_in_both_modes(
    mode: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SEED", str(seed))
    loaded = load(tmp_path)
    run = loaded.run()
    for _ in range(3):
        run.start()
        run.wait2()
        assert loaded.result() == loaded.design.wanted


def forgets_to_sync_its_input(loaded: Loaded) -> bytes:
    content = loaded.design.inputs[3]
    loaded.bos[3] = pyxrt.bo(
        loaded.device, len(content), pyxrt.bo.host_only, loaded.kernel.group_id(3)
    )
    loaded.bos[3].write(content, 0)
    run = loaded.run()
    run.start()
    run.wait2()
    return loaded.result()


def forgets_to_sync_its_result(loaded: Loaded) -> bytes:
    run = loaded.run()
    run.start()
    run.wait2()
    loaded.kernel(3, loaded.insts, 1000, *(bo for _, bo in sorted(loaded.bos.items()))).wait2()
    return bytes(loaded.bos[loaded.design.output].map())


def syncs_its_result_towards_the_device(loaded: Loaded) -> bytes:
    run = loaded.run()
    run.start()
    run.wait2()
    loaded.bos[loaded.design.output].sync(loaded.to_device)
    return loaded.result()


FORGETFUL = [
    forgets_to_sync_its_input,
    forgets_to_sync_its_result,
    syncs_its_result_towards_the_device,
]


@pytest.mark.parametrize("program", FORGETFUL)
def test_a_forgotten_sync_is_always_wrong_in_strict_mode(
    program: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", "strict")
    assert callable(program)
    loaded = load(tmp_path)
    assert program(loaded) != loaded.design.wanted


def test_instructions_that_were_not_synced_are_no_stream(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    insts = pyxrt.bo(
        loaded.device, len(loaded.design.insts), pyxrt.bo.cacheable, loaded.kernel.group_id(1)
    )
    insts.write(loaded.design.insts, 0)
    run = loaded.run()
    run.set_arg(1, insts)
    run.start()
    assert run.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_ERROR


def test_a_forgotten_sync_is_sometimes_right_in_loose_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One line of results, so that a seed can be lucky.
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", "loose")
    line = slice(0, LINE_BYTES)
    right = []
    for seed in range(24):
        monkeypatch.setenv("NPU_EMBED_EMU_SEED", str(seed))
        loaded = load(tmp_path)
        right.append(forgets_to_sync_its_result(loaded)[line] == loaded.design.wanted[line])
    assert 0 < sum(right) < len(right)


def test_rows_that_were_never_synced_are_nan(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    half = COPY.rows // 2 * COPY.k * 2
    content = loaded.design.inputs[3]
    bo = pyxrt.bo(loaded.device, len(content), pyxrt.bo.host_only, loaded.kernel.group_id(3))
    bo.write(content, 0)
    bo.sync(loaded.to_device, half, 0)
    loaded.bos[3] = bo
    run = loaded.run()
    run.start()
    run.wait2()
    found = loaded.result()
    assert found[:half] == loaded.design.wanted[:half]
    assert np.isnan(to_f32(np.frombuffer(found[half:], np.uint16))).all()
