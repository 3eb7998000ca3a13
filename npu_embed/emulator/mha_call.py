"""One attention of the MHA array program, bound to its streams; see docs/array-programs.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .. import cores
from ..bf16 import F32
from ..cores import Job, Scratch, one_blas_thread
from .dma import Piece
from .flows import Arguments, View, collapse, gather, scatter, split_dims, spread, view
from .heads import Heads
from .llvm import machine
from .llvm.machine import Attention
from .llvm.registers import LANES
from .softmax import padded, softmax2

# Query rows computed at a time: with a window, keys far from all of them are left out.
QUERY_ROWS = 128
SPEED = 30_000  # floating point operations a microsecond of a core
SCORE_ELEMS = 1 << 17  # of the scores computed at a time, so that they stay in the cache

Span = tuple[int, int]  # rows [start, stop) of a bucket


@dataclass(frozen=True, slots=True)
class Column:
    """What one column of cores computes: its heads, and the streams they use."""

    heads: int
    kv_heads: int
    kv_of_head: tuple[int, ...]
    q: list[Piece]
    kv: list[Piece]
    o: list[Piece]


@dataclass(frozen=True, slots=True)
class _Views:
    """All columns' heads as strided views of the arguments, where their streams line up."""

    q: View
    k: View
    v: View
    o: View


@dataclass(frozen=True, slots=True)
class _Group:
    """Heads computed in one go: of all columns, or of one.

    kv_of_head: each query head's key/value head. limits: (kv, window) of each core row.
    """

    kv_of_head: tuple[int, ...]
    limits: tuple[tuple[int, int], ...]
    streams: _Views | Column

    def shares(self) -> Iterator[tuple[int, int, int, int]]:
        """First query head, query heads, first key/value head, key/value heads of like parts."""
        heads = len(self.kv_of_head)
        kv_heads = self.kv_of_head[-1] + 1
        share = heads // kv_heads
        if self.kv_of_head == tuple(h // share for h in range(heads)):
            yield 0, heads, 0, kv_heads
        else:
            for head, kv_head in enumerate(self.kv_of_head):
                yield head, 1, kv_head, 1


@dataclass(frozen=True, slots=True)
class _Operands:
    q: Heads
    k: Heads
    v: Heads
    o: Heads


def _split_kv(flow: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The K and the V half of a stream, if each is one piece; else two empty lists."""
    if len(flow) == 2 and flow[0].words == flow[1].words:
        return [flow[0]], [flow[1]]
    return [], []


class MhaCall:
    """An attention with everything but the buffers' addresses fixed."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        columns: list[Column],
        limits: list[list[tuple[int, int]]],
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self.rows = rows
        self.pieces = [piece for c in columns for piece in (*c.q, *c.kv, *c.o)]
        self.read = {piece.arg for c in columns for piece in (*c.q, *c.kv)}
        merged = self._merge(columns, limits)
        self._groups = (
            [merged]
            if merged is not None
            else [
                _Group(c.kv_of_head, tuple(limit), c)
                for c, limit in zip(columns, limits, strict=True)
            ]
        )
        # All of O as a view [heads, rows, head_dim], where its streams line up.
        streams = self._groups[0].streams
        self.output = streams.o if isinstance(streams, _Views) else None

    def _merge(self, columns: list[Column], limits: list[list[tuple[int, int]]]) -> _Group | None:
        """All columns as one group of strided views, or None where their streams do not line up."""
        first = columns[0]
        if any(limit != limits[0] for limit in limits):
            return None
        # Columns whose heads share keys read the same stream, each for itself.
        own = [c for i, c in enumerate(columns) if i == 0 or c.kv != columns[i - 1].kv]
        halves = [_split_kv(c.kv) for c in own]
        flows = ([c.q for c in columns], [h[0] for h in halves], [h[1] for h in halves])
        views = []
        for heads, streams in (
            (first.heads, flows[0]),
            (first.kv_heads, flows[1]),
            (first.kv_heads, flows[2]),
            (first.heads, [c.o for c in columns]),
        ):
            together = spread(streams) if all(streams) else None
            if together is None:
                return None
            piece, step = together
            dims = split_dims(piece, (heads, self.rows, self._head_dim))
            all_heads = collapse(((len(streams), 2 * step), dims[0])) if dims is not None else None
            if dims is None or all_heads is None or dims[2][1] != 1:
                return None
            views.append(view(piece, (all_heads, dims[1], dims[2])))
        q, k, v, o = views
        if q.shape[0] != self._heads or k.shape[0] != self._kv_heads:
            return None
        share = self._heads // self._kv_heads
        kv_of_head = tuple(h // share for h in range(self._heads))
        found: list[int] = []
        first_kv = 0
        for i, c in enumerate(columns):
            if i and c.kv != columns[i - 1].kv:
                first_kv += columns[i - 1].kv_heads
            found += [first_kv + kv for kv in c.kv_of_head]
        if tuple(found) != kv_of_head:
            return None
        return _Group(kv_of_head, tuple(limits[0]), _Views(q, k, v, o))

    def in_place(self, args: Arguments) -> bool:
        """Whether it can read and write device memory as it is: O apart from what it reads."""
        o = self.output
        if o is None:
            return False
        written = args[o.arg].memory
        return all(args[arg].memory is not written for arg in self.read)

    def microseconds(self, rows: int) -> float:
        """What so many rows take one core, about."""
        keys = max(kv for group in self._groups for kv, _ in group.limits)
        return 4 * rows * keys * self._head_dim * self._heads / SPEED

    @property
    def uses_blas(self) -> bool:
        """Whether numpy computes it."""
        return self._head_dim % LANES > 0 or machine.load() is None

    def jobs(self, args: Arguments, spans: Sequence[Span]) -> list[Job]:
        """What is to be done for the rows of `spans`, in any order; for calls in place."""
        (group,) = self._groups
        assert isinstance(group.streams, _Views)
        streams = group.streams
        q, k, v, o = (v.heads(args) for v in (streams.q, streams.k, streams.v, streams.o))
        operands = _Operands(q, k, v, o)
        return self._jobs(group, operands, spans)

    def wrote(self, args: Arguments) -> None:
        """Tell the memory that O was written; for calls in place."""
        assert self.output is not None
        self.output.wrote(args)

    def __call__(self, args: Arguments) -> None:
        """Compute from and into the arguments' device memory."""
        whole = [(0, self.rows)]
        if self.in_place(args):
            cores.run(self.jobs(args, whole), self.microseconds(self.rows), blas=self.uses_blas)
            self.wrote(args)
            return
        for group in self._groups:
            operands = self._gathered(group, args)
            jobs = self._jobs(group, operands, whole)
            cores.run(jobs, self.microseconds(self.rows), blas=self.uses_blas)
            bits = operands.o.elements
            if isinstance(group.streams, Column):
                scatter(group.streams.o, args, bits)
            else:
                over = group.streams.o.device(args)
                over[...] = bits.reshape(over.shape)
                group.streams.o.wrote(args)

    def _gathered(self, group: _Group, args: Arguments) -> _Operands:
        """Copies of what a group reads, and a place for what it writes."""
        streams = group.streams
        heads, kv_heads = len(group.kv_of_head), group.kv_of_head[-1] + 1
        per_head = self.rows * self._head_dim

        def packed(elements: NDArray[np.uint16], first: int = 0) -> Heads:
            return Heads(elements.reshape(-1), first, per_head, self._head_dim)

        o = packed(np.empty(heads * per_head, dtype=np.uint16))
        if isinstance(streams, Column):
            kv = gather(streams.kv, args)
            return _Operands(
                packed(gather(streams.q, args)), packed(kv), packed(kv, kv_heads * per_head), o
            )
        q, k, v = (packed(np.array(v.device(args))) for v in (streams.q, streams.k, streams.v))
        return _Operands(q, k, v, o)

    def _jobs(self, group: _Group, operands: _Operands, spans: Sequence[Span]) -> list[Job]:
        limits = group.limits if len(set(group.limits)) > 1 else group.limits[:1]
        core_rows = self.rows // len(limits)
        jobs: list[Job] = []
        for i, limit in enumerate(limits):
            for start, stop in spans:
                first, last = max(start, i * core_rows), min(stop, (i + 1) * core_rows)
                for row in range(first, last, QUERY_ROWS):
                    part = row, min(row + QUERY_ROWS, last)
                    jobs.append(partial(self._attend, group, operands, part, limit))
        return jobs

    def _attend(
        self,
        group: _Group,
        operands: _Operands,
        part: Span,
        limit: tuple[int, int],
        scratch: Scratch,
    ) -> None:
        """Some query rows of all heads: O = softmax2(Q K^T) V."""
        start, stop = part
        kv, window = limit
        low = min(max(0, start - window), kv)
        high = max(min(kv, stop + window), low)
        compiled = None if high == low or self.uses_blas else machine.load()
        for head, heads, kv_head, kv_heads in group.shares():
            share = heads // kv_heads
            if compiled is not None and (
                window >= max(stop - low, high - start)
                # A key outside the window takes no part, and 0 * NaN would.
                or operands.v.finite(kv_head, low, (kv_heads, high - low, self._head_dim))
            ):
                of = Attention(
                    (operands.q, head, start),
                    (operands.k, kv_head, low),
                    (operands.v, kv_head, low),
                    (operands.o, head, start),
                    *(kv_heads, share, stop - start, high - low, self._head_dim),
                    *(start - low, window),
                )
                compiled.attend(of, scratch)
                continue
            step = max(1, SCORE_ELEMS // (share * (stop - start) * padded(high - low) or 1))
            with one_blas_thread():
                for at in range(0, kv_heads, step):
                    some = min(step, kv_heads - at)
                    self._attend_heads(
                        operands,
                        (head + at * share, some * share),
                        (kv_head + at, some),
                        part,
                        (low, high),
                        window,
                        scratch,
                    )

    def _attend_heads(
        self,
        operands: _Operands,
        query_heads: tuple[int, int],
        kv_heads: tuple[int, int],
        part: Span,
        keys: Span,
        window: int,
        scratch: Scratch,
    ) -> None:
        """Some query rows of some heads, (first, how many), over the keys [start, stop)."""
        (head, heads), (kv_head, groups), (start, stop), (low, high) = (
            query_heads,
            kv_heads,
            part,
            keys,
        )
        rows, n, d = stop - start, high - low, self._head_dim
        out = scratch.take("o", (heads, rows, d))
        if n == 0:  # queries so far behind the keys that none is in their window
            out[...] = 0
            operands.o.round(head, start, out)
            return
        q = operands.q.widen(head, start, scratch.take("q", (heads, rows, d)))
        k = operands.k.widen(kv_head, low, scratch.take("k", (groups, n, d)))
        v = operands.v.widen(kv_head, low, scratch.take("v", (groups, n, d)))
        # Query heads with the same keys are one product.
        p = scratch.take("p", (heads, rows, padded(n)))
        scores = p.reshape(groups, -1, padded(n))[:, :, :n]
        np.matmul(q.reshape(groups, -1, d), k.transpose(0, 2, 1), out=scores)
        softmax2(p, n, start - low, window)
        # A key outside the window takes no part, and 0 * NaN would.
        if window < max(stop - low, high - start) and not np.isfinite(v).all():
            _weighted_apart(p, v, n, start - low, window, out)
        else:
            np.matmul(scores, v, out=out.reshape(groups, -1, d))
        operands.o.round(head, start, out)


def _weighted_apart(p: F32, v: F32, keys: int, first: int, window: int, out: F32) -> None:
    """The product p v, each row over the keys in its window alone; p as in softmax2."""
    share = len(p) // len(v)
    for head, row in np.ndindex(*p.shape[:2]):
        low = min(max(0, first + row - window), keys)
        high = max(min(keys, first + row + window + 1), low)
        out[head, row] = p[head, row, low:high] @ v[head // share, low:high]
