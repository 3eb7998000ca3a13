"""Which hardware context to drop when another one needs its slot.

A policy is told of every use, and names the contexts to give up, one attempt at a time: creation is
tried again after each. `next-use` drops the context that is needed latest, which no policy can beat
(Belady, 1966); it can look ahead because a model's forward needs its contexts in an order that is
known before it begins. Where the order is not known, it falls back to the least recently used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Place = TypeVar("Place", bound=Hashable)


class Eviction(Protocol[Place]):
    """A policy; `Place` is whatever names a context."""

    def plan(self, sequence: Sequence[Place]) -> None:
        """A forward begins that needs contexts in this order, and then, it is assumed, again."""
        ...

    def used(self, place: Place) -> None:
        """A run in this context comes next."""
        ...

    def victims(self, resident: Sequence[Place]) -> list[Place]:
        """The contexts to drop before trying again, at least one of `resident` (oldest first)."""
        ...


class DropAll(Generic[Place]):
    """Drops every context at once, as the reference runtime does."""

    def plan(self, sequence: Sequence[Place]) -> None:
        """Nothing to learn from it."""

    def used(self, place: Place) -> None:
        """Nothing to learn from it."""

    def victims(self, resident: Sequence[Place]) -> list[Place]:
        """All of them."""
        return list(resident)


class LeastRecentlyUsed(Generic[Place]):
    """Drops the context whose last run is longest ago."""

    def __init__(self) -> None:
        self._clock = 0
        self._last_use: dict[Place, int] = {}

    def plan(self, sequence: Sequence[Place]) -> None:
        """Nothing to learn from it."""

    def used(self, place: Place) -> None:
        """Note the time of use."""
        self._clock += 1
        self._last_use[place] = self._clock

    def victims(self, resident: Sequence[Place]) -> list[Place]:
        """The one used longest ago."""
        return [min(resident, key=lambda place: self._last_use.get(place, 0))]


class NextUse(Generic[Place]):
    """Drops the context that is needed latest, of those needed never the least recently used."""

    def __init__(self) -> None:
        self._recent: LeastRecentlyUsed[Place] = LeastRecentlyUsed()
        self._sequence: list[Place] = []
        self._at: int | None = None  # position of the last use in the sequence; None = off the plan

    def plan(self, sequence: Sequence[Place]) -> None:
        """Note the order; uses of one context in a row count as one."""
        self._sequence = [p for i, p in enumerate(sequence) if i == 0 or p != sequence[i - 1]]
        self._at = -1 if self._sequence else None

    def used(self, place: Place) -> None:
        """Move to this use in the plan, or off it where the plan does not have it next."""
        self._recent.used(place)
        if self._at is None:
            return
        count = len(self._sequence)
        if self._at >= 0 and self._sequence[self._at] == place:
            return
        following = (self._at + 1) % count
        self._at = following if self._sequence[following] == place else None

    def victims(self, resident: Sequence[Place]) -> list[Place]:
        """The one whose next use is furthest away."""
        if self._at is None:
            return self._recent.victims(resident)
        count, at = len(self._sequence), self._at
        distance: dict[Place, int] = {}
        for step in range(1, count + 1):
            distance.setdefault(self._sequence[(at + step) % count], step)
        furthest = max(distance.get(place, count + 1) for place in resident)
        return self._recent.victims(
            [place for place in resident if distance.get(place, count + 1) == furthest]
        )


POLICIES: dict[str, Callable[[], Eviction[Any]]] = {
    "all": DropAll,
    "lru": LeastRecentlyUsed,
    "next-use": NextUse,
}
DEFAULT_POLICY = "next-use"


def count_swaps(sequence: Sequence[Place], slots: int, policy: Eviction[Place]) -> int:
    """How many contexts a policy drops to run `sequence` on a device with `slots` free slots.

    The policy knows the sequence as a plan. It begins with nothing loaded.
    """
    policy.plan(sequence)
    resident: list[Place] = []
    swaps = 0
    for place in sequence:
        policy.used(place)
        if place in resident:
            continue
        while len(resident) >= slots:
            for victim in policy.victims(resident):
                resident.remove(victim)
                swaps += 1
        resident.append(place)
    return swaps


def fewest_swaps(sequence: Sequence[Place], slots: int) -> int:
    """The fewest contexts any policy can drop to run `sequence`: the offline optimum.

    Source: Belady's optimal replacement, computed from the positions of all uses.
    """
    uses: dict[Place, list[int]] = {}
    for position in range(len(sequence) - 1, -1, -1):
        uses.setdefault(sequence[position], []).append(position)
    never = len(sequence)
    resident: set[Place] = set()
    swaps = 0
    for place in sequence:
        uses[place].pop()
        if place in resident:
            continue
        if len(resident) >= slots:
            resident.remove(max(resident, key=lambda p: uses[p][-1] if uses[p] else never))
            swaps += 1
        resident.add(place)
    return swaps
