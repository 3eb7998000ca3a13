"""Which engines compute a job's shards: the one at hand, or others that do as it does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeAlias

from .shards import Content, Record, Shard

if TYPE_CHECKING:
    from ..embedder import Embedder

Computed: TypeAlias = tuple[Content, Record]
Work: TypeAlias = "Callable[[Embedder, Shard], Computed]"
# (shard, what the work made of it) for all shards, as they are done, in any order. They ask for
# shards no faster than they compute them.
Engines: TypeAlias = Callable[
    [Work, Iterable[Shard]], Generator[tuple[Shard, Computed], None, None]
]


def at_hand(embedder: Embedder) -> Engines:
    """The engines that are one Embedder."""

    def engines(
        work: Work, shards: Iterable[Shard]
    ) -> Generator[tuple[Shard, Computed], None, None]:
        for shard in shards:
            yield shard, work(embedder, shard)

    return engines
