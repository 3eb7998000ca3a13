"""The multi-head attention array program: O = softmax2(Q K^T) V, all rows of a bucket.

Base-2 softmax of scores the host has scaled; see docs/array-programs.md for streams and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bf16 import round_f32, to_bf16, to_f32
from .controller import Channel, Execution, Fault
from .dma import Piece
from .flows import (
    Arguments,
    Scratch,
    View,
    collapse,
    flow_words,
    gather,
    scatter,
    split_dims,
    spread,
    view,
)
from .program import check_waits, check_work, expect_words, read_rtp, refuse_other_flows

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

RTP_WORDS = 5
ROWS, KV, WINDOW, FIRST_HEAD, HEADS = range(RTP_WORDS)
NO_WINDOW = 0xFFFFFFFF

# 2^s as e^(s ln 2): numpy's float32 exp is vectorised where its exp2 is not. The product's rounding
# moves p by at most |s| 2^-24 relative, far below the bf16 rounding of p that follows.
_LN2 = np.float32(np.log(2.0))


# OpenBLAS splits products of more multiply-adds than this over threads. For attention's small ones
# that gains nothing on an idle machine, and on a busy one the threads wait for each other in a
# spin: the same work took up to 20 times as long.
ONE_THREAD_MACS = 1 << 18
FEWEST_ROWS = 8


def block_rows(rows: int, macs_a_row: int) -> int:
    """The most rows, halving from `rows`, whose product stays on one BLAS thread.

    All rows where those were fewer than FEWEST_ROWS: thin products are slower than any threads.
    """
    if FEWEST_ROWS * macs_a_row > ONE_THREAD_MACS:
        return rows
    while rows % 2 == 0 and rows * macs_a_row > ONE_THREAD_MACS:
        rows //= 2
    return rows


def _weighted(p: F32, values: F32, block_rows: int) -> F32:
    """The product p @ values, [heads, rows, keys] with [heads, keys, d], block_rows at a time."""
    heads, rows, keys = p.shape
    out: F32 = np.matmul(p.reshape(heads, -1, block_rows, keys), values[:, None])
    return out.reshape(heads, rows, -1)


@dataclass(frozen=True, slots=True)
class MhaProgram:
    """The compile-time constants of an MHA xclbin."""

    columns: int
    core_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    rtp_offset: int

    def bind(self, run: Execution) -> MhaCall:
        """The computation that the executed stream describes.

        Raises:
            Fault, Stall: words or descriptors that do not fit each other.
        """
        end = run.num_ops
        rtp = read_rtp(
            run,
            columns=self.columns,
            core_rows=self.core_rows,
            offset=self.rtp_offset,
            words=RTP_WORDS,
            active_word=HEADS,
            shared_words=(ROWS,),
            own_words=(KV, WINDOW),
        )
        rows = rtp[0][ROWS]
        if rows == 0 or rows % self.core_rows:
            raise Fault(end, f"{rows} rows, wanted a multiple of {self.core_rows}")
        group = self.heads // self.kv_heads
        limits: list[list[tuple[int, int]]] = []
        columns: list[_Column] = []
        for col, words in enumerate(rtp):
            first, heads = words[FIRST_HEAD], words[HEADS]
            if first + heads > self.heads:
                raise Fault(end, f"heads {first} to {first + heads - 1} of {self.heads}")
            first_kv = first // group
            kv_heads = (first + heads - 1) // group - first_kv + 1
            per_head = rows * self.head_dim // 2
            columns.append(
                _Column(
                    heads,
                    kv_heads,
                    tuple(h // group - first_kv for h in range(first, first + heads)),
                    expect_words(run, (col, "MM2S", 0), heads * per_head),
                    expect_words(run, (col, "MM2S", 1), 2 * kv_heads * per_head),
                    expect_words(run, (col, "S2MM", 0), heads * per_head),
                )
            )
            limits.append([])
            for core_row in range(self.core_rows):
                kv, window = (
                    run.core_word(col, core_row, self.rtp_offset + 4 * w) for w in (KV, WINDOW)
                )
                if not 1 <= kv <= rows:
                    raise Fault(end, f"core ({col}, {core_row}): {kv} keys, wanted 1 to {rows}")
                limits[col].append((kv, window))
        refuse_other_flows(
            run,
            {
                (col, direction, number)
                for col in range(len(rtp))
                for direction, number in (("MM2S", 0), ("MM2S", 1), ("S2MM", 0))
            },
        )

        def ready(col: int, moved: Mapping[Channel, int]) -> int:
            """A head's softmax needs all keys, its columns' results need all heads."""
            c = columns[col]
            whole = moved.get((col, "MM2S", 0), 0) >= flow_words(c.q) and moved.get(
                (col, "MM2S", 1), 0
            ) >= flow_words(c.kv)
            return flow_words(c.o) if whole else 0

        check_waits(run, ready)
        all_heads = sum(c.heads for c in columns)
        most_keys = max(kv for column in limits for kv, _ in column)
        check_work(run, all_heads * rows * (most_keys + 4 * self.head_dim))
        return MhaCall(self, rows, columns, limits)


@dataclass(frozen=True, slots=True)
class _Column:
    """What one column of cores computes: its heads, and the streams they use."""

    heads: int
    kv_heads: int
    kv_of_head: tuple[int, ...]
    q: list[Piece]
    kv: list[Piece]
    o: list[Piece]


@dataclass(frozen=True, slots=True)
class _Group:
    """Heads computed in one go: of one column, or of all where their streams line up."""

    heads: int
    kv_heads: int
    kv_of_head: tuple[int, ...] | None  # None: head h uses key/value head h
    q: View | list[Piece]
    k: View | list[Piece]
    v: View | list[Piece]
    o: View | list[Piece]
    limits: tuple[tuple[int, int], ...]  # (kv, window) of each core row


def _split_kv(flow: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The K and the V half of a stream, if each is one piece; else two empty lists."""
    if len(flow) == 2 and flow[0].words == flow[1].words:
        return [flow[0]], [flow[1]]
    return [], []


class MhaCall:
    """An attention with everything but the buffers' addresses fixed."""

    def __init__(
        self,
        program: MhaProgram,
        rows: int,
        columns: list[_Column],
        limits: list[list[tuple[int, int]]],
    ) -> None:
        self._p = program
        self._rows = rows
        self.pieces = [piece for c in columns for piece in (*c.q, *c.kv, *c.o)]
        merged = self._merge(columns, limits)
        self._groups = (
            [merged]
            if merged is not None
            else [self._alone(c, limit) for c, limit in zip(columns, limits, strict=True)]
        )

    def _merge(self, columns: list[_Column], limits: list[list[tuple[int, int]]]) -> _Group | None:
        """All columns as one group of strided views, or None where their streams do not line up."""
        first = columns[0]
        if any(limit != limits[0] for limit in limits):
            return None
        halves = [_split_kv(c.kv) for c in columns]
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
            dims = split_dims(piece, (heads, self._rows, self._p.head_dim))
            all_heads = collapse(((len(columns), 2 * step), dims[0])) if dims is not None else None
            if dims is None or all_heads is None:
                return None
            views.append(view(piece, (all_heads, dims[1], dims[2])))
        q, k, v, o = views
        heads, kv_heads = q.shape[0], k.shape[0]
        if heads != self._p.heads or kv_heads != self._p.kv_heads:
            return None
        group = heads // kv_heads
        kv_of_head = None if group == 1 else tuple(h // group for h in range(heads))
        return _Group(heads, kv_heads, kv_of_head, q, k, v, o, tuple(limits[0]))

    def _alone(self, c: _Column, limits: list[tuple[int, int]]) -> _Group:
        """One column, its streams gathered word by word."""
        return _Group(c.heads, c.kv_heads, c.kv_of_head, c.q, c.kv, c.kv, c.o, tuple(limits))

    def _operands(self, g: _Group, args: Arguments) -> tuple[U16, U16, U16]:
        shape = (g.kv_heads, self._rows, self._p.head_dim)
        if isinstance(g.q, View) and isinstance(g.k, View) and isinstance(g.v, View):
            return g.q.device(args), g.k.device(args), g.v.device(args)
        assert isinstance(g.q, list)
        assert isinstance(g.k, list)
        k, v = gather(g.k, args).reshape(2, *shape)
        return gather(g.q, args).reshape(g.heads, self._rows, self._p.head_dim), k, v

    def _attend(self, q: F32, k: U16, v: U16, g: _Group, first_row: int, limit: int) -> F32:
        """softmax2(q k^T) v for query rows first_row onward; limit indexes g.limits."""
        kv, window = g.limits[limit]
        keys, values = to_f32(k[:, :kv]), to_f32(v[:, :kv])
        if g.kv_of_head is not None:
            keys, values = keys[list(g.kv_of_head)], values[list(g.kv_of_head)]
        heads, rows, head_dim = q.shape
        # [heads, blocks, rows of a block, d]: one product a block, see block_rows.
        blocks = q.reshape(heads, -1, block_rows(rows, kv * head_dim), head_dim)
        scores = np.matmul(blocks, keys.transpose(0, 2, 1)[:, None]).reshape(heads, rows, kv)
        masked: NDArray[np.bool_] | None = None
        if window < kv + first_row + q.shape[1]:
            i = np.arange(first_row, first_row + q.shape[1])[:, None]
            masked = np.abs(i - np.arange(kv)[None, :]) > window
            scores[:, masked] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        if masked is not None:
            top[~np.isfinite(top) & (top < 0)] = 0.0  # a row without a key: all p are 0
        scores -= top
        scores *= _LN2
        p = np.exp(scores, out=scores)
        total = p.sum(axis=-1, keepdims=True)
        if masked is not None:
            total[total == 0.0] = 1.0
        p /= total
        p = round_f32(p)
        # A key outside the window does not take part, and 0 * NaN would.
        if masked is None or np.isfinite(values).all():
            return _weighted(p, values, blocks.shape[2])
        finite = np.isfinite(values)
        out = _weighted(p, np.where(finite, values, np.float32(0)), blocks.shape[2])
        takes_part: NDArray[np.bool_] = np.logical_not(masked)
        broken: NDArray[np.bool_] = np.logical_not(finite).max(axis=-1)  # [heads, keys]
        meets = takes_part & broken[:, None]  # [heads, rows, keys]
        for head, row in np.argwhere(meets.any(axis=-1)):
            taken = takes_part[row]
            out[head, row] = p[head, row, taken] @ values[head, taken]
        return out

    def __call__(self, args: Arguments, scratch: Scratch) -> None:
        """Compute from and into the arguments' device memory."""
        for g in self._groups:
            q_bits, k, v = self._operands(g, args)
            # Query rows past the text hold whatever follows it; they are computed as on hardware.
            with np.errstate(invalid="ignore", over="ignore"):
                q = to_f32(q_bits)
                if len(set(g.limits)) == 1:
                    o = self._attend(q, k, v, g, 0, 0)
                else:
                    step = self._rows // len(g.limits)
                    o = np.concatenate(
                        [
                            self._attend(q[:, i * step : (i + 1) * step], k, v, g, i * step, i)
                            for i in range(len(g.limits))
                        ],
                        axis=1,
                    )
            bits = to_bf16(o)
            if isinstance(g.o, View):
                g.o.device(args)[...] = bits
                g.o.wrote(args)
            else:
                scatter(g.o, args, bits.reshape(-1))
