"""Watch: starts runs as LoadedContext.submit does, and tells who listens when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from . import events
from .flights import Flight, together
from .loaded import LoadedContext
from .runlists import Launch
from .runs import Run, Step
from .specs import GemmSpec


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a submit came to its context: switched from another, swapped with a dropped one."""

    context: str
    switched: bool
    swapped: bool


class Watch:
    """The watched submits of one device."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}  # when the last run of a context had

    def submit(
        self,
        loaded: LoadedContext,
        launches: Sequence[Launch],
        runs: Sequence[events.RunSeen],
        arrival: Arrival,
        *,
        as_list: bool,
    ) -> Flight:
        """Start runs in this order, as one runlist or one by one, each with an end of its own."""
        if as_list:
            return self._start(loaded, launches, tuple(runs), arrival, as_list=True)
        flights = []
        for launch, run in zip(launches, runs, strict=True):
            flights.append(self._start(loaded, [launch], (run,), arrival, as_list=False))
            arrival = replace(arrival, switched=False, swapped=False)
        return together(flights)

    def _start(
        self,
        loaded: LoadedContext,
        launches: Sequence[Launch],
        runs: tuple[events.RunSeen, ...],
        arrival: Arrival,
        *,
        as_list: bool,
    ) -> Flight:
        submitted = perf_counter()

        def ended(*, failed: bool) -> None:
            end = perf_counter()
            # A context executes in order: what waited for the run before did not run meanwhile.
            begin = max(submitted, self._ended.get(arrival.context, 0.0))
            self._ended[arrival.context] = end
            events.note(
                events.RunsEnded(
                    arrival.context,
                    runs,
                    begin,
                    end,
                    as_list,
                    arrival.switched,
                    arrival.swapped,
                    failed,
                )
            )

        try:
            flight = loaded.submit(launches, as_list=as_list)
        except BaseException:
            ended(failed=True)
            raise

        def finish() -> None:
            failed = True
            try:
                flight.wait()
                failed = False
            finally:
                ended(failed=failed)

        return Flight(finish)


def seen(run: Run, step: Step) -> events.RunSeen:
    """A run as events tell of it."""
    spec = step.spec
    computed = spec.stream_of(step.file).rows if isinstance(spec, GemmSpec) else spec.rows
    return events.RunSeen(step.name, run.rows, computed)
