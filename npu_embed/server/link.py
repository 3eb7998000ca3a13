"""Link: the server's end of the pipe to its worker process; calls block, so threads make them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from .. import errors
from .messages import Ask, Done, Failed, Held, LogLine, Opening, Order, Ready
from .worker import main

STOP_S = 10.0  # what a worker may take to finish an order that nobody waits for
REAP_S = 1.0  # from the end of its pipe to the end of its process
PROCESS_NAME = "npu-embed-worker"

Reply = TypeVar("Reply", Ready, Done, Held)


class WorkerDied(errors.DeviceError):
    """The worker process ended where an answer was awaited."""


class WorkerFailed(errors.NpuEmbedError):
    """The worker process could not do what it was asked, for a reason that is no caller's."""


class Link:
    """A worker process and the pipe to it. One thread at a time may use it; stop() by any."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._sending = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker runs; not to be asked while it is called."""
        return self._process is not None and self._process.is_alive()

    def start(self) -> Ready:
        """Start the worker, in the place of one that may be left, and wait until it is ready.

        Raises:
            NpuEmbedError: the engine could not be opened, as Embedder says it.
            WorkerFailed: this machine has no room for another process.
            WorkerDied: the process ended instead, or stop() was called.
        """
        self._end(patience_s=0.0)
        # Spawned, not forked: a device does not survive a fork, and threads run here.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=main, args=(theirs, self._opening), name=PROCESS_NAME, daemon=True
        )
        with self._sending:
            if self._stopped:
                raise WorkerDied("the worker process was stopped, wanted it to start.")
            try:
                process.start()
            except OSError as error:
                raise WorkerFailed(
                    f"the worker process: {error.strerror or error}, wanted to start it; end other "
                    "programs, or raise this machine's limits."
                ) from error
            self._process, self._pipe = process, ours
        theirs.close()  # a copy here would keep the pipe open when the process ends
        return self._receive(Ready)

    def embed(self, order: Order) -> Done:
        """What the worker made of an order.

        Raises:
            NpuEmbedError: as Embedder.embed_tokens; WorkerFailed for anything unforeseen.
            WorkerDied: the process ended.
        """
        self._send(order)
        return self._receive(Done)

    def contexts(self) -> int:
        """How many hardware contexts the worker holds; raises as embed."""
        self._send(Ask())
        return self._receive(Held).contexts

    def stop(self) -> None:
        """End the worker; it finishes what it has in hand, for a while."""
        self._stopped = True
        self._end(patience_s=STOP_S)

    def _end(self, patience_s: float) -> None:
        with self._sending:
            process, pipe = self._process, self._pipe
            if process is None or pipe is None:
                return
            if patience_s:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        # The pipe is closed after the process: closing it would not wake a thread that reads it.
        process.join(patience_s)
        process.kill()
        process.join()
        pipe.close()

    def _send(self, message: Order | Ask) -> None:
        try:
            with self._sending:
                self._opened().send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self, wanted: type[Reply]) -> Reply:
        pipe = self._opened()
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                raise self._died() from error
            if isinstance(message, LogLine):
                logging.getLogger(message.logger).log(message.level, "%s", message.message)
            elif isinstance(message, Failed):
                raise _error(message)
            elif isinstance(message, wanted):
                return message

    def _opened(self) -> Connection:
        if self._pipe is None:
            raise WorkerDied("the worker process was never started.")
        return self._pipe

    def _died(self) -> WorkerDied:
        process = self._process
        if process is not None:
            process.join(REAP_S)
        code = None if process is None else process.exitcode
        how = "" if code is None else f" by signal {-code}" if code < 0 else f" with code {code}"
        return WorkerDied(f"the worker process ended{how}, wanted an answer; it is started again.")


def _error(failed: Failed) -> errors.NpuEmbedError:
    """The error that was raised in the worker, of the same class."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.NpuEmbedError):
        return kind(failed.message)
    return WorkerFailed(failed.message)
