"""The server's end of the pipe: a worker that stands still is not waited for for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from npu_embed.driver import Xrt as Anything
from npu_embed.server import link
from npu_embed.server.link import Link, WorkerDied, WorkerStuck, _bound_waits
from npu_embed.server.messages import Held, LogLine, Opening, Order
from npu_embed.server.refusals import of_engine

ORDER = Order(np.zeros(3, dtype=np.int32), (3,))
HUGE = Order(np.zeros(1 << 20, dtype=np.int32), (1 << 20,))  # more than a pipe holds
MOST_S = 0.05


class Process:
    """A worker process that is not there. ends: whether SIGKILL ends it."""

    def __init__(self, *, ends: bool = True) -> None:
        self.pid, self.exitcode, self.killed = 7, -9, False
        self._ends = ends

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None  # a driver call that does not return would never let it end

    def is_alive(self) -> bool:
        return not (self.killed and self._ends)


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[tuple[Link, Connection]]:
    """A link and the worker's end of its pipe."""
    ours, theirs = Pipe()
    _bound_waits(ours, MOST_S)
    one = Link(Opening(tmp_path, None), MOST_S)
    process: Anything = Process()
    one._process, one._pipe = process, ours
    yield one, theirs
    one.stop()
    theirs.close()


def test_an_answer_that_does_not_come_is_not_waited_for(linked: tuple[Link, Connection]) -> None:
    for call in (lambda: linked[0].embed(ORDER), linked[0].contexts):
        with pytest.raises(WorkerStuck, match=r"no answer for 0\.05 s, the most that it is"):
            call()


def test_an_answer_that_comes_by_half_is_not_waited_for(linked: tuple[Link, Connection]) -> None:
    one, theirs = linked
    with open(theirs.fileno(), "wb", closefd=False) as raw:
        raw.write(b"\x00\x00\x00\x09abc")  # a message of nine bytes
    with pytest.raises(WorkerStuck):
        one.contexts()


def test_an_order_that_is_not_taken_is_not_waited_for(linked: tuple[Link, Connection]) -> None:
    with pytest.raises(WorkerStuck):
        linked[0].embed(HUGE)


def test_a_worker_that_only_talks_is_not_waited_for(linked: tuple[Link, Connection]) -> None:
    one, theirs = linked
    ended = threading.Event()

    def talk() -> None:
        while not ended.wait(MOST_S / 10):
            theirs.send(LogLine("npu_embed.talk", logging.DEBUG, "and on"))

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        with pytest.raises(WorkerStuck):
            one.contexts()
    finally:
        ended.set()
        talking.join()


def test_an_answer_in_time_is_taken(linked: tuple[Link, Connection]) -> None:
    one, theirs = linked
    theirs.send(Held(2))
    assert one.contexts() == 2


def test_a_worker_that_even_sigkill_does_not_end_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Pipe()
    one = Link(Opening(tmp_path, None))
    process: Anything = Process(ends=False)
    one._process, one._pipe = process, ours
    one._end(patience_s=0.0)
    theirs.close()
    assert process.killed
    assert "waits in the driver" in caplog.text


def test_a_client_is_told_that_the_worker_was_stuck() -> None:
    refusal = of_engine(link._stuck(600.0))
    assert (refusal.status, refusal.cause) == (503, "worker_stuck")
    assert refusal.retry_after_s is not None
    assert "no answer for 600 s" in refusal.message
    assert of_engine(WorkerDied("gone")).cause == "worker_died"
