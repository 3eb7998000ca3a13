"""Timing: wall time a stage, in the order the stages first ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to stage `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        """The seconds of all stages together."""
        return sum(self.seconds.values())
