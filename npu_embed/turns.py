"""Turns: one use of an Embedder's device at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import DeviceError, InputError


class Turns:
    """Threads wait for each other; a forked process and a signal handler are told, not blocked.

    A thread that has the turn cannot take it again: what it interrupts would wait for itself.
    """

    def __init__(self) -> None:
        # Reentrant, so that a signal handler gets in to find out that the turn is its own thread's.
        self._lock = threading.RLock()
        self._taken = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Check that this process is the one that made it.

        Raises:
            DeviceError: it is not.
        """
        if self.forked:
            raise DeviceError(
                f"this Embedder was opened in process {self._pid}, this is {os.getpid()}: a device "
                "does not survive a fork; open an Embedder in each process."
            )

    @contextmanager
    def take(self) -> Iterator[None]:
        """The turn, once no other thread has it.

        Raises:
            DeviceError: this process is a fork, where the thread that has the turn may not exist.
            InputError: this thread has the turn already.
        """
        self.check_process()
        with self._lock:
            if self._taken:
                raise InputError(
                    "this Embedder is in use by this very thread, as where a signal handler uses "
                    "it, wanted one use at a time; set a flag there and look at it after the call."
                )
            try:
                self._taken = True
                yield
            finally:
                self._taken = False

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """The turn if nobody has it, without waiting; whether it was to be had."""
        if self.forked or not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            if self._taken:
                yield False
            else:
                with self.take():
                    yield True
        finally:
            self._lock.release()
