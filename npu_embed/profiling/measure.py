"""Texts embedded a pack at a time, with everything that happens noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from .. import events
from ..embedder import Embedder
from ..errors import InputError
from ..packing import make_packs
from .table import KernelLine, StageLine, kernel_lines, stage_lines

Advance = Callable[[int], None]


class _Notes:
    """A listener that keeps all events."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def note(self, event: events.Event) -> None:
        """Keep it."""
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class Profile:
    """What embedding some texts took: the events of it, and wall seconds in all."""

    bundle: str
    device: str
    texts: int
    tokens: int
    packs: int
    seconds: float
    events: tuple[events.Event, ...]

    @property
    def kernels(self) -> list[KernelLine]:
        """A line a kernel."""
        return kernel_lines(self.events)

    @property
    def stages(self) -> list[StageLine]:
        """A line a stage."""
        return stage_lines(self.events)


def profile(embedder: Embedder, texts: Sequence[str], advance: Advance) -> Profile:
    """Embed the texts with nothing in the way of a run's time.

    A pack at a time, so that the host does nothing else while it waits; embed runs two in step.
    The first pack is embedded once before that: it makes contexts and compiles. advance is
    called with the texts that are done.

    Raises:
        InputError: no texts, or one that cannot be used.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    calls = packed_texts(embedder, texts)
    embedder.embed(calls[0])
    notes, done, tokens = _Notes(), 0, 0
    with events.listening(notes):
        start = perf_counter()
        for call in calls:
            embedder.embed(call)
            done += len(call)
            tokens += embedder.last_stats.tokens
            advance(done)
        seconds = perf_counter() - start
    return Profile(
        embedder.bundle.name,
        embedder.device,
        len(texts),
        tokens,
        len(calls),
        seconds,
        tuple(notes.events),
    )


def packed_texts(embedder: Embedder, texts: Sequence[str]) -> list[list[str]]:
    """The texts of each pack that embed would make of them.

    Raises:
        InputError: there are none, or one that cannot be used.
    """
    if not texts:
        raise InputError("profile: no texts, wanted at least one.")
    lengths = [len(ids) for ids in embedder.tokenize(list(texts))]
    packs = make_packs(lengths, embedder.max_rows)
    return [[texts[i] for i in pack.indices] for pack in packs]
