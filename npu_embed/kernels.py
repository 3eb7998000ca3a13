"""Kernel: a loaded instruction stream, patched and run."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import events
from .buffers import Buffer, View
from .containers import ArgumentLayout
from .driver import Driver, Xrt
from .errors import BundleError, RunFailed
from .flights import Flight

TXN_OPCODE = 3
WAIT_SLICE_MS = 100  # pyxrt's wait holds the GIL: other threads run between slices
MAX_CACHED_RUNS = 512  # of one kernel; a text at another row of a pack is another run

# Runs that never ended, with all they use: XRT aborts the process that drops one.
abandoned: list[object] = []


@dataclass(slots=True, eq=False)
class _Prepared:
    """A run with its arguments set; xrt is None once released. busy: not known to have ended.

    What is passed around is this and not pyxrt's run, so that the traceback of an error somebody
    keeps does not keep the run, and with it the context's slot.
    """

    xrt: Xrt
    views: tuple[View, ...]
    busy: bool = False


class Kernel:
    """A loaded instruction stream: patched, run, released.

    name is for errors; xclbin the file's name; kernel, insts_bo and insts pyxrt's kernel, the
    instruction bo and the buffer over it.
    """

    def __init__(
        self,
        driver: Driver,
        name: str,
        xclbin: str,
        layout: ArgumentLayout,
        kernel: Xrt,
        insts_bo: Xrt,
        insts: Buffer,
    ) -> None:
        self.name = name
        self._driver = driver
        self._xclbin = xclbin
        self._layout = layout
        self._kernel = kernel
        self._insts_bo = insts_bo
        self._insts: Buffer | None = insts
        self._runs: OrderedDict[tuple[int, ...], _Prepared] = OrderedDict()

    def patch(self, words: Mapping[int, int]) -> None:
        """Write 32-bit words into the instruction stream; later runs execute them. One sync.

        Raises:
            ValueError: an index past the stream or a value past 32 bits; nothing is written then.
        """
        insts = self._insts
        assert insts is not None, f"{self.name} was released"
        stream = insts.host.view(np.uint32)
        for index, value in words.items():
            if not 0 <= index < len(stream) or not 0 <= value < 1 << 32:
                raise ValueError(
                    f"{self.name}: word {index} = {value}, the stream has {len(stream)} u32 words"
                )
        for index, value in words.items():
            stream[index] = value
        insts.to_device(0, insts.size)
        self._driver.counters.patches += 1
        if events.listeners:
            now = time.perf_counter()
            events.note(events.WordsPatched(self.name, self._xclbin, dict(words), now))

    def start(self, views: Sequence[View]) -> Flight:
        """Start a run with these buffer arguments; its results may be used once it was waited for.

        Raises:
            RunFailed: it could not be started.
        """
        run = self._prepared(views)
        if run.busy:  # the same run twice in one submit
            run = _Prepared(self.build(views), tuple(views))
        try:
            self._start(run)
        except RunFailed:
            raise
        except BaseException:  # Ctrl-C: a run in flight must not be freed, so let it end
            self._settle(run, self._deadline())
            run.busy = False
            raise
        return Flight(lambda: self._finish(run))

    def run(self, views: Sequence[View]) -> None:
        """Run with these buffer arguments and wait for the end.

        Raises:
            RunFailed: the run did not complete, or not in time; nothing it wrote may be used.
        """
        self.start(views).wait()

    def _finish(self, run: _Prepared) -> None:
        """Wait for a started run's end."""
        deadline = self._deadline()
        try:
            state = self._wait(run, deadline)
        except RunFailed:
            raise
        except BaseException:
            self._settle(run, deadline)
            raise
        finally:
            run.busy = False  # or abandoned, and not used again
        if state != self._driver.xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            raise RunFailed(
                f"{self.name}: the run ended in {_state_name(state)}, wanted COMPLETED; its "
                "results are not used. Check the bundle (`npu-embed check`) and the driver's log "
                "(`dmesg`)."
            )

    def _deadline(self) -> float:
        return time.monotonic() + self._driver.timeout_ms / 1000

    def build(self, views: Sequence[View]) -> Xrt:
        """A new pyxrt run with its arguments set; whoever has it keeps the views.

        Raises:
            BundleError: the xclbin's kernel takes fewer buffers.
        """
        layout = self._layout
        insts = self._insts
        assert insts is not None, f"{self.name} was released"
        if len(views) > len(layout.buffers):
            raise BundleError(
                f"{self._xclbin}: {self.name} takes {len(layout.buffers)} buffers, "
                f"wanted {len(views)}; re-export the bundle."
            )
        run = self._driver.xrt.run(self._kernel)
        run.set_arg(layout.opcode, TXN_OPCODE)
        run.set_arg(layout.instr, self._insts_bo)
        run.set_arg(layout.ninstr, insts.size)  # bytes, as current compilers' hosts pass
        for index, view in zip(layout.buffers, views, strict=False):
            run.set_arg(index, view.bo)
        return run

    def _prepared(self, views: Sequence[View]) -> _Prepared:
        """A run with its arguments set, kept for the next time the same views are asked for."""
        key = tuple(view.id for view in views)
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
            return found
        run = self.build(views)
        if len(self._runs) >= MAX_CACHED_RUNS:
            self._runs.popitem(last=False)
        prepared = self._runs[key] = _Prepared(run, tuple(views))
        return prepared

    def _start(self, run: _Prepared) -> None:
        try:
            run.xrt.start()
        except RuntimeError as error:
            # Without the traceback: its frames may keep the run, and so does who keeps the error.
            raise RunFailed(
                f"{self.name}: could not be started; run `npu-embed check`. XRT said: {error}"
            ) from error.with_traceback(None)
        run.busy = True
        self._driver.counters.runs += 1

    def _wait(self, run: _Prepared, deadline: float) -> Xrt:
        """The state the run ended in, or TIMEOUT."""
        timed_out = self._driver.xrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT
        try:
            while True:
                state = run.xrt.wait(min(WAIT_SLICE_MS, self._driver.timeout_ms))
                if state != timed_out:
                    return state
                # TIMEOUT is either ours (the run goes on) or the device's own: state() tells.
                if run.xrt.state() == timed_out:
                    return state
                if time.monotonic() > deadline:
                    self._abandon(run)
                    return state
        except RuntimeError as error:  # the device is gone, and with it the run's end
            self._abandon(run)
            raise RunFailed(
                f"{self.name}: could not be waited for; see the driver's log (`dmesg`). "
                f"XRT said: {error}"
            ) from error.with_traceback(None)

    def _settle(self, run: _Prepared, deadline: float) -> None:
        """Wait for the end of a run nobody wants any more; abandon it if there is none in time."""
        timed_out = self._driver.xrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT
        ended = False
        try:
            while not ended and time.monotonic() < deadline:
                ended = run.xrt.wait(WAIT_SLICE_MS) != timed_out or run.xrt.state() == timed_out
        except RuntimeError:
            pass  # the interrupt is what the caller is told of
        finally:  # also where a second Ctrl-C ends the wait
            if not ended:
                self._abandon(run)

    def _abandon(self, run: _Prepared) -> None:
        """Keep a run that goes on, and all it uses, to the end of the process."""
        abandoned.append((run.xrt, run.views, self._kernel, self._insts_bo, self._insts))
        self._runs = OrderedDict((k, v) for k, v in self._runs.items() if v is not run)

    def settle(self) -> None:
        """Wait for the end of runs whose Flight was lost, as to a Ctrl-C in mid-submit."""
        for run in [run for run in self._runs.values() if run.busy]:
            self._settle(run, self._deadline())
            run.busy = False

    def release(self) -> None:
        """Free the runs, the instruction buffer, then the kernel's reference, in this order."""
        self.settle()
        for run in self._runs.values():
            run.xrt = None
        self._runs.clear()
        self._insts_bo = None
        self._insts = None
        self._kernel = None


def _state_name(state: Xrt) -> str:
    return str(getattr(state, "name", state)).replace("ERT_CMD_STATE_", "")
