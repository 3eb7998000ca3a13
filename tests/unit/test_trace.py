"""Stages' wall times."""

from __future__ import annotations

import time

import pytest

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
