"""Forwards of several packs in step: they share context switches, and the host works meanwhile.

A forward is a generator of stretches, runs of one context without a host step between them. All
packs of a group are at the same place of the same model, so each context is switched to once a
stretch, not once a stretch and pack; and while the device runs one pack's stretch, the host does
what follows another's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TypeAlias

from .bf16 import F32
from .flights import Flight
from .npu import Npu
from .runs import Run
from .trace import Timing


@dataclass(frozen=True, slots=True)
class Stretch:
    """Runs of one context in order; stage is what their time is counted as."""

    stage: str
    runs: Sequence[Run]


Steps: TypeAlias = Generator[Stretch, None, F32]

SLOTS = 2  # packs in flight: one on the device, one on the host


def stretches(npu: Npu, stage: str, runs: Sequence[Run]) -> Iterator[Stretch]:
    """Consecutive runs as stretches: one, or as many as they need contexts in turn."""
    for _, group in groupby(runs, key=npu.context_of):
        yield Stretch(stage, list(group))


def run_together(npu: Npu, forwards: Sequence[Steps], timing: Timing) -> list[F32]:
    """The results of forwards of one model, run in step.

    Raises:
        NoFreeContext, RunFailed, DeviceError: from the device; every forward is given up then.
    """
    results: dict[int, F32] = {}
    flights: dict[int, tuple[str, Flight]] = {}
    try:
        for i, forward in enumerate(forwards):
            _advance(npu, i, forward, flights, results, timing)
        while flights:
            for i in list(flights):
                stage, flight = flights.pop(i)
                start = perf_counter()
                try:
                    flight.wait()
                finally:
                    timing.waited(stage, start, perf_counter())
                _advance(npu, i, forwards[i], flights, results, timing)
    finally:
        # After an error nothing of this group may be in flight when its buffers are used again.
        for _, flight in flights.values():
            flight.settle()
        for forward in forwards:
            forward.close()
    return [results[i] for i in range(len(forwards))]


def _advance(
    npu: Npu,
    i: int,
    forward: Steps,
    flights: dict[int, tuple[str, Flight]],
    results: dict[int, F32],
    timing: Timing,
) -> None:
    """Do forward i's host steps up to its next stretch, and submit that; or note its result."""
    try:
        stretch = next(forward)
    except StopIteration as end:
        results[i] = end.value
        return
    start = perf_counter()
    try:
        flights[i] = (stretch.stage, npu.submit(stretch.runs))
    finally:
        timing.waited(stretch.stage, start, perf_counter())
