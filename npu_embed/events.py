"""Events: what the engine did and when, for whoever listens; the one seam of logs and traces.

Where nobody listens nothing is made: each place asks `if events.listeners` first. Times are
seconds of time.perf_counter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle's model is on a device. device: "npu" or "emulated"."""

    bundle: str
    family: str
    device: str
    device_name: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """A stage of the host's time, on the thread that tells of it.

    waits: it was spent submitting to the device and waiting for it.
    """

    stage: str
    begin: float
    end: float
    waits: bool


@dataclass(frozen=True, slots=True)
class ContextMade:
    """A hardware context was created. context: its xclbin's file name."""

    context: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class ContextDropped:
    """A context was released. why: "swap" (for another of ours), "turn" (others') or "release"."""

    context: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class StreamLoaded:
    """An instruction stream was made ready to run in a context."""

    kernel: str
    context: str
    stream: bytes
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class WordsPatched:
    """Words of a loaded stream were written: index -> value."""

    kernel: str
    context: str
    words: Mapping[int, int]
    at: float


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A kernel execution: real rows, and those the array computed."""

    kernel: str
    rows: int
    padded_rows: int


@dataclass(frozen=True, slots=True)
class RunsEnded:
    """A run has ended, or a list of runs, which only as a whole has a beginning and an end.

    begin: of the submit, or the end of what ran in this context before; end: when the host knew of
    it, which is late where it worked on something else meanwhile. switched, swapped: the submit was
    in another context than the one before; a context was dropped for it.
    """

    context: str
    runs: tuple[RunSeen, ...]
    begin: float
    end: float
    listed: bool
    switched: bool
    swapped: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class PackSeen:
    """A pack: its texts' indices in the call, and the tokens of each."""

    texts: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PacksEnded:
    """Packs that ran in step have their vectors, or failed."""

    packs: tuple[PackSeen, ...]
    begin: float
    end: float


Event: TypeAlias = (
    Opened
    | StageEnded
    | ContextMade
    | ContextDropped
    | StreamLoaded
    | WordsPatched
    | RunsEnded
    | PacksEnded
)


class Listener(Protocol):
    """Somebody who is told of every event of the process, on the thread it happened on."""

    def note(self, event: Event) -> None:
        """Take note of an event; must not raise."""
        ...


listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


def note(event: Event) -> None:
    """Tell every listener."""
    for listener in listeners:
        listener.note(event)


def add(listener: Listener) -> None:
    """Tell a listener of every event from now on."""
    global listeners
    with _changing:
        listeners = (*listeners, listener)


def remove(listener: Listener) -> None:
    """Tell it no more."""
    global listeners
    with _changing:
        listeners = tuple(one for one in listeners if one is not listener)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of every event of the block."""
    add(listener)
    try:
        yield
    finally:
        remove(listener)
