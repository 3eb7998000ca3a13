"""Flight: runs that were submitted and are waited for as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .errors import RunFailed


class Flight:
    """Submitted runs; wait() for their end, once or more often.

    finish waits for them and raises RunFailed where they did not complete.
    """

    __slots__ = ("_error", "_finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: RunFailed | None = None

    @property
    def landed(self) -> bool:
        """Whether somebody has waited for the end."""
        return self._finish is None

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            RunFailed: a run did not complete; said again at every call.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait for the end and keep an error for whoever calls wait()."""
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        try:
            finish()
        except RunFailed as error:
            self._error = error
        except BaseException as error:  # Ctrl-C: whoever waits later must not take the results
            self._error = RunFailed(f"the wait was interrupted ({type(error).__name__}).")
            raise


def together(flights: Sequence[Flight]) -> Flight:
    """One flight of several: it ends when all have, and fails with the first that failed."""
    if len(flights) == 1:
        return flights[0]

    def finish() -> None:
        for flight in flights:
            flight.settle()
        for flight in flights:
            flight.wait()

    return Flight(finish)
