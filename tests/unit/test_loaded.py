"""LoadedContext over parts that only pretend: bounded pools, order of release, nothing lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from npu_embed import loaded
from npu_embed.errors import RunFailed
from npu_embed.flights import Flight
from npu_embed.kernels import Kernel
from npu_embed.loaded import LoadedContext
from npu_embed.runlists import Launch

Log = list[str]


class FakeKernel:
    """Notes what becomes of it."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log
        self.words: dict[int, int] = {}

    def patch(self, words: Mapping[int, int]) -> None:
        if 13 in words.values():
            raise RunFailed("unlucky")
        self.words.update(words)
        self.log.append(f"patch {self}")

    def start(self, views: Sequence[Any]) -> Flight:
        if "bad" in self.name:
            raise RunFailed("bad: could not be started")
        self.log.append(f"start {self}")
        return Flight(lambda: self.log.append(f"end {self}"))

    def settle(self) -> None:
        """Nothing was lost."""

    def release(self) -> None:
        self.log.append(f"free {self}")

    def __str__(self) -> str:
        return f"{self.name}{list(self.words.values()) or ''}"


class FakeList:
    """Notes what becomes of it."""

    def __init__(self, launches: Sequence[Launch], log: Log) -> None:
        self.kernels = tuple(kernel for kernel, _ in launches)
        self.log = log
        self.busy = False

    def start(self) -> Flight:
        self.log.append(f"start {self}")
        return Flight(lambda: self.log.append(f"end {self}"))

    def settle(self) -> None:
        """Nothing was lost."""

    def release(self) -> None:
        self.log.append(f"free {self}")

    def __str__(self) -> str:
        return f"list of {' '.join(map(str, self.kernels))}"


class FakeContext:
    """Makes the above."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def load(self, name: str, stream: bytes) -> FakeKernel:
        self.log.append(f"load {name}")
        return FakeKernel(name, self.log)

    def runlist(self, launches: Sequence[Launch]) -> FakeList:
        return FakeList(launches, self.log)

    def release(self) -> None:
        self.log.append("free context")


class FakeView:
    """A view is its id here."""

    def __init__(self, view_id: int) -> None:
        self.id = view_id


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def context(log: Log) -> LoadedContext:
    fake: Any = FakeContext(log)
    return LoadedContext(fake, max_copies=2)


def copy(context: LoadedContext, kv: int) -> Kernel:
    return context.copy("mha", (kv, 0), b"", {7: kv})


def launch(kernel: Kernel, view: int = 0) -> Launch:
    argument: Any = FakeView(view)
    return kernel, (argument,)


def test_a_stream_is_loaded_once_and_a_copy_for_each_pair_of_words(
    context: LoadedContext, log: Log
) -> None:
    assert context.plain("up", b"") is context.plain("up", b"")
    assert copy(context, 3) is copy(context, 3)
    assert copy(context, 3) is not copy(context, 4)
    assert log == ["load up", "load mha", "patch mha[3]", "load mha", "patch mha[4]"]
    assert context.names() == ["mha", "up"]


def test_the_copy_used_longest_ago_is_freed_for_a_new_one(context: LoadedContext, log: Log) -> None:
    for kv in (3, 4, 3, 5):
        copy(context, kv)
    assert [entry for entry in log if "free" in entry] == ["free mha[4]"]


def test_a_copy_that_was_not_patched_is_not_kept(context: LoadedContext, log: Log) -> None:
    with pytest.raises(RunFailed):
        copy(context, 13)
    assert log == ["load mha", "free mha"]
    assert context.names() == []


def test_what_is_in_flight_lands_before_a_copy_is_freed(context: LoadedContext, log: Log) -> None:
    flight = context.submit([launch(copy(context, kv)) for kv in (3, 4)], as_list=True)
    copy(context, 5)
    assert flight.landed
    assert log[-5:] == [
        "end list of mha[3] mha[4]",
        "free list of mha[3] mha[4]",
        "free mha[3]",
        "load mha",
        "patch mha[5]",
    ]


def test_lists_are_kept_by_kernels_and_views(context: LoadedContext) -> None:
    up, down = context.plain("up", b""), context.plain("down", b"")
    for launches in (
        [launch(up), launch(down)],
        [launch(up), launch(down)],
        [launch(down), launch(up)],
        [launch(up), launch(down, view=1)],
    ):
        context.submit(launches, as_list=True).wait()
    assert len(context._lists) == 3


def test_a_list_still_busy_is_not_started_again(context: LoadedContext) -> None:
    launches = [launch(context.plain("up", b"")), launch(context.plain("down", b""))]
    context.submit(launches, as_list=True).wait()
    (first,) = context._lists.values()
    first.busy = True
    context.submit(launches, as_list=True).wait()
    (second,) = context._lists.values()
    assert first is not second


def test_the_list_used_longest_ago_lands_and_is_freed_for_a_new_one(
    context: LoadedContext, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "MAX_LISTS", 2)
    up = context.plain("up", b"")
    for views in ((0, 1), (2, 3), (0, 1), (4, 5)):
        del log[:]
        context.submit([launch(up, view) for view in views], as_list=True)
    assert log == ["end list of up up"] * 3 + ["free list of up up", "start list of up up"]
    assert len(context._lists) == 2
    assert {(first[1], second[1]) for first, second in context._lists} == {(0, 1), (4, 5)}


def test_all_lands_then_lists_go_then_kernels_then_the_context(
    context: LoadedContext, log: Log
) -> None:
    up = context.plain("up", b"")
    context.submit([launch(up), launch(copy(context, 3))], as_list=True)
    context.submit([launch(up)], as_list=False)
    del log[:]
    context.release()
    assert log == [
        "end list of up mha[3]",
        "end up",
        "free list of up mha[3]",
        "free up",
        "free mha[3]",
        "free context",
    ]


def test_unloading_a_stream_takes_its_copies_and_lists_and_nothing_else(
    context: LoadedContext, log: Log
) -> None:
    up = context.plain("up", b"")
    context.submit([launch(up), launch(copy(context, 3)), launch(copy(context, 4))], as_list=True)
    context.submit([launch(up), launch(up)], as_list=True)
    del log[:]
    assert context.unload("mha")
    assert log == [
        "end list of up mha[3] mha[4]",
        "end list of up up",
        "free list of up mha[3] mha[4]",
        "free mha[3]",
        "free mha[4]",
    ]
    assert context.names() == ["up"]
    assert not context.unload("mha")
    assert context.unload("up")
    assert not context._lists


def test_what_was_started_before_a_run_that_could_not_be_lands_at_the_next_settle(
    context: LoadedContext, log: Log
) -> None:
    up, bad = context.plain("up", b""), context.plain("bad", b"")
    with pytest.raises(RunFailed):
        context.submit([launch(up), launch(bad)], as_list=False)
    context.settle()
    assert log[-2:] == ["start up", "end up"]


def test_an_error_in_flight_is_kept_for_who_waits(context: LoadedContext) -> None:
    up = context.plain("up", b"")

    def failing(views: Sequence[Any]) -> Flight:
        def finish() -> None:
            raise RunFailed("up: failed")

        return Flight(finish)

    up.start = failing  # type: ignore[method-assign]
    flight = context.submit([launch(up)], as_list=False)
    context.release()
    with pytest.raises(RunFailed, match="up: failed"):
        flight.wait()
