"""A fault at every point of a forward: the right vector or a typed error; the next call is right.

Each fault that a state tells of is planned at run k for every k, in single runs and in lists,
with one slot and with enough, with one pack and with two in step. Time is virtual, so a hang would
be one for ever: a test that ends is the proof that every wait is bounded.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs import MakeRig

from npu_embed import DeviceBad, DeviceError, Embedder, NoFreeContext, RunFailed, settings
from npu_embed.driver import Xrt as Anything
from npu_embed.emulator import slots
from npu_embed.emulator.faults import Faults, parse
from npu_embed.kernels import abandoned

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]

ONE_PACK = ["two cats on a sofa", "a red car"]
TWO_PACKS = ["a " * 100, "b " * 90, "two cats on a sofa"]
ERRNOS = ("ENOENT", "EINVAL", "ENODEV", "ENOSPC", "EBUSY")

# Kind -> whether the pack must be computed again. Host memory outlives a suspended array.
TOLD_BY_STATE = {"timeout": 1, "error": 1, "abort": 1, "lost": 1, "suspend": 0}
UNTOLD = ("flip", "flip=0.02", "stale")

Open = Callable[..., Embedder]


@pytest.fixture(params=[(s, r, p) for s in (1, 16) for r in ("on", "off") for p in (1, 2)], ids=str)
def setting(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, int]:
    """Slots, runlists, packs in step."""
    count, lists, packs = request.param
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(count))
    monkeypatch.setenv("NPU_EMBED_RUNLISTS", lists)
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "0")
    return count, lists, packs


few_settings = pytest.mark.parametrize(
    "setting", [(1, "on", 1), (16, "on", 1)], ids=str, indirect=True
)


@pytest.fixture
def texts(setting: tuple[int, str, int]) -> list[str]:
    return ONE_PACK if setting[2] == 1 else TWO_PACKS


@pytest.fixture
def engine(tiny_bundle: Path, setting: tuple[int, str, int]) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated", pack_rows=128, verify="never") as opened:
        yield opened


def plan(engine: Embedder, text: str, seed: int = 0) -> Faults:
    """What goes wrong on the engine's device from now on."""
    planned = engine._session.device._npu.faults = Faults(parse(text), seed)
    return planned


def runs_of(engine: Embedder, texts: list[str]) -> tuple[F32, int]:
    """The right vectors, and how many runs they take."""
    engine.embed(texts)
    wanted = engine.embed(texts)
    return wanted, engine.last_stats.runs


def points(runs: int, texts: list[str]) -> range:
    """Every run of one pack; of two in step, which repeat the same forward, every third."""
    return range(1, runs + 1, 1 if texts == ONE_PACK else 3)


def same(found: F32, wanted: F32, where: str) -> None:
    np.testing.assert_array_equal(found, wanted, err_msg=where)


@pytest.mark.parametrize("kind", TOLD_BY_STATE)
def test_a_fault_at_any_run_is_made_good(engine: Embedder, texts: list[str], kind: str) -> None:
    wanted, runs = runs_of(engine, texts)
    for k in range(1, runs + 1):
        struck = plan(engine, f"{kind}@{k}").struck
        same(engine.embed(texts), wanted, f"{kind} at run {k}")
        assert struck == {kind: 1}
        assert engine.last_stats.rebuilds == TOLD_BY_STATE[kind]
        same(engine.embed(texts), wanted, f"after {kind} at run {k}")
        assert engine.last_stats.rebuilds == 0


@pytest.mark.parametrize("kind", ["timeout", "error", "abort", "lost"])
def test_a_fault_from_any_run_on_is_told_and_not_returned(
    engine: Embedder, texts: list[str], kind: str
) -> None:
    wanted, runs = runs_of(engine, texts)
    for k in points(runs, texts):
        plan(engine, f"{kind}@{k}+")
        with pytest.raises(DeviceBad, match=r"First: (qkv|mha|o|up|down)_.* Then: qkv_"):
            engine.embed(texts)
        plan(engine, "")
        with pytest.raises(DeviceBad):
            engine.embed(texts)
        engine.release()
        same(engine.embed(texts), wanted, f"after {kind} from run {k} on")


@few_settings
def test_a_device_that_is_gone_at_any_run_is_told(
    tiny_bundle: Path, engine: Embedder, texts: list[str]
) -> None:
    wanted, runs = runs_of(engine, texts)
    engine.release()
    for k in range(1, runs + 1):
        with Embedder(tiny_bundle, "emulated", pack_rows=128) as other:
            plan(other, f"gone@{k}")
            with pytest.raises(DeviceBad, match=r"First: .* Then: .*the device is gone"):
                other.embed(texts)
            other.release()
            with pytest.raises(DeviceError):
                other.embed(texts)
    abandoned.clear()
    same(engine.embed(texts), wanted, "on another device")


@few_settings
@pytest.mark.parametrize("sign", ["-", "+"])
@pytest.mark.parametrize("code", ERRNOS)
def test_a_context_refused_once_is_waited_for_and_for_ever_is_told(
    tiny_bundle: Path, setting: tuple[int, str, int], engine: Embedder, code: str, sign: str
) -> None:
    wanted = engine.embed(ONE_PACK)
    created = 2 if setting[0] > 1 else engine.stats.swaps + 1
    for k in range(1, created + 1):
        engine.release()
        struck = plan(engine, f"context={sign}{code}@{k}").struck
        try:
            same(engine.embed(ONE_PACK), wanted, f"{code} at context {k}")
        except NoFreeContext:  # with a wait of 0 ms there may be one attempt only
            assert engine.last_stats.rebuilds == 0
        assert struck == {"context": 1}
        same(engine.embed(ONE_PACK), wanted, f"after {code} at context {k}")
    engine.release()
    plan(engine, f"context={sign}{code}@1+")
    with pytest.raises(NoFreeContext, match="xclbin: no free hardware context"):
        engine.embed(ONE_PACK)
    plan(engine, "")
    same(engine.embed(ONE_PACK), wanted, f"after {code}")


@few_settings
def test_another_failure_to_create_a_context_is_made_good(
    setting: tuple[int, str, int], engine: Embedder, texts: list[str]
) -> None:
    wanted = engine.embed(texts)
    for k in (1, 2):
        engine.release()
        plan(engine, f"context=ETIME@{k}")
        same(engine.embed(texts), wanted, f"ETIME at context {k}")
        assert engine.last_stats.rebuilds == 1


@few_settings
def test_a_full_heap_at_any_load_is_made_good(engine: Embedder, texts: list[str]) -> None:
    wanted = engine.embed(texts)
    loads = engine.last_stats.loads
    for k in range(1, loads + 1):
        engine.release()
        struck = plan(engine, f"heap@{k}").struck
        same(engine.embed(texts), wanted, f"heap full at load {k}")
        assert struck == {"heap": 1}
        assert engine.last_stats.rebuilds == 1


@pytest.mark.parametrize("kind", UNTOLD)
def test_what_no_state_tells_of_is_seen_by_running_twice(
    tiny_bundle: Path, setting: tuple[int, str, int], texts: list[str], kind: str
) -> None:
    with Embedder(tiny_bundle, "emulated", pack_rows=128, verify="always") as engine:
        wanted, runs = runs_of(engine, texts)
        seen = 0
        for k in points(runs, texts):
            plan(engine, f"{kind}@{k}", seed=k)
            same(engine.embed(texts), wanted, f"{kind} at run {k}")
            seen += engine.last_stats.rebuilds
        assert seen, "no fault made a difference"


def test_memory_that_cannot_be_locked_at_any_buffer_leaves_nothing_behind(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, k = None, 0
    told: list[str] = []
    while wanted is None:
        k += 1
        monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", f"memlock@{k}")
        try:
            with Embedder(tiny_bundle, "emulated", pack_rows=128) as engine:
                wanted = engine.embed(TWO_PACKS)  # with the second pack's buffers made on the way
                assert engine.last_stats.rebuilds in (0, 1)
        except DeviceError as error:
            told.append(str(error))
    assert len(told) > 10
    assert all("ulimit -l" in words for words in told)
    monkeypatch.delenv("NPU_EMBED_EMU_FAULTS")
    with Embedder(tiny_bundle, "emulated", pack_rows=128) as engine:
        same(engine.embed(TWO_PACKS), wanted, "without a fault")


# --- nothing leaks ------------------------------------------------------------------------------

FAULTS = 10_000
REBUILDS = 300


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def taken(npu: Anything) -> tuple[int, int]:
    """Allocations in the device's heap and in host memory."""
    while npu._freed:
        heap, address = npu._freed.popleft()
        heap.give_back(address)
    return len(npu._heap._taken), len(npu._host._taken)


@pytest.mark.alone
@pytest.mark.parametrize("runlists", ["on", "off"])
def test_ten_thousand_faults_leave_nothing_behind(
    make: MakeRig, tiny_bundle: Path, runlists: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "npu_embed")  # whose records would be kept
    rig = make(tiny_bundle, runlists=runlists)
    device: Anything = rig.session.device._npu
    wanted = rig.gemm(key="up")
    runs = [rig.gemm_run("up"), rig.gemm_run("down")]
    table = slots.table(settings.emulator_dir())

    def fail(count: int) -> None:
        for nth in range(count):
            kind = ("timeout", "error", "abort")[nth % 3]
            device.plan_faults(parse(f"{kind}@{1 + nth % 2}"))
            with pytest.raises(RunFailed):
                rig.npu.submit(runs).wait()
            if nth % 50 == 0:
                rig.npu.unload_all()

    fail(100)
    device.plan_faults(())
    np.testing.assert_array_equal(rig.gemm(key="up"), wanted)
    gc.collect()
    before = open_files(), taken(device), len(table.holders(16)), len(abandoned)
    blocks = sys.getallocatedblocks()
    fail(FAULTS // 2)  # and as many with the other way to submit
    gc.collect()
    grown = sys.getallocatedblocks() - blocks
    device.plan_faults(())
    np.testing.assert_array_equal(rig.gemm(key="up"), wanted)
    assert (open_files(), taken(device), len(table.holders(16)), len(abandoned)) == before
    assert grown < FAULTS // 10


@pytest.mark.alone
def test_rebuilt_contexts_leave_nothing_behind(tiny_bundle: Path) -> None:
    table = slots.table(settings.emulator_dir())
    with Embedder(tiny_bundle, "emulated", verify="startup") as engine:
        wanted = engine.embed(ONE_PACK)
        device: Anything = engine._session.device._npu
        gc.collect()
        before = open_files(), taken(device), len(table.holders(16)), len(abandoned)
        for nth in range(REBUILDS):
            kind = ("timeout", "error", "abort", "lost")[nth % 4]
            plan(engine, f"{kind}@{1 + nth % 18}")
            same(engine.embed(ONE_PACK), wanted, f"{kind}, {nth}")
        gc.collect()
        assert engine.stats.rebuilds == REBUILDS
        plan(engine, "")
        assert (open_files(), taken(device), len(table.holders(16)), len(abandoned)) == before
