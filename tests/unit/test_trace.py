"""Stages' wall times."""

from __future__ import annotations

import time

import pytest
from heard import Heard

from npu_embed import events
from npu_embed.trace import Timing

A_WHILE = 0.002


def test_a_stage_is_as_long_as_its_block() -> None:
    timing = Timing()
    start = time.perf_counter()
    with timing.stage("sleep"):
        time.sleep(A_WHILE)
    assert A_WHILE * 0.9 <= timing.seconds["sleep"] <= time.perf_counter() - start


def test_a_stage_entered_again_grows_and_keeps_its_place() -> None:
    timing = Timing()
    for name in ("one", "two", "one"):
        with timing.stage(name):
            pass
    first = timing.seconds["one"]
    timing.add("one", 1.0)
    assert timing.seconds["one"] == first + 1.0
    assert list(timing.seconds) == ["one", "two"]


def test_the_total_is_the_sum_of_the_stages() -> None:
    timing = Timing()
    assert timing.total() == 0
    timing.add("a", 1.5)
    timing.add("b", 0.25)
    assert timing.total() == 1.75


def test_a_stage_that_raises_is_counted_too() -> None:
    timing = Timing()
    with pytest.raises(KeyError), timing.stage("broken"):
        raise KeyError("x")
    assert timing.seconds["broken"] > 0


def test_who_listens_is_told_of_stages_and_of_waiting() -> None:
    timing, heard = Timing(), Heard()
    with events.listening(heard):
        with pytest.raises(KeyError), timing.stage("host"):
            raise KeyError("x")
        timing.waited("gemm", 1.0, 1.5)
    with timing.stage("after"):
        pass
    first, second = heard.events
    assert isinstance(first, events.StageEnded)
    assert (first.stage, first.waits) == ("host", False)
    assert first.end - first.begin == timing.seconds["host"]
    assert second == events.StageEnded("gemm", 1.0, 1.5, waits=True)
    assert timing.seconds["gemm"] == 0.5


def test_what_is_added_from_another_timing_is_no_stage_anew() -> None:
    heard = Heard()
    with events.listening(heard):
        Timing().add("gemm", 1.0)
    assert heard.events == []


def test_listeners_come_and_go_in_any_order() -> None:
    one, two = Heard(), Heard()
    before = events.listeners
    with events.listening(one):
        events.add(two)
    assert events.listeners == (*before, two)
    events.remove(two)
    events.remove(two)
    assert events.listeners == before
