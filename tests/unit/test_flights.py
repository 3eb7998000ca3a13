"""Flights: waited for once, their failures told to everybody who waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu_embed.errors import RunFailed
from npu_embed.flights import Flight, together


def landing(log: list[str], name: str, error: BaseException | None = None) -> Flight:
    """A flight that notes when it is waited for, and then fails if it must."""

    def finish() -> None:
        log.append(name)
        if error is not None:
            raise error

    return Flight(finish)


def test_the_end_is_waited_for_once() -> None:
    log: list[str] = []
    flight = landing(log, "a")
    assert not flight.landed
    for call in (flight.wait, flight.wait, flight.settle):
        call()
        assert flight.landed
    assert log == ["a"]


@pytest.mark.parametrize("first", [Flight.wait, Flight.settle])
def test_a_failure_is_told_at_every_wait(first: Callable[[Flight], None]) -> None:
    log: list[str] = []
    error = RunFailed("a: failed")
    flight = landing(log, "a", error)
    if first is Flight.settle:
        flight.settle()
    for _ in range(2):
        with pytest.raises(RunFailed) as caught:
            flight.wait()
        assert caught.value is error
    assert log == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_after_an_interrupted_wait_nobody_takes_the_results(error: BaseException) -> None:
    flight = landing([], "a", error)
    with pytest.raises(type(error)):
        flight.settle()
    assert flight.landed
    flight.settle()
    with pytest.raises(RunFailed, match=rf"the wait was interrupted \({type(error).__name__}\)"):
        flight.wait()


def test_several_end_when_all_have_and_fail_with_the_first_failure() -> None:
    log: list[str] = []
    flights = [
        landing(log, "a"),
        landing(log, "b", RunFailed("b")),
        landing(log, "c", RunFailed("c")),
        landing(log, "d"),
    ]
    whole = together(flights)
    assert not log
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"^b$"):
            whole.wait()
    assert log == ["a", "b", "c", "d"]
    assert all(flight.landed for flight in flights)


def test_one_is_itself_and_none_has_landed_well() -> None:
    flight = landing([], "a")
    assert together([flight]) is flight
    together([]).wait()
