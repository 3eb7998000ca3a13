"""Servers to test: the application in this process over a made-up engine, and real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from npu_embed.bundle import Bundle
from npu_embed.driver import Counters
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import NpuEmbedError
from npu_embed.packing import make_packs
from npu_embed.server.app import create_app
from npu_embed.server.messages import Done, Order, Ready
from npu_embed.server.options import Options
from npu_embed.server.service import Service
from npu_embed.stats import Tally

DIM, PACK_ROWS = 8, 256
START_S = 60.0
ROOT = Path(__file__).parent.parent


def vector_of(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """What the made-up engine makes of a text: another unit vector for other ids."""
    row = np.random.default_rng(ids.astype(np.uint32)).standard_normal(DIM)
    unit: NDArray[np.float32] = (row / np.linalg.norm(row)).astype(np.float32)
    return unit


@dataclass
class FakeEngine:
    """An engine that computes nothing.

    open: cleared, an order waits for it. failures: what the next calls of embed raise, None for
    nothing; fails decides by the order. starts: what the next calls of start raise.
    """

    open: threading.Event = field(default_factory=threading.Event)
    failures: list[NpuEmbedError | None] = field(default_factory=list)
    starts: list[NpuEmbedError | None] = field(default_factory=list)
    fails: Callable[[Order], NpuEmbedError | None] = lambda order: None
    orders: list[Order] = field(default_factory=list)
    alive: bool = True
    held: int = 2
    fingerprint: str = "f"

    def __post_init__(self) -> None:
        self.open.set()

    def start(self) -> Ready:
        failure = self.starts.pop(0) if self.starts else None
        if failure is not None:
            raise failure
        self.alive = True
        return Ready("emulated", DIM, PACK_ROWS, self.held, self.fingerprint)

    def embed(self, order: Order) -> Done:
        self.orders.append(order)
        assert self.open.wait(START_S)
        failure = self.failures.pop(0) if self.failures else self.fails(order)
        if failure is not None:
            raise failure
        texts = np.split(order.ids, np.cumsum(order.lengths)[:-1])
        packs = len(make_packs(order.lengths, PACK_ROWS))
        tally = Tally(texts=len(texts), tokens=len(order.ids), packs=packs)
        stats = tally.stats(Counters(runs=30 * packs))
        return Done(np.stack([vector_of(ids) for ids in texts]), stats, self.held, retried=False)

    def contexts(self) -> int:
        return self.held

    def stop(self) -> None:
        self.open.set()


@dataclass(frozen=True)
class Rig:
    """An application in this process."""

    client: httpx.AsyncClient
    service: Service
    engine: FakeEngine

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so."""
        while not true():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(
    path: Path, engine: FakeEngine | None = None, **options: Anything
) -> AsyncIterator[Rig]:
    """The application over a bundle's tokenizer and a made-up engine."""
    engine = engine or FakeEngine()
    bundle = Bundle.open(path)
    service = Service(
        Options(path, **{"linger_ms": 0.0, **options}), bundle, engine, engine.start()
    )
    service.start()
    transport = httpx.ASGITransport(app=create_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Rig(client, service, engine)
    finally:
        engine.open.set()
        await service.close()
        bundle.close()


def in_loop(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's story; one that hangs fails."""
    asyncio.run(asyncio.wait_for(story, START_S))


@dataclass(frozen=True)
class Served:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def health(self) -> dict[str, Any]:
        """What /health says."""
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=START_S).json()
        return found

    def worker_pid(self) -> int:
        """The process that has the device."""
        # A child of the thread that started it, which is another one for its successors.
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for children in threads for pid in children.read_text().split()]
        (found,) = [
            pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found


@contextlib.contextmanager
def serving(bundle: Path, log: Path, *args: str, **env: str) -> Iterator[Served]:
    """`npu-embed serve` on a free port."""
    command = [sys.executable, "-m", "npu_embed", "serve", "--device", "emulated", "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--bundle", str(bundle), *args],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, **env},
        )
    try:
        yield Served(_url(process, log), process, log)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    waiting = threading.Event()
    while not waiting.wait(0.05):
        if found := re.search(r"at (http://\S+) ", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
    raise AssertionError
