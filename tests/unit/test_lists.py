"""Runs submitted together: as runlists the same bits as one by one, checked, and without them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs import MakeRig, Rig, numbers

from npu_embed import kernels
from npu_embed.buffers import View
from npu_embed.emulator import pyxrt
from npu_embed.emulator.hardware import Command, EmulatedNpu
from npu_embed.errors import RunFailed, SettingError
from npu_embed.flights import Flight
from npu_embed.kernels import Kernel
from npu_embed.loaded import LoadedContext

LENGTHS = (7, 16, 3, 3, 20, 1)  # buckets of 16 and 32, whose rows past a text are the next one's


@pytest.fixture(autouse=True)
def _nothing_abandoned() -> Iterator[None]:
    kept = len(kernels.abandoned)
    yield
    del kernels.abandoned[kept:]


def chained(rig: Rig, rows: int = 70) -> NDArray[np.float32]:
    """The results of up and down in one submit: the second reads what the first writes."""
    rig.npu.submit([rig.gemm_run("up", rows), rig.gemm_run("down", rows)]).wait()
    return rig.out.get(rows)


def the_context(rig: Rig) -> LoadedContext:
    """The only loaded context."""
    ((_, loaded),) = rig.npu._contexts
    return loaded


# --- on and off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "loose"])
def test_lists_change_no_bit(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    listed, single = (make(tiny_bundle, runlists=setting) for setting in ("on", "off"))
    for call in (chained, lambda rig: rig.attend(*LENGTHS), lambda rig: rig.attend(5, 5, 5)):
        np.testing.assert_array_equal(call(listed), call(single))
    counted = [rig.session.counters for rig in (listed, single)]
    assert [c.runlists for c in counted] == [3, 0]
    assert counted[0].runs == counted[1].runs == 2 + len(LENGTHS) + 3
    assert counted[0].patches == counted[1].patches == len(set(LENGTHS)) + 1


def test_texts_of_a_list_are_as_each_alone(rig: Rig) -> None:
    together = rig.attend(*LENGTHS)
    row = 0
    for n in LENGTHS:
        np.testing.assert_array_equal(together[row : row + n], rig.mha(n, row=row))
        row += n


def test_a_run_alone_is_no_list(rig: Rig) -> None:
    rig.gemm()
    rig.mha()
    assert rig.session.counters.runlists == 0


def test_a_list_is_made_once_and_started_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = pyxrt.runlist

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, context: object) -> None:
            super().__init__(context)
            made.append(None)

    monkeypatch.setattr(pyxrt, "runlist", Counted)
    first = rig.attend(3, 4)
    np.testing.assert_array_equal(rig.attend(3, 4), first)
    rig.attend(4, 3)
    assert len(made) == 2
    assert rig.session.counters.runlists == 3


def test_where_pyxrt_has_no_lists_runs_go_one_by_one(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make(tiny_bundle).attend(*LENGTHS)
    monkeypatch.delattr(pyxrt, "runlist")
    for setting in ("auto", "on"):
        rig = make(tiny_bundle, runlists=setting)
        np.testing.assert_array_equal(rig.attend(*LENGTHS), wanted)
        assert rig.session.counters.runlists == 0


def test_the_setting_decides_unless_one_is_given(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_RUNLISTS", "off")
    for options, wanted in (({}, 0), ({"runlists": "on"}, 1)):
        rig = make(tiny_bundle, **options)
        rig.attend(3, 3)
        assert rig.session.counters.runlists == wanted
    with pytest.raises(SettingError, match=r"runlists='maybe': unknown runlists setting"):
        make(tiny_bundle, runlists="maybe")


@pytest.mark.parametrize("runlists", ["on", "off"])
def test_the_same_runs_may_be_in_flight_twice(
    make: MakeRig, tiny_bundle: Path, runlists: str
) -> None:
    rig = make(tiny_bundle, runlists=runlists)
    wanted = chained(rig)
    runs = [rig.gemm_run("up", 70), rig.gemm_run("down", 70)]
    for _ in range(2):
        flights = [rig.npu.submit(runs * 2), rig.npu.submit(runs * 2), rig.npu.submit(runs[:1])]
        for flight in flights:
            flight.wait()
        np.testing.assert_array_equal(rig.out.get(70), wanted)
    assert not in_flight()


def test_runs_of_two_contexts_or_none_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="runs of 2 contexts, wanted one"):
        rig.npu.submit([rig.gemm_run(), *rig.mha_runs(3)])
    with pytest.raises(ValueError, match="runs of 0 contexts"):
        rig.npu.submit([])
    assert rig.session.counters.loads == 0


# --- copies -------------------------------------------------------------------------------------


def in_flight() -> list[Any]:
    """The commands that are queued on the emulated NPU."""
    from npu_embed.emulator import hardware

    npus: list[EmulatedNpu] = list(hardware._npus)
    return [command for npu in npus for context in npu.contexts for command in context.queue]


@pytest.mark.parametrize("runlists", ["on", "off"])
def test_a_small_pool_gives_the_same_and_patches_nothing_in_flight(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, runlists: str
) -> None:
    rig = make(tiny_bundle, runlists=runlists)
    lengths = (7, 16, 3, 3, 2, 1, 7, 3)
    wanted = rig.attend(*lengths)
    rig.npu.unload_all()
    rig.mha(1)
    loaded = the_context(rig)
    loaded.max_copies = 2
    real, patched = Kernel.patch, []

    def patch(self: Kernel, words: Mapping[int, int]) -> None:
        bo: Any = self._insts_bo
        for command in in_flight():
            windows = command.windows.values()
            assert all(window.memory is not bo._window.memory for window in windows)
        patched.append(words)
        real(self, words)

    monkeypatch.setattr(Kernel, "patch", patch)
    flight = rig.npu.submit(rig.mha_runs(*lengths))
    flight.wait()
    np.testing.assert_array_equal(rig.o.get(sum(lengths)), wanted)
    assert len(loaded._copies) == 2
    assert len(patched) >= 5
    rig.npu.submit(rig.mha_runs(5, 6))  # not waited for
    np.testing.assert_array_equal(rig.attend(*lengths), wanted)


def test_kept_lists_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_embed.loaded.MAX_LISTS", 2)
    wanted = rig.attend(3, 4)
    for lengths in ((1, 2), (2, 3), (3, 4), (4, 5)):
        rig.npu.submit(rig.mha_runs(*lengths))  # in flight when the next needs its place
    np.testing.assert_array_equal(rig.attend(3, 4), wanted)
    assert len(the_context(rig)._lists) == 2


def test_a_list_goes_with_a_kernel_it_runs(rig: Rig) -> None:
    wanted = chained(rig)
    rig.npu.unload("up_r96")
    assert not the_context(rig)._lists
    np.testing.assert_array_equal(chained(rig), wanted)


# --- checked ------------------------------------------------------------------------------------


class Reversed(pyxrt.runlist):
    """Executes its runs in the wrong order: overwritten rows, and stale input for what follows."""

    def execute(self) -> None:
        self._runs.reverse()
        try:
            super().execute()
        finally:
            self._runs.reverse()


class CutShort(pyxrt.runlist):
    """Executes all but the last."""

    def execute(self) -> None:
        last = self._runs.pop()
        super().execute()
        self._runs.append(last)

    def wait(self) -> None:
        last = self._runs.pop()
        super().wait()
        self._runs.append(last)


class Refused(pyxrt.runlist):
    """Cannot be started."""

    def execute(self) -> None:
        raise RuntimeError("EXEC_CMD IOCTL failed (err=-22): Invalid argument")


class Failing(pyxrt.runlist):
    """Always fails in the end."""

    def wait(self) -> None:
        super().wait()
        raise RuntimeError("runlist failed execution (ERT_CMD_STATE_ERROR)")


@pytest.mark.parametrize("broken", [Reversed, CutShort, Refused, Failing])
@pytest.mark.parametrize("kind", ["chained", "mha"])
def test_lists_that_do_not_do_as_single_runs_are_given_up_with_a_warning(
    make: MakeRig,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: type[pyxrt.runlist],
    kind: str,
) -> None:
    def results(rig: Rig) -> NDArray[np.float32]:
        return chained(rig) if kind == "chained" else rig.attend(*LENGTHS)

    right = results(make(tiny_bundle, runlists="off"))
    monkeypatch.setattr(pyxrt, "runlist", broken)
    rig = make(tiny_bundle)
    rig.npu.check_lists = True
    np.testing.assert_array_equal(results(rig), right)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "doing without them (NPU_EMBED_RUNLISTS=off" in record.getMessage()
    lists = rig.session.counters.runlists
    np.testing.assert_array_equal(results(rig), right)
    assert rig.session.counters.runlists == lists <= 1
    assert len(caplog.records) == 1


def test_lists_that_do_as_single_runs_are_checked_once_a_kind(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.npu.check_lists = True

    def runs(*lengths: int) -> int:
        before = rig.session.counters.runs
        rig.attend(*lengths)
        return rig.session.counters.runs - before

    assert runs(16, 3) == 3 * 2, "listed, one by one, and listed again"
    assert runs(16, 5) == 2
    assert runs(5, 3) == 3 * 2, "the first whose bucket writes past its text"
    assert runs(20, 3, 3) == 3
    chained(rig)
    before = rig.session.counters.runs
    chained(rig)
    assert rig.session.counters.runs == before + 2
    assert not caplog.records


def test_a_check_that_could_not_be_made_is_made_the_next_time(rig: Rig) -> None:
    rig.npu.check_lists = True
    rig.attend(20, 3)
    runs = rig.mha_runs(3, 3)
    short = rig.session.buffer(4096)
    broken = [rig.gemm_run("up"), rig.gemm_run("down")]
    broken[1] = type(broken[1])("down", rig.inner, short, rig.out, 3)
    with pytest.raises(RunFailed, match=r"down_r16: the run ended in ERROR"):
        rig.npu.submit(broken)
    before = rig.session.counters.runs
    chained(rig)
    assert rig.session.counters.runs == before + 2 * 3
    rig.npu.submit(runs).wait()


@pytest.mark.parametrize(
    ("kind", "setting", "wanted"),
    [
        ("npu", "auto", True),
        ("npu", "on", False),
        ("npu", "off", False),
        ("emulated", "auto", False),
    ],
)
def test_lists_are_checked_on_hardware_only(
    make: MakeRig,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    setting: str,
    wanted: bool,
) -> None:
    from npu_embed.device import Session

    real = Session.__init__

    def init(self: Session, _: str, xrt: object) -> None:
        real(self, kind, xrt)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "__init__", init)
    assert make(tiny_bundle, runlists=setting).npu.check_lists is wanted


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runlists", ["on", "off"])
def test_a_fault_in_a_later_run_is_a_failed_run_and_the_next_call_is_right(
    make: MakeRig, tiny_bundle: Path, runlists: str
) -> None:
    rig = make(tiny_bundle, runlists=runlists)
    wanted = chained(rig)
    runs = [rig.gemm_run("up", 70), rig.gemm_run("down", 70), rig.gemm_run("up", 70)]
    runs[1] = type(runs[1])("down", rig.inner, rig.session.buffer(4096), rig.out, 70)
    flight = rig.npu.submit(runs)
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"down_r96.*(did not complete|ended in ERROR)"):
            flight.wait()
    np.testing.assert_array_equal(chained(rig), wanted)


def test_runs_started_before_one_that_could_not_be_are_waited_for(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(tiny_bundle, runlists="off")
    real = Kernel.start

    def start(self: Kernel, views: Sequence[View]) -> Flight:
        if self.name == "down_r16":
            raise RunFailed("down: could not be started")
        return real(self, views)

    monkeypatch.setattr(Kernel, "start", start)
    with pytest.raises(RunFailed, match="could not be started"):
        rig.npu.submit([rig.gemm_run("up"), rig.gemm_run("down")])
    assert not in_flight()


def test_ctrl_c_waits_for_a_list_to_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = rig.attend(*LENGTHS)
    real = pyxrt.run.wait
    interrupts = [KeyboardInterrupt()]

    def wait(self: pyxrt.run, timeout_ms: int = 0) -> object:
        if interrupts:
            raise interrupts.pop()
        return real(self, timeout_ms)

    monkeypatch.setattr(pyxrt.run, "wait", wait)
    flight = rig.npu.submit(rig.mha_runs(*LENGTHS))
    with pytest.raises(KeyboardInterrupt):
        flight.wait()
    assert not in_flight()
    assert not kernels.abandoned
    with pytest.raises(RunFailed, match="the wait was interrupted"):
        flight.wait()
    np.testing.assert_array_equal(rig.attend(*LENGTHS), wanted)


def test_ctrl_c_while_a_list_is_submitted_waits_for_what_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rig.attend(*LENGTHS)
    real, left = EmulatedNpu.submit, [None] * 3

    def submit(self: EmulatedNpu, command: Command) -> None:
        real(self, command)
        if not left:
            raise KeyboardInterrupt
        left.pop()

    with monkeypatch.context() as patch:
        patch.setattr(EmulatedNpu, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            rig.npu.submit(rig.mha_runs(*LENGTHS))
    assert not in_flight()
    np.testing.assert_array_equal(rig.attend(*LENGTHS), wanted)


def test_a_list_nobody_could_wait_for_is_kept_alive_and_not_used_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rig.attend(*LENGTHS)
    with monkeypatch.context() as patch:
        patch.setattr(pyxrt.runlist, "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        flight = rig.npu.submit(rig.mha_runs(*LENGTHS))
        with pytest.raises(KeyboardInterrupt):
            flight.wait()
    assert len(kernels.abandoned) == 1
    np.testing.assert_array_equal(rig.attend(*LENGTHS), wanted)
    rig.npu.unload_all()
    np.testing.assert_array_equal(rig.attend(*LENGTHS), wanted)


def test_a_list_that_is_refused_names_its_kernels_and_the_setting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyxrt, "runlist", Refused)
    with pytest.raises(
        RunFailed, match=r"^up_r16, down_r16: .*NPU_EMBED_RUNLISTS=off.*err=-22"
    ) as failed:
        rig.npu.submit([rig.gemm_run("up"), rig.gemm_run("down")])
    assert "..." not in str(failed.value)
    with pytest.raises(RunFailed, match=r"^up_r16, down_r16, qkv_r16, \.\.\.: "):
        rig.npu.submit([rig.gemm_run(key) for key in ("up", "down", "qkv", "o")])
    assert rig.session.counters.runs == rig.session.counters.runlists == 0


def test_runs_in_flight_land_before_their_context_is_dropped(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    rig = make(tiny_bundle)
    wanted = rig.attend(*LENGTHS)
    rig.o.put(numbers(256, 64))
    flight = rig.npu.submit(rig.mha_runs(*LENGTHS))
    assert in_flight()
    rig.npu.submit([rig.gemm_run("o")]).wait()
    assert rig.session.counters.swaps == 1
    assert flight.landed
    flight.wait()
    np.testing.assert_array_equal(rig.o.get(sum(LENGTHS)), wanted)


@pytest.mark.parametrize("runlists", ["on", "off"])
def test_ctrl_c_between_start_and_wait_leaves_nothing_in_flight(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, runlists: str
) -> None:
    rig = make(tiny_bundle, runlists=runlists)
    wanted = chained(rig)

    def interrupted(finish: object) -> None:
        assert in_flight()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for module in ("kernels", "runlists"):
            patch.setattr(f"npu_embed.{module}.Flight", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.npu.submit([rig.gemm_run("up", 70), rig.gemm_run("down", 70)])
    assert not in_flight()
    np.testing.assert_array_equal(chained(rig), wanted)


def test_an_error_of_a_list_that_somebody_keeps_does_not_keep_the_slot(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "0")
    rig = make(tiny_bundle, runlists="on")
    runs = [rig.gemm_run("up"), rig.gemm_run("down")]
    runs[1] = type(runs[1])("down", rig.inner, rig.session.buffer(4096), rig.out, 3)
    with pytest.raises(RunFailed) as kept:
        rig.npu.submit(runs).wait()
    rig.npu.close()
    make(tiny_bundle).gemm()
    assert kept.value.__traceback__ is not None
