"""Who waits for vectors, and which texts run next.

An *order* is what the worker is sent at once: texts of any number of jobs, as many as surely fit
the packs that are run in step. Jobs are served first come, first served, a pack's worth of tokens
at a time: a job larger than that goes to the back of the line with what is left of it, so that
small ones need not wait for its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..bf16 import F32


@dataclass(slots=True, eq=False)
class Job:
    """The texts of one request: token ids in, float32 [texts, dim] out.

    queued and started are times of the loop's clock, started None while none of it has run.
    """

    ids: Sequence[NDArray[np.int32]]
    vectors: F32
    finished: asyncio.Future[F32]
    queued: float
    started: float | None = None
    ordered: int = 0  # texts that are in an order or through
    through: int = 0
    tokens: int = field(init=False)  # of the texts that are in no order yet

    def __post_init__(self) -> None:
        self.tokens = sum(len(ids) for ids in self.ids)

    @property
    def texts(self) -> int:
        """How many texts are in no order yet."""
        return len(self.ids) - self.ordered

    def cancel(self) -> None:
        """Nobody wants the vectors any more; what waits is dropped at the next order."""
        self.finished.cancel()

    def deliver(self, first: int, vectors: F32) -> None:
        """Note the vectors of the texts from `first` on."""
        self.vectors[first : first + len(vectors)] = vectors
        self.through += len(vectors)
        if self.through == len(self.ids) and not self.finished.done():
            self.finished.set_result(self.vectors)

    def fail(self, error: Exception) -> None:
        """Give the job up, whatever else of it may be on its way."""
        if not self.finished.done():
            self.finished.set_exception(error)


@dataclass(frozen=True, slots=True)
class Portion:
    """The texts `first` to `last` (exclusive) of a job, in an order."""

    job: Job
    first: int
    last: int

    @property
    def ids(self) -> Sequence[NDArray[np.int32]]:
        """Their token ids."""
        return self.job.ids[self.first : self.last]


@dataclass(slots=True)
class _Room:
    """What is left of an order's packs.

    A pack is closed when the next text does not fit, which leaves fewer rows empty than that text
    has: as much is kept free for every pack but the last, whichever way the texts are sorted.
    """

    packs: int
    pack_rows: int
    tokens: int = 0
    longest: int = 0

    def take(self, tokens: int) -> bool:
        """Take room for a text, if there is."""
        longest = max(self.longest, tokens)
        kept_free = (self.packs - 1) * (longest - 1)
        if self.tokens + tokens + kept_free > self.packs * self.pack_rows:
            return False
        self.tokens, self.longest = self.tokens + tokens, longest
        return True


@dataclass(slots=True)
class Queue:
    """Jobs in line, for orders of `packs` packs of pack_rows tokens."""

    packs: int
    pack_rows: int
    dropped: int = 0  # texts whose clients have gone
    _jobs: deque[Job] = field(default_factory=deque)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def texts(self) -> int:
        """How many texts wait."""
        return sum(job.texts for job in self._jobs if not job.finished.done())

    @property
    def tokens(self) -> int:
        """How many tokens those texts have."""
        return sum(job.tokens for job in self._jobs if not job.finished.done())

    def put(self, job: Job) -> None:
        """Let a job stand in line."""
        self._jobs.append(job)
        self._changed.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether somebody is in line, at once or before the time is up."""
        if not self._jobs:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except asyncio.TimeoutError:
                return False
        return True

    async def fill(self, linger_s: float) -> None:
        """Wait for others to share the next order: until it is full, or the first has waited.

        A job that waited while the device worked has waited; so has one with texts in an order.
        """
        if not self._jobs or self._jobs[0].ordered:
            return
        loop = asyncio.get_running_loop()
        deadline = self._jobs[0].queued + linger_s
        whole = self.packs * self.pack_rows
        while (left_s := deadline - loop.time()) > 0 and self.tokens < whole:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except asyncio.TimeoutError:
                return

    def take(self) -> list[Portion]:
        """The next order; what it holds of a job is no longer in line."""
        portions: list[Portion] = []
        room = _Room(self.packs, self.pack_rows)
        while self._jobs:
            job = self._jobs.popleft()
            if job.finished.done():  # failed, or its client has gone
                self.dropped += job.texts if job.finished.cancelled() else 0
                continue
            portion, full = self._portion(job, room)
            if portion.ids:
                portions.append(portion)
            if full:  # it is the first of the next order
                self._jobs.appendleft(job)
                break
            if job.texts:
                self._jobs.append(job)
        return portions

    def _portion(self, job: Job, room: _Room) -> tuple[Portion, bool]:
        """A job's next texts, up to a pack of them, and whether there was no room for the next."""
        first, used, full = job.ordered, 0, False
        while job.texts and (tokens := len(job.ids[job.ordered])) + used <= self.pack_rows:
            if not room.take(tokens):
                full = True
                break
            used += tokens
            job.ordered += 1
            job.tokens -= tokens
        return Portion(job, first, job.ordered), full

    def fail(self, error: Exception) -> None:
        """Give up every job in line."""
        while self._jobs:
            self._jobs.popleft().fail(error)
