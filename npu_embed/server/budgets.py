"""Budgets: how many bytes clients' bodies and answers may take in memory, all together.

A few slow clients must neither fill the memory of the machine nor keep others from being served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .refusals import RETRY_S, Refusal

SLOW_S = 5.0  # a body that takes longer makes room for others, where there is too little
NUMBER_BYTES = 16  # of an answer's number, at most: "-1.2345678e-38, "


@dataclass(slots=True, eq=False)
class Body:
    """A body on its way: size_bytes so far. given_up: done when it has to make room for others."""

    since: float
    given_up: asyncio.Future[None]
    size_bytes: int = 0
    whole: bool = False


@dataclass(slots=True)
class Bodies:
    """The bodies that are not tokenized yet, of at most most_bytes together."""

    most_bytes: int
    held_bytes: int = 0
    _all: list[Body] = field(default_factory=list)  # in the order in which they began

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    @contextmanager
    def one(self) -> Iterator[Body]:
        """A body that is held as long as the block lasts."""
        body = Body(time.monotonic(), asyncio.get_running_loop().create_future())
        self._all.append(body)
        try:
            yield body
        finally:
            self._drop(body)

    def add(self, body: Body, part_bytes: int) -> None:
        """Count a part of a body.

        Raises:
            Refusal: there is no room for it, and no slow body that could make some.
        """
        if body.given_up.done():  # and its reading not ended yet
            return
        while self.held_bytes + part_bytes > self.most_bytes:
            slow = next((one for one in self._all if one is not body and _is_slow(one)), None)
            if slow is None:
                raise Refusal(
                    429,
                    "bodies_full",
                    f"bodies: {self.most_bytes} bytes of those that wait, the most this server "
                    "holds; ask again later.",
                    retry_after_s=RETRY_S,
                )
            self._drop(slow)
            slow.given_up.set_result(None)
        body.size_bytes += part_bytes
        self.held_bytes += part_bytes

    def _drop(self, body: Body) -> None:
        if body in self._all:
            self._all.remove(body)
            self.held_bytes -= body.size_bytes


def _is_slow(body: Body) -> bool:
    return not body.whole and time.monotonic() - body.since > SLOW_S


@dataclass(slots=True)
class Answers:
    """The answers that are awaited or not yet taken, of at most most_bytes together.

    unsent_bytes: what the connections hold of answers that were given to them.
    """

    most_bytes: int
    unsent_bytes: Callable[[], int] = lambda: 0
    reserved_bytes: int = 0

    def reserve(self, texts: int, dim: int) -> Reserved:
        """Room for an answer of so many vectors; one alone may have any size.

        Raises:
            Refusal: there is none.
        """
        wanted = texts * dim * NUMBER_BYTES
        held = self.reserved_bytes + self.unsent_bytes()
        if held and held + wanted > self.most_bytes:
            raise Refusal(
                429,
                "answers_full",
                f"answers: {held} bytes of those that clients have yet to take, and this one could "
                f"have {wanted}; this server holds {self.most_bytes}. Ask again later.",
                retry_after_s=RETRY_S,
            )
        self.reserved_bytes += wanted
        return Reserved(self, wanted)


@dataclass(slots=True)
class Reserved:
    """Room that an answer has."""

    _answers: Answers
    _bytes: int

    def resize(self, answer_bytes: int) -> None:
        """Keep as much as the answer has turned out to need."""
        self._answers.reserved_bytes += answer_bytes - self._bytes
        self._bytes = answer_bytes

    def release(self) -> None:
        """Give it back; a second time changes nothing."""
        self.resize(0)
