"""RunList: runs of one context that are submitted, executed in order, and waited for as one."""

from __future__ import annotations

from collections.abc import Sequence

from .buffers import View
from .driver import Driver, Xrt
from .errors import RunFailed
from .flights import Flight
from .kernels import Kernel, abandoned

Launch = tuple[Kernel, tuple[View, ...]]


class RunList:
    """A pyxrt.runlist; may be started again once it is no longer busy.

    Its runs are its own: a run in a list may never be started by itself, nor asked for its state.
    busy: started, and not known to have ended.
    """

    def __init__(self, driver: Driver, hw_context: Xrt, launches: Sequence[Launch]) -> None:
        self.kernels = tuple(kernel for kernel, _ in launches)
        self.busy = False
        self._driver = driver
        self._views = tuple(views for _, views in launches)
        self._list = driver.xrt.runlist(hw_context)
        self._runs = [kernel.build(views) for kernel, views in launches]
        for run in self._runs:
            self._list.add(run)

    def start(self) -> Flight:
        """Submit all runs.

        Raises:
            RunFailed: the list was refused.
        """
        try:
            self._list.execute()
        except RuntimeError as error:
            # Without the traceback: its frames may keep the list, and so does who keeps the error.
            raise RunFailed(
                f"{self._names()}: the runlist could not be started; set NPU_EMBED_RUNLISTS=off to "
                f"do without lists. XRT said: {error}"
            ) from error.with_traceback(None)
        except BaseException:  # Ctrl-C: it may be in flight, and must not be freed then
            self._settle()
            raise
        self.busy = True
        self._driver.counters.runs += len(self._runs)
        self._driver.counters.runlists += 1
        return Flight(self._finish)

    def _finish(self) -> None:
        """Wait for the end, without a bound of ours: wait(ms) cannot be called from Python.

        The driver's watchdog ends a list that makes no progress.
        """
        self.busy = False  # at the end of this, unless it is lost
        try:
            self._list.wait()
        except RuntimeError as error:
            raise RunFailed(
                f"{self._names()}: the runlist did not complete; its results are not used. Check "
                "the bundle (`npu-embed check`) and the driver's log (`dmesg`). XRT said: "
                f"{error}"
            ) from error.with_traceback(None)
        except BaseException:  # Ctrl-C: a list in flight must not be freed, so let it end
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait for the end of a list nobody wants any more; keep it if that is interrupted too."""
        try:
            self._list.wait()
        except RuntimeError:
            pass  # the interrupt is what the caller is told of
        except BaseException:
            self.busy = True
            abandoned.append((self._list, self._runs, self._views, self.kernels))
            self.release()
            raise

    def _names(self) -> str:
        names = list(dict.fromkeys(kernel.name for kernel in self.kernels))
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    def settle(self) -> None:
        """Wait for the end of a list whose Flight was lost, as to a Ctrl-C in mid-submit."""
        if self.busy and self._list is not None:
            self.busy = False
            self._settle()

    def release(self) -> None:
        """Free the list, then its runs."""
        self._list = None
        self._runs = []
