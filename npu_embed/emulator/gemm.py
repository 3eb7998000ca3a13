"""The GEMM array program: C = epilogue(A B + bias), a chunk of rows after another.

bf16 operands, float32 accumulation, float32 epilogue, bf16 result. The streams and run-time
words are described in docs/array-programs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..bf16 import to_bf16, to_f32
from . import epilogues
from .controller import Channel, Execution, Fault
from .dma import Piece
from .flows import (
    Arguments,
    Scratch,
    View,
    collapse,
    gather,
    scatter,
    split_dims,
    spread,
    view,
)
from .program import check_waits, check_work, expect_words, read_rtp, refuse_other_flows

F32 = NDArray[np.float32]
OCTET = 8  # B is packed in blocks of 8 columns by 8 rows

RTP_WORDS = 5
CHUNKS, K_BLOCKS, N_BLOCKS, EPILOGUE, BIAS = range(RTP_WORDS)


@dataclass(frozen=True, slots=True)
class GemmProgram:
    """The compile-time constants of a GEMM xclbin."""

    columns: int
    core_rows: int
    rows_per_core: int
    k_tile: int
    n_tile: int
    rtp_offset: int

    def bind(self, run: Execution) -> GemmCall:
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
            active_word=N_BLOCKS,
            shared_words=(CHUNKS, K_BLOCKS, EPILOGUE, BIAS),
        )
        chunks, k_blocks, _, epilogue, bias = rtp[0]
        if epilogue not in range(epilogues.TANH + 1) or bias not in (0, 1):
            raise Fault(end, f"epilogue {epilogue}, bias {bias}: no such mode")
        n_blocks = [words[N_BLOCKS] for words in rtp]
        k = k_blocks * self.k_tile
        n_out = self.n_tile // 2 if epilogue == epilogues.GEGLU_TANH else self.n_tile
        rows = chunks * self.core_rows * self.rows_per_core
        block_words = self.n_tile * (k // 2 + bias)
        a_words = chunks * self.rows_per_core * k // 2
        a = [
            expect_words(run, (core_row, "MM2S", 0), a_words) for core_row in range(self.core_rows)
        ]
        b = [
            expect_words(run, (col, "MM2S", 1), chunks * blocks * block_words)
            for col, blocks in enumerate(n_blocks)
        ]
        c = [
            expect_words(run, (col, "S2MM", 0), rows * blocks * n_out // 2)
            for col, blocks in enumerate(n_blocks)
        ]
        expected = {(r, "MM2S", 0) for r in range(self.core_rows)}
        expected |= {(col, "MM2S", 1) for col in range(len(n_blocks))}
        expected |= {(col, "S2MM", 0) for col in range(len(n_blocks))}
        refuse_other_flows(run, expected)

        def ready(col: int, moved: Mapping[Channel, int]) -> int:
            """Cores pass A on from column to column: a chunk needs the operands of all of them."""
            done = min(moved.get((r, "MM2S", 0), 0) // (a_words // chunks) for r in range(len(a)))
            for column, blocks in enumerate(n_blocks):
                done = min(done, moved.get((column, "MM2S", 1), 0) // (blocks * block_words))
            return done * (rows // chunks) * n_blocks[col] * n_out // 2

        check_waits(run, ready)
        n = sum(n_blocks) * self.n_tile
        check_work(run, rows * k + rows * n + k * n)
        return GemmCall(
            self, chunks, k_blocks, tuple(n_blocks), epilogue, bool(bias), n_out, a, b, c
        )


class GemmCall:
    """A GEMM with everything but the buffers' addresses fixed."""

    def __init__(
        self,
        program: GemmProgram,
        chunks: int,
        k_blocks: int,
        n_blocks: tuple[int, ...],
        epilogue: int,
        bias: bool,
        n_out: int,
        a: list[list[Piece]],
        b: list[list[Piece]],
        c: list[list[Piece]],
    ) -> None:
        p = program
        self.pieces = [piece for flow in (*a, *b, *c) for piece in flow]
        self._p = p
        self._chunks, self._k_blocks, self._n_blocks = chunks, k_blocks, n_blocks
        self._epilogue, self._bias = epilogue, bias
        self._a, self._c = a, c
        self._chunk_rows = p.core_rows * p.rows_per_core
        self._rows = chunks * self._chunk_rows
        self._k = k_blocks * p.k_tile
        self._columns_out = [blocks * n_out for blocks in n_blocks]
        self._a_view = self._find_a_view()
        self._c_view = self._find_c_view()
        # The same descriptor repeated without iteration: every chunk gets the same weights. One
        # pass is then all there is to unpack, and the same for any number of chunks.
        self._same_weights = all(
            len(flow) == 1
            and flow[0].shape[0] == chunks
            and (chunks == 1 or flow[0].strides[0] == 0)
            for flow in b
        )
        if self._same_weights:
            b = [[replace(f[0], shape=f[0].shape[1:], strides=f[0].strides[1:])] for f in b]
        self._b = b
        self._weights_key = (p, tuple(tuple(f) for f in b), n_blocks, k_blocks, bias)

    def _find_a_view(self) -> View | None:
        """A as one [rows, K] view, where the core rows' streams interleave to one."""
        p = self._p
        together = spread(self._a)
        if together is None:
            return None
        piece, step = together
        dims = split_dims(piece, (self._chunks, self._k_blocks, p.rows_per_core, p.k_tile))
        if dims is None:
            return None
        chunk, k_block, row, k = dims
        rows = collapse((chunk, (p.core_rows, 2 * step), row))
        columns = collapse((k_block, k))
        return None if rows is None or columns is None else view(piece, (rows, columns))

    def _find_c_view(self) -> View | None:
        """C as one [rows, N] view, where the columns' results lie side by side."""
        together = spread(self._c)
        if together is None or len(set(self._columns_out)) != 1:
            return None
        piece, step = together
        dims = split_dims(piece, (self._rows, self._columns_out[0]))
        if dims is None:
            return None
        columns = collapse(((len(self._c), 2 * step), dims[1]))
        return None if columns is None else view(piece, (dims[0], columns))

    def _gather_a(self, args: Arguments) -> NDArray[np.uint16]:
        if self._a_view is not None:
            return self._a_view.device(args)
        p = self._p
        parts = [
            gather(flow, args).reshape(self._chunks, self._k_blocks, p.rows_per_core, p.k_tile)
            for flow in self._a
        ]
        stacked = np.stack(parts)  # [core_row, chunk, k_block, row, k]
        a: NDArray[np.uint16] = stacked.transpose(1, 0, 3, 2, 4).reshape(self._rows, self._k)
        return a

    def _unpack(self, packed: NDArray[np.uint16], blocks: int) -> tuple[F32, F32]:
        """A column's packed blocks as float32 [K, n] and its bias [n]; n = blocks * n_tile."""
        p = self._p
        bias_elems = 2 * p.n_tile if self._bias else 0
        packed = np.ascontiguousarray(packed).reshape(blocks, bias_elems + p.n_tile * self._k)
        bias = np.ascontiguousarray(packed[:, :bias_elems]).view(np.float32).reshape(-1)
        tiles = packed[:, bias_elems:].reshape(
            blocks, self._k_blocks, p.n_tile // OCTET, p.k_tile // OCTET, OCTET, OCTET
        )  # [block, k_block, column octet, k octet, column, k]
        matrix = tiles.transpose(1, 3, 5, 0, 2, 4).reshape(self._k, blocks * p.n_tile)
        return to_f32(matrix), bias

    def _weights(self, args: Arguments) -> list[tuple[F32, F32]]:
        """B and bias in float32, one for all chunks or one each; kept while B is unchanged."""
        first = args[self._b[0][0].arg]
        memory = first.memory
        version = memory.version  # before reading: a sync by another thread makes it stale
        key = (first.base_bytes, self._weights_key)
        kept = memory.derived.get(key)
        if kept is not None and kept[0] == version:
            return kept[1]  # type: ignore[return-value]
        groups = 1 if self._same_weights else self._chunks
        columns = []
        for flow, blocks in zip(self._b, self._n_blocks, strict=True):
            packed = gather(flow, args).reshape(groups, -1)
            columns.append([self._unpack(chunk, blocks) for chunk in packed])
        weights = [
            (
                np.concatenate([column[g][0] for column in columns], axis=1),
                np.concatenate([column[g][1] for column in columns]),
            )
            for g in range(groups)
        ]
        if all(args[piece.arg].memory is memory for flow in self._b for piece in flow):
            memory.derived[key] = (version, weights)
        return weights

    def __call__(self, args: Arguments, scratch: Scratch) -> None:
        """Compute from and into the arguments' device memory."""
        weights = self._weights(args)
        a_bits = self._gather_a(args)
        a = to_f32(a_bits, out=scratch.take("a", a_bits.shape))
        n = weights[0][0].shape[1]
        acc = scratch.take("acc", (self._rows, n))
        step = self._rows // len(weights)
        # Rows past the texts hold whatever was there, NaN included; they are computed as on
        # hardware.
        with np.errstate(invalid="ignore", over="ignore"):
            for g, (b, _) in enumerate(weights):
                np.matmul(a[g * step : (g + 1) * step], b, out=acc[g * step : (g + 1) * step])
            parts = [
                epilogues.apply(
                    acc[g * step : (g + 1) * step],
                    bias if self._bias else None,
                    self._epilogue,
                    self._p.n_tile,
                )
                for g, (_, bias) in enumerate(weights)
            ]
        c = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._c_view is not None:
            to_bf16(c, out=self._c_view.device(args))
            self._c_view.wrote(args)
            return
        bits = to_bf16(c)
        start = 0
        for flow, width in zip(self._c, self._columns_out, strict=True):
            scatter(flow, args, np.ascontiguousarray(bits[:, start : start + width]).reshape(-1))
            start += width
