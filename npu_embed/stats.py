"""Stats: what an Embedder did, in total or in one call; the contract of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .driver import Counters
from .trace import Timing


@dataclass(frozen=True, slots=True)
class Stats:
    """What an Embedder did since it was opened, or in its last call.

    tokens: computed, special tokens included. truncated: texts cut. packs: forwards of
    texts. counters: runs, runlists, switches, swaps, loads, patches, syncs, bytes_to_device and
    bytes_from_device (in total, what opening the bundle took is included). seconds: wall time a
    stage.
    """

    texts: int
    tokens: int
    truncated: int
    packs: int
    images: int
    counters: Counters
    seconds: dict[str, float]

    def __getattr__(self, name: str) -> int:
        """A counter by its name: stats.swaps is stats.counters.swaps."""
        if name in Counters.__slots__:
            value: int = getattr(self.counters, name)
            return value
        raise AttributeError(f"Stats has no {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """All of it, flat, as JSON wants it."""
        flat: dict[str, Any] = {
            "texts": self.texts,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "packs": self.packs,
            "images": self.images,
        }
        flat.update({name: getattr(self.counters, name) for name in Counters.__slots__})
        flat["seconds"] = {stage: round(s, 6) for stage, s in self.seconds.items()}
        return flat


@dataclass(slots=True)
class Tally:
    """Stats in the making."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    packs: int = 0
    images: int = 0
    counters: Counters = field(default_factory=Counters)
    timing: Timing = field(default_factory=Timing)

    def add(self, other: Tally) -> None:
        """Count what another tally counted, its device counters left aside."""
        self.texts += other.texts
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.packs += other.packs
        self.images += other.images
        for stage, seconds in other.timing.seconds.items():
            self.timing.add(stage, seconds)

    def stats(self, counters: Counters) -> Stats:
        """The stats of now, with these device counters."""
        return Stats(
            self.texts,
            self.tokens,
            self.truncated,
            self.packs,
            self.images,
            counters.copy(),
            dict(self.timing.seconds),
        )
