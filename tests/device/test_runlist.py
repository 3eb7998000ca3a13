"""Run lists: idle, executing, idle again; one failure ends what follows it."""

from __future__ import annotations

import pytest
from boards import Design, Loaded, Xrt

INVALID = "Invalid argument"


@pytest.fixture(autouse=True)
def _has_runlists(xrt: Xrt) -> None:
    if not hasattr(xrt, "runlist"):
        pytest.skip("this pyxrt is older than run lists (XRT 2.20)")


def completed(xrt: Xrt) -> Xrt:
    return xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED


def test_a_list_executes_its_runs(xrt: Xrt, loaded: Loaded) -> None:
    runs = [loaded.run() for _ in range(30)]  # more than one chained command holds
    runs_list = xrt.runlist(loaded.context)
    for run in runs:
        runs_list.add(run)
    for _ in range(2):
        loaded.clear()
        runs_list.execute()
        assert runs_list.wait() is None
        assert {run.state() for run in runs} == {completed(xrt)}
        assert loaded.result() == loaded.design.wanted


def test_runs_execute_in_the_order_they_were_added(xrt: Xrt, loaded: Loaded) -> None:
    other = loaded.run()
    other.set_arg(3, loaded.buffer(3, bytes(len(loaded.design.inputs[3]))))
    runs_list = xrt.runlist(loaded.context)
    for run in (loaded.run(), other):
        runs_list.add(run)
    runs_list.execute()
    runs_list.wait()
    assert loaded.result() == bytes(len(loaded.design.wanted))


def test_waiting_for_an_idle_list_returns(xrt: Xrt, loaded: Loaded) -> None:
    xrt.runlist(loaded.context).wait()


def test_a_list_without_a_context_takes_nothing(xrt: Xrt, loaded: Loaded) -> None:
    says = f"cannot add run object to uninitialized runlist: {INVALID}"
    with pytest.raises(RuntimeError, match=says):
        xrt.runlist().add(loaded.run())


def test_an_executing_list_takes_no_run_and_does_not_execute_again(
    xrt: Xrt, loaded: Loaded
) -> None:
    runs_list = xrt.runlist(loaded.context)
    runs_list.add(loaded.run())
    late = loaded.run()
    runs_list.execute()
    says = f"current state: running: {INVALID}"
    with pytest.raises(RuntimeError, match=f"idle before adding run objects, {says}"):
        runs_list.add(late)
    with pytest.raises(RuntimeError, match=f"idle before submitting for execution, {says}"):
        runs_list.execute()
    runs_list.wait()
    runs_list.add(late)
    runs_list.execute()
    runs_list.wait()


def test_a_run_in_a_list_is_not_started_alone(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    runs_list = xrt.runlist(loaded.context)
    runs_list.add(run)
    says = f"Run object belongs to a runlist and cannot be explicitly started: {INVALID}"
    with pytest.raises(RuntimeError, match=says):
        run.start()
    del runs_list
    run.start()
    assert run.wait() == completed(xrt)


def test_a_run_of_another_context_is_refused(xrt: Xrt, device: Xrt, design: Design) -> None:
    one, other = Loaded(xrt, device, design), Loaded(xrt, device, design)
    with pytest.raises(RuntimeError, match=INVALID):
        xrt.runlist(one.context).add(other.run())


def test_what_follows_a_failure_is_aborted(xrt: Xrt, loaded: Loaded) -> None:
    runs = [loaded.run(), loaded.run(loaded.design.hanging), loaded.run(), loaded.run()]
    runs_list = xrt.runlist(loaded.context)
    for run in runs:
        runs_list.add(run)
    runs_list.execute()
    with pytest.raises(RuntimeError, match=r"runlist failed execution \(.*TIMEOUT\)"):
        runs_list.wait()
    names = [run.state().name.removeprefix("ERT_CMD_STATE_") for run in runs]
    assert names == ["COMPLETED", "TIMEOUT", "ABORT", "ABORT"]
    alone = loaded.run()
    alone.start()
    assert alone.wait() == completed(xrt)


def test_a_list_is_waited_for_without_a_limit(xrt: Xrt, loaded: Loaded) -> None:
    with pytest.raises(TypeError):
        xrt.runlist(loaded.context).wait(1000)


@pytest.mark.parametrize("wrong", [3, None, "run"])
def test_a_list_takes_runs(xrt: Xrt, loaded: Loaded, wrong: object) -> None:
    with pytest.raises(TypeError):
        xrt.runlist(loaded.context).add(wrong)
