"""What becomes of contexts nobody uses: released after a while, or when somebody else needs one."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

# id of the owner -> its method that gives up what it does not use.
_lenders: dict[int, weakref.WeakMethod[Callable[[], int]]] = {}


def lend(method: Callable[[], int]) -> None:
    """Let a bound method be called, by any thread, when somebody of this process needs a context.

    It must not wait: it gives up its owner's contexts if they are not in use, and says how many.
    It keeps its owner alive no longer than anybody else does.
    """
    key, forget = id(method.__self__), _lenders.pop  # type: ignore[attr-defined]
    _lenders[key] = weakref.WeakMethod(method, lambda _: forget(key, None))


def call_in() -> int:
    """Have everything given up that this process holds and does not use; how many contexts."""
    methods = [reference() for reference in list(_lenders.values())]
    return sum(method() for method in methods if method is not None)


class IdleTimer:
    """Calls a bound method when seconds have passed since the last restart(); 0 seconds: never.

    It keeps its owner alive no longer than anybody else does, and never the process. A call may
    come late, when somebody has become active again: due() tells.
    """

    def __init__(self, seconds: float, method: Callable[[], None]) -> None:
        self._seconds = seconds
        self._method = weakref.WeakMethod(method)
        self._timer: threading.Timer | None = None

    def restart(self) -> None:
        """Somebody was active now."""
        if self._seconds <= 0:
            return
        self.stop()
        self._timer = threading.Timer(self._seconds, _call, (self._method,))
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no new thread: the process is ending
            self._timer.start()

    def due(self) -> bool:
        """Whether the call that asks this is the last restart()'s."""
        return self._timer is threading.current_thread()

    def stop(self) -> None:
        """Do nothing until the next restart()."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    if method is not None:
        method()
