"""Service: from a request's body to its vectors; admission, tokenization, the wait in line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import __version__
from ..bf16 import F32
from ..bundle import Bundle
from ..errors import NpuEmbedError
from ..schedule import SLOTS
from .budgets import Answers, Bodies
from .dispatcher import Dispatcher, Engine
from .link import WorkerFailed
from .messages import Ready
from .metrics import Metrics
from .options import Options
from .prepare import Preparer
from .queue import Job, Queue
from .refusals import RETRY_S, Refusal, draining, of_engine
from .request import Request

log = logging.getLogger("npu_embed")

T = TypeVar("T")

PREPARERS = 2  # threads: one client's long text does not keep another's waiting
MAX_RETRY_S = 60


class ClientGone(Exception):
    """Nobody is there to be answered."""


@dataclass(frozen=True, slots=True)
class Done:
    """float32 [texts, dim] in the order of the texts, and the tokens computed for them."""

    vectors: F32
    tokens: int


class Service:
    """What the HTTP side asks for; made, started and closed within an event loop.

    engine has been started and ready is what it said.
    """

    def __init__(self, options: Options, bundle: Bundle, engine: Engine, ready: Ready) -> None:
        self.options = options
        self.bundle = bundle
        self.ready = ready
        self.metrics = Metrics()
        self.models = (bundle.name, *options.aliases)
        self.normalizes = bundle.manifest.param_flag("normalize")
        self.queue = Queue(SLOTS, ready.pack_rows)
        self.dispatcher = Dispatcher(
            engine, ready, self.queue, self.metrics, options.linger_ms / 1000
        )
        self.draining = False
        self.in_hand = 0  # requests between their head and their answer
        self.bodies = Bodies(options.held_body_bytes)
        self.answers = Answers(options.held_answer_bytes)
        self._preparer = Preparer(bundle, truncate=options.truncate)
        self._threads = ThreadPoolExecutor(PREPARERS, thread_name_prefix="npu-embed-prepare")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve the queue."""
        self._task = asyncio.get_running_loop().create_task(self.dispatcher.run())
        self._task.add_done_callback(self._dispatcher_ended)

    def _dispatcher_ended(self, task: asyncio.Task[None]) -> None:
        """It ends by itself only through a bug: nobody is to wait for ever then."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the dispatcher ended with %s; restart the server", type(error).__name__)
            self.dispatcher.device.state = "down"
            self.dispatcher.device.error = "a bug of the server ended its dispatcher; restart it."
            self.metrics.up.set(0)
            self.queue.fail(WorkerFailed(self.dispatcher.device.error))

    async def close(self) -> None:
        """End the engine; requests that are still in hand fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.queue.fail(draining())
        await asyncio.get_running_loop().run_in_executor(None, self.dispatcher.close)
        self._threads.shutdown()

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """A request is in hand.

        Raises:
            Refusal: it cannot be taken now; the same whatever it asks for.
        """
        if self.draining:
            raise draining()
        device = self.dispatcher.device
        if device.state == "down":
            raise Refusal(503, "device_error", device.error, retry_after_s=RETRY_S)
        if self.queue.texts + self.bodies.count >= self.options.queue_texts:
            raise self._overloaded()
        self.in_hand += 1
        try:
            yield
        finally:
            self.in_hand -= 1

    def _overloaded(self) -> Refusal:
        rate = self.dispatcher.device.tokens_per_s
        seconds = math.ceil(self.queue.tokens / rate) if rate else RETRY_S
        return Refusal(
            429,
            "queue_full",
            f"the queue is full ({self.options.queue_texts} texts at most); ask again later.",
            retry_after_s=max(RETRY_S, min(seconds, MAX_RETRY_S)),
        )

    async def in_thread(self, call: Callable[[], T]) -> T:
        """What a call gives that would keep the event loop from others' requests."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def prepare_job(self, request: Request) -> Job:
        """The request's texts as a job that is not in line yet.

        Raises:
            Refusal: a text cannot be used.
        """
        prepared = await self.in_thread(lambda: self._preparer.prepare(request))
        self.metrics.tokenize.observe(prepared.seconds)
        self.metrics.truncated.inc(prepared.truncated)
        loop = asyncio.get_running_loop()
        vectors = np.empty((len(prepared.ids), self.ready.dim), dtype=np.float32)
        return Job(prepared.ids, vectors, loop.create_future(), loop.time())

    async def run(self, job: Job, gone: Coroutine[Any, Any, None]) -> Done:
        """The job's vectors; gone ends when the client does.

        Raises:
            Refusal: the engine failed.
            ClientGone: it did; what has not been run will not be.
        """
        tokens = job.tokens
        self.queue.put(job)
        leaving = asyncio.ensure_future(gone)
        try:
            either: list[asyncio.Future[Any]] = [job.finished, leaving]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not job.finished.done():
                raise ClientGone
            return Done(job.finished.result(), tokens)
        except NpuEmbedError as error:
            raise of_engine(error) from error
        finally:
            leaving.cancel()
            job.cancel()  # where it has not finished

    def drained(self) -> bool:
        """Whether nothing is in hand any more."""
        return not self.in_hand

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the server can embed now, and how it is."""
        device = self.dispatcher.device
        well = device.state == "ready" and not self.draining
        busy_s = None if device.since is None else round(time.perf_counter() - device.since, 3)
        return well, {
            "status": "draining" if self.draining else "ok" if well else device.state,
            "version": __version__,
            "device": {
                "kind": self.ready.device,
                "state": device.state,
                "busy": busy_s is not None,
                "busy_s": busy_s,
                "error": device.error or None,
                "slots_held": device.contexts,
                "worker_restarts": device.restarts,
            },
            "bundle": {
                "name": self.bundle.name,
                "family": self.bundle.family,
                "dim": self.ready.dim,
                "max_tokens": self.bundle.max_tokens,
                "prompts": sorted(self.bundle.prompts),
                "manifest_sha256": self.ready.fingerprint,
            },
            "queue": {
                "texts": self.queue.texts,
                "tokens": self.queue.tokens,
                "limit_texts": self.options.queue_texts,
                "requests_in_hand": self.in_hand,
            },
        }

    def metrics_text(self) -> bytes:
        """The metrics of now in Prometheus' text format."""
        self.metrics.queue_texts.set(self.queue.texts)
        self.metrics.queue_tokens.set(self.queue.tokens)
        return self.metrics.text()
