"""A listener for tests, and settings of listeners that end with the test."""

from __future__ import annotations

from typing import TypeVar

from npu_embed import events

E = TypeVar("E")


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def note(self, event: events.Event) -> None:
        """Keep it."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
