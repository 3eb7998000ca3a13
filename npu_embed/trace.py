"""Timing: wall time a stage, in the order the stages first ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from . import events


class Timing:
    """Seconds of wall time by stage name.

    Stages do not nest: each second belongs to one stage, so that their sum is the time spent.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time the block takes to stage `name`, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._span(name, start, time.perf_counter(), waits=False)

    def waited(self, name: str, begin: float, end: float) -> None:
        """Add the time from begin to end, of perf_counter, that went to submitting and waiting."""
        self._span(name, begin, end, waits=True)

    def _span(self, name: str, begin: float, end: float, *, waits: bool) -> None:
        self.add(name, end - begin)
        if events.listeners:
            events.note(events.StageEnded(name, begin, end, waits))

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to stage `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        """The seconds of all stages together."""
        return sum(self.seconds.values())
