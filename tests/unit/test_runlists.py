"""RunList over a module that only pretends to be pyxrt."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from npu_embed import kernels
from npu_embed.buffers import View
from npu_embed.driver import Driver
from npu_embed.driver import Xrt as Fake
from npu_embed.errors import RunFailed
from npu_embed.runlists import RunList

Log = list[str]


class FakeKernel:
    """Builds runs that are their names."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def build(self, views: tuple[View, ...]) -> Fake:
        log, name = self.log, self.name

        class Run:
            def start(self) -> None:
                raise AssertionError("a run in a list must not be started")

            state = wait = start

            def __del__(self) -> None:
                log.append(f"free {name}")

        self.log.append(f"build {name} {len(views)}")
        return Run()


class FakeList:
    """Notes what it is asked for; its waits are told beforehand."""

    def __init__(self, log: Log, waits: list[BaseException | None]) -> None:
        self.log, self.waits = log, waits

    def add(self, run: object) -> None:
        self.log.append("add")

    def execute(self) -> None:
        self.log.append("execute")

    def wait(self) -> None:
        self.log.append("wait")
        step = self.waits.pop(0) if self.waits else None
        if step is not None:
            raise step

    def __del__(self) -> None:
        self.log.append("free list")


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture(autouse=True)
def _nothing_abandoned() -> Iterator[None]:
    kept = len(kernels.abandoned)
    yield
    del kernels.abandoned[kept:]


def make(log: Log, *waits: BaseException | None, names: tuple[str, ...] = ("a", "b")) -> RunList:
    contexts: Log = []
    module: Fake = types.SimpleNamespace()

    def runlist(context: str) -> FakeList:
        contexts.append(context)
        return FakeList(log, list(waits))

    module.runlist = runlist
    launches: Fake = [(FakeKernel(name, log), (None, None)) for name in names]
    made = RunList(Driver(module, 1000), "context", launches)
    assert contexts == ["context"]
    return made


def test_it_has_runs_of_its_own_added_in_order(log: Log) -> None:
    made = make(log)
    assert log == ["build a 2", "build b 2", "add", "add"]
    assert [kernel.name for kernel in made.kernels] == ["a", "b"]
    assert not made.busy


def test_it_is_executed_and_waited_for_as_one_and_again(log: Log) -> None:
    made = make(log)
    del log[:]
    for _ in range(2):
        flight = made.start()
        assert made.busy
        flight.wait()
        assert not made.busy
    assert log == ["execute", "wait"] * 2
    counters = made._driver.counters
    assert (counters.runs, counters.runlists) == (4, 2)


def test_a_failure_names_its_kernels_and_xrts_words(log: Log) -> None:
    made = make(log, RuntimeError("runlist failed execution (ERT_CMD_STATE_TIMEOUT)"))
    with pytest.raises(RunFailed, match=r"a, b: the runlist did not complete.*STATE_TIMEOUT"):
        made.start().wait()
    assert not made.busy
    made.start().wait()


def test_one_that_cannot_be_started_is_not_counted(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(log)

    def refuse(self: FakeList) -> None:
        raise RuntimeError("err=-19")

    monkeypatch.setattr(FakeList, "execute", refuse)
    with pytest.raises(RunFailed, match=r"a, b: .*could not be started.*err=-19"):
        made.start()
    assert made._driver.counters.runs == 0
    assert not made.busy


def test_ctrl_c_while_it_is_started_waits_for_its_end(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(log)

    def interrupted(self: FakeList) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeList, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.start()
    assert log[-1] == "wait"


@pytest.mark.parametrize(
    "then", [pytest.param(None, id="it ends"), pytest.param(RuntimeError("gone"), id="it fails")]
)
def test_ctrl_c_waits_for_its_end(log: Log, then: BaseException | None) -> None:
    made = make(log, KeyboardInterrupt(), then)
    with pytest.raises(KeyboardInterrupt):
        made.start().wait()
    assert log.count("wait") == 2
    assert not made.busy
    assert not kernels.abandoned


def test_one_that_nobody_waited_for_stays_busy_and_alive(log: Log) -> None:
    made = make(log, KeyboardInterrupt(), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.start().wait()
    assert made.busy
    waits = log.count("wait")
    made.settle()
    assert log.count("wait") == waits, "it may never end"
    made.release()
    assert not any(entry.startswith("free") for entry in log)


def test_the_list_is_freed_before_its_runs(log: Log) -> None:
    made = make(log)
    made.release()
    assert log[-3] == "free list"
    assert set(log[-2:]) == {"free a", "free b"}


def test_many_kernels_are_cut_short_in_a_message(log: Log) -> None:
    made = make(log, RuntimeError("failed"), names=("a", "b", "a", "c", "d", "e"))
    with pytest.raises(RunFailed, match=r"^a, b, c, \.\.\.: "):
        made.start().wait()
