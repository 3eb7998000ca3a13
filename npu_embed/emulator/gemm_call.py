"""One GEMM of the GEMM array program, bound to its streams; see docs/array-programs.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .. import cores
from ..bf16 import BF16, F32, RowBuffer
from ..cores import Block, Scratch, cut_product
from .dma import Piece
from .flows import Arguments, View, collapse, gather, scatter, split_dims, spread, view
from .weights import Weights, prepare

OCTET = 8  # B is packed in blocks of 8 columns by 8 rows


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the array computes at a time: core_rows * rows_per_core rows, k_tile, n_tile columns."""

    core_rows: int
    rows_per_core: int
    k_tile: int
    n_tile: int

    @property
    def chunk_rows(self) -> int:
        """The rows of a chunk."""
        return self.core_rows * self.rows_per_core


class GemmCall:
    """A GEMM with everything but the buffers' addresses fixed."""

    def __init__(
        self,
        tiles: Tiles,
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
        self.pieces = [piece for flow in (*a, *b, *c) for piece in flow]
        self._tiles = tiles
        self._chunks, self._k_blocks, self._n_blocks = chunks, k_blocks, n_blocks
        self._epilogue, self._bias = epilogue, bias
        self._a, self._c = a, c
        self._rows = chunks * tiles.chunk_rows
        self._k = k_blocks * tiles.k_tile
        self._n_out = n_out
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
        # The same weights for any rows a core.
        self._weights_key = (
            replace(tiles, rows_per_core=1),
            tuple(tuple(f) for f in b),
            n_blocks,
            k_blocks,
            bias,
        )

    @property
    def weight_sets(self) -> int:
        """How many Bs are unpacked: one for all chunks, or one for each."""
        return 1 if self._same_weights else self._chunks

    def _find_a_view(self) -> View | None:
        """A as one [rows, K] view, where the core rows' streams interleave to one."""
        tiles = self._tiles
        together = spread(self._a)
        if together is None:
            return None
        piece, step = together
        dims = split_dims(piece, (self._chunks, self._k_blocks, tiles.rows_per_core, tiles.k_tile))
        if dims is None:
            return None
        chunk, k_block, row, k = dims
        rows = collapse((chunk, (tiles.core_rows, 2 * step), row))
        columns = collapse((k_block, k))
        if rows is None or columns is None or columns[1] != 1:
            return None
        return view(piece, (rows, columns))

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
        return None if columns is None or columns[1] != 1 else view(piece, (dims[0], columns))

    def _gather_a(self, args: Arguments) -> NDArray[np.uint16]:
        """A as an array [rows, K]."""
        tiles = self._tiles
        parts = [
            gather(flow, args).reshape(
                self._chunks, self._k_blocks, tiles.rows_per_core, tiles.k_tile
            )
            for flow in self._a
        ]
        stacked = np.stack(parts)  # [core_row, chunk, k_block, row, k]
        a: NDArray[np.uint16] = stacked.transpose(1, 0, 3, 2, 4).reshape(self._rows, self._k)
        return a

    def _unpack(self, packed: NDArray[np.uint16], blocks: int) -> tuple[BF16, F32]:
        """A column's packed blocks as [K, n] and its bias [n]; n = blocks * n_tile."""
        n_tile, k_tile = self._tiles.n_tile, self._tiles.k_tile
        bias_elems = 2 * n_tile if self._bias else 0
        packed = np.ascontiguousarray(packed).reshape(blocks, bias_elems + n_tile * self._k)
        bias = np.ascontiguousarray(packed[:, :bias_elems]).view(np.float32).reshape(-1)
        octets = packed[:, bias_elems:].reshape(
            blocks, self._k_blocks, n_tile // OCTET, k_tile // OCTET, OCTET, OCTET
        )  # [block, k_block, column octet, k octet, column, k]
        matrix = octets.transpose(1, 3, 5, 0, 2, 4).reshape(self._k, blocks * n_tile)
        return matrix, bias

    def _weights(self, args: Arguments) -> list[Weights]:
        """B and bias, one for all chunks or one each; kept while B is unchanged."""
        first = args[self._b[0][0].arg]
        memory = first.memory
        version = memory.version  # before reading: a sync by another thread makes it stale
        key = (first.base_bytes, self._weights_key)
        kept = memory.derived.get(key)
        if kept is not None and kept[0] == version:
            return kept[1]  # type: ignore[return-value]
        groups = self.weight_sets
        columns = []
        for flow, blocks in zip(self._b, self._n_blocks, strict=True):
            packed = gather(flow, args).reshape(groups, -1)
            columns.append([self._unpack(chunk, blocks) for chunk in packed])
        weights = [
            prepare(
                np.concatenate([column[g][0] for column in columns], axis=1),
                np.concatenate([column[g][1] for column in columns]) if self._bias else None,
                self._tiles.n_tile,
            )
            for g in range(groups)
        ]
        if all(args[piece.arg].memory is memory for flow in self._b for piece in flow):
            memory.derived[key] = (version, weights)
        return weights

    def __call__(self, args: Arguments) -> None:
        """Compute from and into the arguments' device memory."""
        weights = self._weights(args)
        a = self._a_rows(args)
        c = self._c_rows(args)
        rows = self._rows // len(weights)
        microseconds = weights[0].microseconds(rows)
        cores.run(
            [
                partial(self._multiply, a, b, c, g * rows, block)
                for g, b in enumerate(weights)
                for block in cut_product(rows, b.columns, self._tiles.n_tile, microseconds)
            ],
            microseconds * len(weights),
            blas=not isinstance(weights[0].way, tuple),
        )
        if self._c_view is not None:
            self._c_view.wrote(args)
            return
        bits = c[0].reshape(self._rows, -1)
        start = 0
        for flow, width in zip(self._c, self._columns_out, strict=True):
            scatter(flow, args, np.ascontiguousarray(bits[:, start : start + width]).reshape(-1))
            start += width

    def _multiply(
        self,
        a: RowBuffer,
        b: Weights,
        c: RowBuffer,
        row: int,
        block: Block,
        scratch: Scratch,
    ) -> None:
        """A block of C's rows from `row` on."""
        top, bottom, left, right = block
        column = left // self._tiles.n_tile * self._n_out
        b.compute(
            _part(a, row + top),
            bottom - top,
            (left, right),
            self._epilogue,
            _part(c, row + top, column),
            scratch,
        )

    def _a_rows(self, args: Arguments) -> RowBuffer:
        """Where A's rows are: in device memory, or gathered.

        Where C is of the same allocation, blocks of C could be written before A is read.
        """
        written = {id(args[piece.arg].memory) for flow in self._c for piece in flow}
        if self._a_view is not None and id(args[self._a_view.arg].memory) not in written:
            return self._a_view.rows(args)
        return self._gather_a(args).reshape(-1), 0, self._k

    def _c_rows(self, args: Arguments) -> RowBuffer:
        """Where C's rows go: into device memory, or to be scattered."""
        if self._c_view is not None:
            return self._c_view.rows(args)
        width = sum(self._columns_out)
        return np.empty(self._rows * width, dtype=np.uint16), 0, width


def _part(rows: RowBuffer, row: int, column: int = 0) -> RowBuffer:
    """A row buffer from a row and column on."""
    elements, first, stride = rows
    return elements, first + row * stride + column, stride
