"""Dispatcher: takes orders from the queue to the worker and the vectors back to their jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from ..errors import BundleError, DeviceBad, DeviceError, NoFreeContext, NpuEmbedError, RunFailed
from .link import WorkerDied, WorkerFailed
from .messages import Done, Order, Ready
from .metrics import Metrics
from .queue import Portion, Queue

log = logging.getLogger("npu_embed")

State = Literal["ready", "failed", "restarting", "down"]
T = TypeVar("T")

IDLE_S = 1.0  # how often the engine is looked at while nobody asks for vectors
PROBE_TOKEN = 0  # an id every vocabulary has
RESTART_S = (1.0, 30.0)  # the first and the longest pause between starts that fail
RATE_WEIGHT = 0.3  # of the newest order in the running mean of tokens a second


class Engine(Protocol):
    """A worker process: see Link."""

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        ...

    def start(self) -> Ready:
        """Open the engine, again where it was open."""
        ...

    def embed(self, order: Order) -> Done:
        """An order's vectors."""
        ...

    def contexts(self) -> int:
        """How many hardware contexts it holds."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


@dataclass(slots=True)
class Device:
    """How the device is. error: what it failed with last, empty while it works.

    since: when it got the order that it has, on time.perf_counter's clock; None without one.
    """

    state: State = "ready"
    since: float | None = None
    contexts: int = 0
    error: str = ""
    restarts: int = 0
    tokens_per_s: float = 0.0


class Dispatcher:
    """One order at a time on its way to the engine; run() is its task.

    ready is what the engine, started by the caller, said.
    """

    def __init__(
        self, engine: Engine, ready: Ready, queue: Queue, metrics: Metrics, linger_s: float
    ) -> None:
        self.device = Device(contexts=ready.contexts)
        self._engine = engine
        self._ready = ready
        self._queue = queue
        self._metrics = metrics
        self._linger_s = linger_s
        # Not the loop's own threads: all of those may be busy with something else.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="npu-embed-link")
        metrics.up.set(1)
        metrics.contexts.set(ready.contexts)

    async def run(self) -> None:
        """Serve the queue for ever."""
        while True:
            asked = await self._queue.wait(IDLE_S)
            if not self._engine.alive:
                await self._restart(WorkerDied("the worker process ended while it was idle."))
            elif not asked:
                await self._look()
            if not asked:
                continue
            await self._queue.fill(self._linger_s)
            dropped = self._queue.dropped
            portions = self._queue.take()
            self._metrics.dropped.inc(self._queue.dropped - dropped)
            if portions:
                await self._serve(portions)

    async def _look(self) -> None:
        """See how an idle engine is: what it holds, or whether a device that failed is back."""
        try:
            if self.device.state == "ready":
                self._holds(await self._call(self._engine.contexts))
                return
            # Else the next request would have to find out, and none may come while health is bad.
            await self._embed(Order(np.array([PROBE_TOKEN], dtype=np.int32), (1,)))
            log.warning("the device works again")
        except (WorkerDied, DeviceBad) as error:
            await self._restart(error)
        except NpuEmbedError as error:
            log.info("the device does not work: %s", error)

    def close(self) -> None:
        """End the engine; blocks until it has ended."""
        self._engine.stop()
        self._thread.shutdown()

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _serve(self, portions: Sequence[Portion]) -> None:
        now = asyncio.get_running_loop().time()
        for portion in portions:
            if portion.job.started is None:
                portion.job.started = now
                self._metrics.queue_wait.observe(now - portion.job.queued)
        try:
            done = await self._embed(_order(portions))
        except (WorkerDied, DeviceBad) as error:
            for portion in portions:
                portion.job.fail(error)
            await self._restart(error)
        except NpuEmbedError as error:
            await self._failed(portions, error)
        except Exception as error:
            log.exception("an order was lost to %s", type(error).__name__)
            for portion in portions:
                portion.job.fail(WorkerFailed(f"{type(error).__name__} in the server"))
        else:
            first = 0
            for portion in portions:
                count = portion.last - portion.first
                portion.job.deliver(portion.first, done.vectors[first : first + count])
                first += count

    async def _failed(self, portions: Sequence[Portion], error: NpuEmbedError) -> None:
        """Fail the jobs of an order; where one of them may be the cause, each by itself."""
        of_the_machine = isinstance(error, RunFailed | NoFreeContext | BundleError)
        if not of_the_machine and len({id(portion.job) for portion in portions}) > 1:
            for portion in portions:
                if not portion.job.finished.done():
                    await self._serve([portion])
            return
        for portion in portions:
            portion.job.fail(error)

    async def _embed(self, order: Order) -> Done:
        """The order's vectors, with what it took and how the device is noted."""
        start = time.perf_counter()
        self.device.since = start
        try:
            done = await self._call(lambda: self._engine.embed(order))
        except NpuEmbedError as error:
            if isinstance(error, DeviceError):
                self._is("failed", str(error))
            raise
        finally:
            self.device.since = None
            seconds = time.perf_counter() - start
            self._metrics.device.observe(seconds)
        if done.retried:
            self._metrics.retries.inc()
        self._metrics.ran(done.stats, self._ready.pack_rows)
        rate = sum(order.lengths) / max(seconds, 1e-6)
        known = self.device.tokens_per_s or rate
        self.device.tokens_per_s = known + RATE_WEIGHT * (rate - known)
        self._holds(done.contexts)
        self._is("ready")
        return done

    async def _restart(self, error: DeviceError) -> None:
        """Start the worker again, for ever; who waits fails when the first start does.

        Also where the device counts as bad: the handle that its process has may be of a device
        that is gone, and no other opens within it.
        """
        log.error("%s", error)
        self._is("restarting", str(error))
        pause_s, longest_s = RESTART_S
        while True:
            self.device.restarts += 1
            self._metrics.restarts.inc()
            try:
                ready = await self._call(self._engine.start)
                self._check_same(ready)
            except NpuEmbedError as failure:
                log.error("the worker process could not be started: %s", failure)
                self._is("down", str(failure))
                self._queue.fail(failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                self._holds(ready.contexts)
                self._is("ready")
                return

    def _check_same(self, ready: Ready) -> None:
        if ready.fingerprint != self._ready.fingerprint:
            raise BundleError(
                "manifest.txt: another one than when the server was started, wanted the same "
                "bundle; restart the server."
            )

    def _is(self, state: State, error: str = "") -> None:
        self.device.state, self.device.error = state, error
        self._metrics.up.set(state == "ready")

    def _holds(self, contexts: int) -> None:
        self.device.contexts = contexts
        self._metrics.contexts.set(contexts)


def _order(portions: Sequence[Portion]) -> Order:
    texts = [ids for portion in portions for ids in portion.ids]
    return Order(np.concatenate(texts), tuple(len(ids) for ids in texts))
