"""The worker process: one engine, which embeds the orders it is sent until the pipe closes."""

from __future__ import annotations

import logging
import signal
import threading
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np

from .. import errors
from ..embedder import Embedder
from .messages import Ask, Done, Failed, Held, LogLine, Opening, Order, Ready, fingerprint

log = logging.getLogger("npu_embed")

Answer: TypeAlias = Ready | Done | Held | Failed
FIRST_TOKEN = 0  # an id every vocabulary has


class Pipe:
    """The worker's end of the pipe; the log's lines go through it between the answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Answer | LogLine) -> None:
        """Send a message whole, whichever thread it is of."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Order | Ask | None:
        """The next message; None to end, also where the server is gone."""
        try:
            message: Order | Ask | None = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message


class _Forward(logging.Handler):
    """Sends what is logged here to the server, whose log it belongs in."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._pipe.send(LogLine(record.name, record.levelno, record.getMessage()))
        except OSError:
            pass  # the server is gone, and this process soon will be
        except Exception:
            self.handleError(record)


def main(connection: Connection, opening: Opening) -> None:
    """Open the engine, say Ready or Failed, then answer every message until the pipe closes.

    Signals are the server's to act on: a Ctrl-C reaches both processes, and the orders in hand
    are to be finished.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Pipe(connection)
    logging.getLogger("npu_embed").addHandler(_Forward(pipe))
    try:
        _serve(pipe, opening)
    except OSError:
        return  # the pipe broke: nobody is left to tell


def _serve(pipe: Pipe, opening: Opening) -> None:
    opened = open_engine(opening)
    if isinstance(opened, Failed):
        pipe.send(opened)
        return
    with opened as embedder:
        pipe.send(_ready(embedder, opening))
        while (message := pipe.receive()) is not None:
            pipe.send(answer(embedder, message))


def open_engine(opening: Opening) -> Embedder | Failed:
    """The engine, run once: contexts are made and code compiled at no client's cost."""
    try:
        embedder = Embedder(opening.bundle, opening.device)
        try:
            embedder.embed_tokens([[FIRST_TOKEN]])
        except BaseException:
            embedder.close()
            raise
        return embedder
    except errors.NpuEmbedError as error:
        return Failed(type(error).__name__, str(error))
    except Exception as error:  # a file that cannot be read, a package that is missing or broken
        return Failed(type(error).__name__, f"{type(error).__name__}: {error}")


def _ready(embedder: Embedder, opening: Opening) -> Ready:
    return Ready(
        device=embedder.device,
        dim=embedder.dim,
        pack_rows=embedder.bundle.max_rows,
        contexts=embedder.contexts_held,
        fingerprint=fingerprint(opening.bundle),
    )


def answer(embedder: Embedder, message: Order | Ask) -> Done | Held | Failed:
    """The answer to a message.

    The engine itself tries what fails on the device once more. Where it fails again (DeviceBad), it
    is the server that puts another process in the place of this one.
    """
    if isinstance(message, Ask):
        return Held(embedder.contexts_held)
    ids = np.split(message.ids, np.cumsum(message.lengths)[:-1])
    try:
        vectors = embedder.embed_tokens(ids)
    except errors.NpuEmbedError as error:
        return Failed(type(error).__name__, str(error), embedder.contexts_held)
    except Exception as error:
        # A bug or no memory. The words could quote what they must not; the type is enough.
        log.exception("an order of %d texts failed: %s", len(ids), type(error).__name__)
        return Failed(type(error).__name__, f"{type(error).__name__} in the worker process")
    stats = embedder.last_stats
    return Done(vectors, stats, embedder.contexts_held, retried=stats.counters.rebuilds > 0)
