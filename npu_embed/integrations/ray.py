"""Ray: `NpuActor` for `Dataset.map_batches`, `run_on_actors` for any work; the extra `ray`.

An engine an actor. Engines on one machine share its NPU, real or emulated: they take turns on it,
and its context slots are one pool for all of them. More than one of them a machine helps as far as
the host's share of the work (tokens, norms, on the emulated NPU everything) has cores to run on.

npu_embed must be installed on every node.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..embedder import Embedder
from ..errors import DeviceError, InputError, InputTypeError, NpuEmbedError
from ..paths import as_path
from .engine import Engine
from .extras import missing

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise missing("ray", "ray[data]") from error

from .shipped import Shipped, ship

if TYPE_CHECKING:
    from ..batch.engines import Engines

__all__ = ["NpuActor", "Shipped", "connect", "on_cluster", "run_on_actors", "ship"]

log = logging.getLogger("npu_embed")

T = TypeVar("T")
R = TypeVar("R")

# Items an actor has at most: one it works at, and the next one, already on its node.
ITEMS_AN_ACTOR = 2
_COLOR = re.compile(r"\x1b\[\d+m")  # Ray's messages have some
ANSWER_SECONDS = 10  # that a cluster may take to take a connection
RETRIES = 3  # of an item whose actor or node died, or whose device failed


class NpuActor:
    """Batches of rows -> the same with a column of vectors, for `Dataset.map_batches`.

    bundle: a folder that every node has, what `ship` returned, or None for the default bundle.
    column holds the texts, embedding_column gets the vectors, float32 [rows, dim]. prompt: a name;
    None is the bundle's own prompt for documents, where it has one. device, dim, truncate: as for
    Embedder and Embedder.embed.

    Its vectors are those of Embedder.embed_document for each batch.

    Raises:
        NpuEmbedError: see Embedder.
    """

    def __init__(
        self,
        bundle: str | Path | Shipped | None = None,
        device: str | None = None,
        *,
        column: str = "text",
        embedding_column: str = "embedding",
        prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
    ) -> None:
        embedder = Embedder(_folder(bundle), device)
        self._engine = Engine.of(None, None, embedder, None, prompt, dim, truncate)
        self._column = column
        self._embedding_column = embedding_column

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """The batch with its vectors.

        Raises:
            InputError: it has no such column; or as Embedder.embed.
        """
        if self._column not in batch:
            raise InputError(
                f"batch: no column {self._column!r}, it has {', '.join(sorted(batch)) or 'none'}; "
                "name the one with texts as column."
            )
        return {**batch, self._embedding_column: self._engine.documents(batch[self._column])}


class _Worker(Generic[T, R]):
    """An actor: some work, and the engine it needs, opened with the first item.

    Not in __init__: Ray tells of an error there in words of its own.
    """

    def __init__(
        self, work: Callable[[Embedder, T], R], bundle: str | Path | Shipped | None, device: str
    ) -> None:
        self._work = work
        self._bundle = bundle
        self._device = device
        self._embedder: Embedder | None = None

    def do(self, item: T) -> R:
        """The work's result."""
        if self._embedder is None:
            self._embedder = Embedder(_folder(self._bundle), self._device)
        return self._work(self._embedder, item)


def connect(address: str | None = None) -> None:
    """Connect to a Ray cluster, unless this process is connected already.

    address: as ray.init takes it ("auto", "host:port", "ray://host:port"); None is RAY_ADDRESS,
    else a cluster on this machine that ends with the process.

    Raises:
        InputError: there is no cluster at that address.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        if address is not None:
            _check_answers(address)
        ray.init(address=address)
    except (OSError, ValueError) as error:  # among them a ConnectionError
        raise InputError(
            f"ray address {address!r}: {error}; start a cluster with `ray start --head`, or name "
            "none for one on this machine."
        ) from error


def _check_answers(address: str) -> None:
    """Check that something answers at host:port; Ray itself would wait for it for many minutes.

    Raises:
        OSError: nothing does.
        ValueError: it is no address.
    """
    place = address.removeprefix("ray://")
    if place in ("auto", "local") or "://" in place:
        return
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("wanted HOST:PORT, ray://HOST:PORT or auto")
    socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()


def run_on_actors(
    work: Callable[[Embedder, T], R],
    items: Iterable[T],
    *,
    bundle: str | Path | Shipped | None = None,
    device: str = "auto",
    actors: int | None = None,
    cpus: float = 1,
) -> Generator[tuple[T, R], None, None]:
    """(item, work(an actor's Embedder, item)) for all items, as they are done, in any order.

    Ray must be initialized; see `connect`. work and the items are pickled. bundle: as for NpuActor.
    actors: None is one for each node, which has one NPU. cpus: cores that Ray reserves for each.
    Items are asked for as actors become free, so that they may be many more than fit in memory.

    An item whose actor or node dies, or whose device fails, is done again, on a new actor if need
    be; that is Ray's doing, three times at most. The actors end with the iterator.

    Raises:
        InputError, InputTypeError: an argument that cannot be used.
        NpuEmbedError: what work raised.
        DeviceError: actors keep dying, or the cluster is gone.
    """
    count = _checked_actors(actors)
    kind = ray.remote(max_restarts=RETRIES, max_task_retries=RETRIES)(_Worker)
    options = {"num_cpus": cpus, "scheduling_strategy": "SPREAD"}
    workers: list[Any] = [
        kind.options(**options).remote(work, bundle, device) for _ in range(count)
    ]
    try:
        yield from _run(workers, iter(items))
    finally:
        for worker in workers:
            ray.kill(worker)


def on_cluster(embedder: Embedder, *, actors: int | None = None) -> Engines:
    """What computes a batch job's shards on actors, each an engine like this one.

    Ray must be initialized; see `connect`. The bundle is shipped where the cluster is more than
    this machine. actors: as for run_on_actors.

    Raises:
        BundleError: the bundle cannot be read.
        InputError: it is an engine that actors do not open.
    """
    if embedder.plain_specials:
        raise InputError(
            "ray: an Embedder with plain_specials=True, wanted one as the actors open it; leave "
            "plain_specials out, or run without a cluster."
        )
    bundle = embedder.bundle.path.absolute()
    alone = {node["NodeManagerHostname"] for node in _nodes()} == {socket.gethostname()}
    return partial(
        run_on_actors,
        bundle=bundle if alone else ship(bundle),
        device=embedder.device,
        actors=actors,
    )


def _run(workers: list[Any], items: Iterator[T]) -> Iterator[tuple[T, Any]]:
    """Hand items to workers as they become free; what they made of them."""
    free = workers * ITEMS_AN_ACTOR
    running: dict[Any, tuple[T, Any]] = {}
    while True:
        while free:
            try:
                item = next(items)
            except StopIteration:
                break
            worker = free.pop(0)
            # One whose context was lost is made again with the next call.
            task = worker.do.options(retry_exceptions=[DeviceError])
            running[task.remote(item)] = item, worker
        if not running:
            return
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        item, worker = running.pop(done)
        free.append(worker)
        yield item, _result(done)


def _result(done: Any) -> Any:  # noqa: ANN401 - what the work returned
    """What a finished task returned; raises what it raised, as it was raised there."""
    try:
        return ray.get(done)
    except RayTaskError as error:
        if isinstance(error.cause, NpuEmbedError):
            raise error.cause from error
        raise
    except RayError as error:
        said = _COLOR.sub("", str(error)).partition("\n")[0].rstrip(".:")
        raise DeviceError(
            f"ray: {said}, wanted the actor to finish its work, which was tried {RETRIES + 1} "
            "times; see Ray's logs of its node."
        ) from error


def _folder(bundle: str | Path | Shipped | None) -> Path | None:
    """The folder of a bundle on this node."""
    if isinstance(bundle, Shipped):
        return bundle.unpack()
    return None if bundle is None else as_path("bundle", bundle)


def _checked_actors(actors: int | None) -> int:
    if not ray.is_initialized():
        raise InputError("ray: not initialized, wanted a cluster; call connect() first.")
    if actors is None:
        return len(_nodes())
    if isinstance(actors, bool) or not isinstance(actors, int):
        raise InputTypeError(f"actors={actors!r}: {type(actors).__name__}, wanted an integer.")
    if actors < 1:
        raise InputError(f"actors={actors}: wanted at least 1.")
    return actors


def _nodes() -> list[dict[str, Any]]:
    """The cluster's nodes that are alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
