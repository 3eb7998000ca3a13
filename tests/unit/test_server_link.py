"""The server's end of the pipe: a worker that stands still is not waited for for ever."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
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


def link_to(process: Anything, folder: Path, order_s: float) -> tuple[Link, Connection, Connection]:
    """A link to such a process, its end of the pipe, and the worker's."""
    ours, theirs = Pipe()
    _bound_waits(ours, order_s)
    one = Link(Opening(folder, None), order_s)
    one._process, one._pipe = process, ours
    return one, ours, theirs


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, Connection]]:
    """A link that has no patience at its end, and the worker's end of its pipe."""
    monkeypatch.setattr(link, "STOP_S", MOST_S)
    one, _, theirs = link_to(Process(), tmp_path, MOST_S)
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


def test_a_stop_does_not_wait_for_an_order_that_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "STOP_S", MOST_S)
    ended: list[str] = []

    def send() -> None:
        with pytest.raises(WorkerDied) as info:
            one.embed(HUGE)
        ended.append(type(info.value).__name__)

    class Killed(Process):
        def kill(self) -> None:
            theirs.close()
            super().kill()

    one, ours, theirs = link_to(Killed(), tmp_path, 3.0)
    sending = threading.Thread(target=send)
    sending.start()
    while not one._sending.locked():
        time.sleep(0.001)
    one.stop()
    sending.join()
    assert ended == ["WorkerDied"], "the order was given up before the worker was killed"
    assert ours.closed


def test_a_stop_does_not_wait_for_room_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "STOP_S", MOST_S)
    order_s, process = 3.0, Process()
    one, ours, theirs = link_to(process, tmp_path, order_s)
    with socket.socket(fileno=os.dup(ours.fileno())) as same, suppress(BlockingIOError):
        while True:
            same.send(bytes(1 << 16), socket.MSG_DONTWAIT)
    begun = time.monotonic()
    one.stop()
    theirs.close()
    assert process.killed
    assert time.monotonic() - begun < order_s / 2


def test_a_pipe_that_is_still_written_to_stays_open(
    linked: tuple[Link, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its number may be another file's by the time of the next write."""
    monkeypatch.setattr(link, "KILL_S", MOST_S)
    one, pipe = linked[0], linked[0]._pipe
    assert pipe is not None
    ending = threading.Thread(target=one._end, args=(0.0,))
    with one._sending:
        ending.start()
        ending.join(100 * MOST_S)
        assert not ending.is_alive()
        assert not pipe.closed
    one._end(patience_s=0.0)
    assert pipe.closed


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
