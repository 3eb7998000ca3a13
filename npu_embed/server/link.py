"""Link: the server's end of the pipe to its worker process; calls block, so threads make them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from .. import errors
from .messages import Ask, Done, Failed, Held, LogLine, Opening, Order, Ready
from .options import ORDER_S
from .worker import main

ASK_S = 60.0  # what a worker that does nothing may take to say how many contexts it holds
OPENING_S = 600.0  # what a worker may take to open its engine and run it once
STOP_S = 10.0  # what a worker may take to finish an order that nobody waits for
REAP_S = 1.0  # from the end of its pipe to the end of its process
KILL_S = 5.0  # from SIGKILL to the end of its process, unless the driver holds it
PROCESS_NAME = "npu-embed-worker"

log = logging.getLogger("npu_embed")

Reply = TypeVar("Reply", Ready, Done, Held)


class WorkerDied(errors.DeviceError):
    """The worker process ended where an answer was awaited."""


class WorkerStuck(WorkerDied):
    """The worker process gave no answer in the time it has: it is of no use any more."""


class WorkerFailed(errors.NpuEmbedError):
    """The worker process could not do what it was asked, for a reason that is no caller's."""


class Link:
    """A worker process and the pipe to it. One thread at a time may use it; stop() by any.

    order_s: how long the worker may take for an answer. A call that has waited so long raises
    WorkerStuck, and whoever calls starts the worker anew.
    """

    def __init__(self, opening: Opening, order_s: float = ORDER_S) -> None:
        self._opening = opening
        self._order_s = order_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._changing = threading.Lock()  # the process and its pipe; held for a moment only
        self._sending = threading.Lock()  # held for as long as the worker does not read
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
            WorkerStuck: it was not ready after OPENING_S.
        """
        self._end(patience_s=0.0)
        # Spawned, not forked: a device does not survive a fork, and threads run here.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        _bound_waits(ours, max(OPENING_S, self._order_s))
        process = context.Process(
            target=main, args=(theirs, self._opening), name=PROCESS_NAME, daemon=True
        )
        with self._changing:
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
        ready = self._receive(Ready, OPENING_S)
        _bound_waits(ours, self._order_s)
        return ready

    def embed(self, order: Order) -> Done:
        """What the worker made of an order.

        Raises:
            NpuEmbedError: as Embedder.embed_tokens; WorkerFailed for anything unforeseen.
            WorkerDied: the process ended.
            WorkerStuck: there was no answer after order_s.
        """
        self._send(order)
        return self._receive(Done, self._order_s)

    def contexts(self) -> int:
        """How many hardware contexts the worker holds; raises as embed."""
        self._send(Ask())
        return self._receive(Held, min(self._order_s, ASK_S)).contexts

    def stop(self) -> None:
        """End the worker; it finishes what it has in hand, for a while."""
        self._stopped = True
        self._end(patience_s=STOP_S)

    def _end(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        with self._changing:
            process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return
        # A thread may be sending to a worker that does not read: then it is killed unasked.
        if patience_s and self._sending.acquire(timeout=patience_s):
            with contextlib.suppress(OSError):
                _bound_waits(pipe, max(0.0, deadline - time.monotonic()))
                pipe.send(None)
            self._sending.release()
        # The pipe is closed after the process: closing it would not wake a thread that reads it.
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join(KILL_S)
        if process.is_alive():
            log.error(
                "the worker process %s does not end: it waits in the driver, which even SIGKILL "
                "cannot interrupt; it is left behind, and may hold the device. Run `npu-embed "
                "doctor` and look at `dmesg`.",
                process.pid,
            )
        # A thread that still sends would go on to write to whatever has the pipe's number next.
        if self._sending.acquire(timeout=KILL_S):
            pipe.close()
            self._sending.release()

    def _send(self, message: Order | Ask) -> None:
        try:
            with self._sending:
                self._opened().send(message)
        except BlockingIOError as error:
            raise _stuck(self._order_s) from error
        except OSError as error:
            raise self._died() from error

    def _receive(self, wanted: type[Reply], most_s: float) -> Reply:
        pipe = self._opened()
        deadline = time.monotonic() + most_s
        while True:
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise _stuck(most_s)
                message = pipe.recv()
            except BlockingIOError as error:  # it stands still in the middle of a message
                raise _stuck(most_s) from error
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


def _bound_waits(pipe: Connection, most_s: float) -> None:
    """Let no read or write of a pipe's end wait longer: it is a BlockingIOError then.

    Whether there is something to read can be asked with a bound, but not whether it is whole.
    """
    whole_s = int(most_s)
    value = struct.pack("ll", whole_s, max(1, int(1e6 * (most_s - whole_s))))  # 0 is for ever
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:  # multiprocessing's is a socket
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, value)


def _stuck(most_s: float) -> WorkerStuck:
    return WorkerStuck(
        f"the worker process gave no answer for {most_s:g} s, the most that it is waited for; it "
        "is ended. Look at `dmesg` for what the driver says of it."
    )


def _error(failed: Failed) -> errors.NpuEmbedError:
    """The error that was raised in the worker, of the same class."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.NpuEmbedError):
        return kind(failed.message)
    return WorkerFailed(failed.message)
