"""GEMM streams, packed weights and float64 results, made by hand from docs/array-programs.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from handmade import (
    BF16_HALF_ULP,
    F32,
    F32_ULP,
    F64,
    U16,
    Bench,
    Buffers,
    Push,
    bd,
    ramp,
    rtp,
    wait,
)

from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.emulator import txn


@dataclass(frozen=True)
class Tiles:
    """The compile-time constants of a GEMM; small ones, so that every edge is near.

    row_tile 0: the program takes no run-time word 5.
    """

    columns: int = 3
    core_rows: int = 2
    rows_per_core: int = 4
    k_tile: int = 16
    n_tile: int = 16
    row_tile: int = 0

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return self.core_rows * self.rows_per_core

    def bench(self) -> Bench:
        """An array with this program."""
        of_rows = {"row_tile": self.row_tile} if self.row_tile else {}
        return Bench(
            program="gemm",
            columns=self.columns,
            core_rows=self.core_rows,
            rows_per_core=self.rows_per_core,
            k_tile=self.k_tile,
            n_tile=self.n_tile,
            **of_rows,
        )


def packed_block(b: F32, bias: F32 | None, k_tile: int) -> U16:
    """n_tile columns of B, element by element in the order the page gives."""
    k, n_tile = b.shape
    bits = to_bf16(b)
    out: list[int] = []
    for k0 in range(0, k, k_tile):
        for columns in range(0, n_tile, 8):
            for ks in range(k0, k0 + k_tile, 8):
                for column in range(columns, columns + 8):
                    out.extend(int(bits[row, column]) for row in range(ks, ks + 8))
    head = np.zeros(0, np.uint16) if bias is None else bias.astype(np.float32).view(np.uint16)
    return np.concatenate([head, np.array(out, np.uint16)])


def packed(b: F32, bias: F32 | None, tiles: Tiles) -> U16:
    """All of B, block after block."""
    n = tiles.n_tile
    return np.concatenate(
        [
            packed_block(b[:, i : i + n], None if bias is None else bias[i : i + n], tiles.k_tile)
            for i in range(0, b.shape[1], n)
        ]
    )


@dataclass(frozen=True)
class Gemm:
    """A GEMM's sizes, and the stream that runs it. n_blocks: blocks of each active column.

    rows_word: run-time word 5, the rows a core computes; None = not written.
    """

    tiles: Tiles
    chunks: int
    k_blocks: int
    n_blocks: tuple[int, ...]
    epilogue: int = 0
    bias: bool = True
    lda: int = 0  # elements; 0 = no gap
    c_stride: int = 0
    ragged: bool = False  # the same words by descriptors that allow no view
    rows_word: int | None = None

    @property
    def k(self) -> int:
        """Columns of A."""
        return self.k_blocks * self.tiles.k_tile

    @property
    def n(self) -> int:
        """Columns of B."""
        return sum(self.n_blocks) * self.tiles.n_tile

    @property
    def n_out(self) -> int:
        """Columns of C that a block gives."""
        return self.tiles.n_tile // 2 if self.epilogue == 3 else self.tiles.n_tile

    @property
    def rows_per_core(self) -> int:
        """Rows of a chunk that each core computes."""
        return self.rows_word or self.tiles.rows_per_core

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk."""
        return self.tiles.core_rows * self.rows_per_core

    @property
    def rows(self) -> int:
        """Rows of A and C."""
        return self.chunks * self.chunk_rows

    @property
    def a_stride(self) -> int:
        """Elements of A a row."""
        return self.lda or self.k

    @property
    def out_stride(self) -> int:
        """Elements of C a row."""
        return self.c_stride or sum(self.n_blocks) * self.n_out

    def words(self) -> list[txn.Op]:
        """All run-time words."""
        ops = []
        for col in range(self.tiles.columns):
            blocks = self.n_blocks[col] if col < len(self.n_blocks) else 0
            values = [self.chunks, self.k_blocks, blocks, self.epilogue, int(self.bias)]
            if self.rows_word is not None:
                values.append(self.rows_word)
            for row in range(self.tiles.core_rows):
                ops += [rtp(col, row, word, value) for word, value in enumerate(values)]
        return ops

    def a_push(self, row: int) -> Push:
        """Core row `row`'s A."""
        t = self.tiles
        words = bd(
            self.rows_per_core * self.k // 2,
            (t.k_tile // 2, 1),
            (self.rows_per_core, self.a_stride // 2),
            t.k_tile // 2,
            (self.chunks, self.chunk_rows * self.a_stride // 2),
        )
        offset = row * self.rows_per_core * self.a_stride * 2
        return Push(row, "MM2S0", 0, words, offset, self.chunks, 0)

    def b_push(self, col: int) -> Push:
        """Column `col`'s packed blocks, once for each chunk."""
        block_words = self.tiles.n_tile * (self.k // 2 + int(self.bias))
        words = bd(self.n_blocks[col] * block_words)
        offset = sum(self.n_blocks[:col]) * block_words * 4
        return Push(col, "MM2S1", 1, words, offset, self.chunks, 1)

    def c_push(self, col: int) -> Push:
        """Column `col`'s results."""
        width = self.n_blocks[col] * self.n_out // 2
        words = bd(
            self.chunk_rows * width,
            (width, 1),
            (self.chunk_rows, self.out_stride // 2),
            1,
            (self.chunks, self.chunk_rows * self.out_stride // 2),
        )
        offset = sum(self.n_blocks[:col]) * self.n_out * 2
        return Push(col, "S2MM0", 2, words, offset, self.chunks, 2)

    def ops(self) -> list[txn.Op]:
        """The stream."""
        columns = range(len(self.n_blocks))
        pushes = [self.c_push(col) for col in columns]
        pushes += [self.a_push(row) for row in range(self.tiles.core_rows)]
        pushes += [self.b_push(col) for col in columns]
        if self.ragged:
            pushes = [part for push in pushes for part in in_two(push)]
        ops = self.words() + [op for push in pushes for op in push.ops()]
        for push in pushes:
            if push.channel == "S2MM0":
                ops.append(wait(push.col))
        return ops

    def wanted(self, a: F32, b: F32, bias: F32 | None) -> tuple[F64, F64]:
        """C in float64 from operands bf16 holds exactly, and the most it may be off."""
        sums = a.astype(np.float64) @ b.astype(np.float64)
        sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        if bias is not None:
            sums, sizes = sums + bias, sizes + np.abs(bias)
        value = epilogue64(sums, self.epilogue, self.tiles.n_tile)
        # A float32 sum of k + 1 terms, through an epilogue whose slope is at most 1.13 (a GeGLU
        # pair multiplies two such results), then one rounding to bf16.
        moved = 1.13 * (self.k + 1) * F32_ULP * sizes
        if self.epilogue == 3:
            halves = (-1, 2, self.tiles.n_tile // 2)
            gate, up = np.moveaxis(moved.reshape(len(a), *halves), 2, 0)
            gates, ups = np.moveaxis(sums.reshape(len(a), *halves), 2, 0)
            moved = (gate * (np.abs(ups) + up) + np.abs(gates) * up).reshape(len(a), -1)
        own = 4 * F32_ULP * np.abs(value) + GELU_ABSOLUTE
        return value, (BF16_HALF_ULP * (np.abs(value) + moved) + moved + own)


# Float32 GELU near its zero tail: x/2 * (1 + erf) cancels to a few ulps of 1, times |x| <= 6.
GELU_ABSOLUTE = 6 / 2 * 4 * F32_ULP


def in_two(push: Push) -> Iterator[Push]:
    """The same words in the same order by two descriptors, so that no single one covers them."""
    length, _, _, w3, w4, w5, w6, w7 = push.words
    d0, d1 = w3 >> 20, w4 >> 20 & 0x3FF
    if push.repeat == 1 and d0 and d1 and length == d0 * d1 and d1 > 1:
        first = d1 // 2
        for row, rows, bd_id in ((0, first, push.bd_id), (first, d1 - first, push.bd_id + 8)):
            stride = (w4 & 0xFFFFF) + 1
            words = [rows * d0, 0, 0, w3, w4 & ~(0x3FF << 20) | rows << 20, w5, w6, w7]
            offset = push.offset_bytes + row * stride * 4
            yield Push(push.col, push.channel, push.arg, words, offset, 1, bd_id)
        return
    # One push a pass, each with the iteration's step in its offset.
    step = (w6 & 0xFFFFF) + 1 if (w6 >> 20 & 0x3F) else 0
    for i in range(push.repeat):
        words = [length, 0, 0, w3, w4, w5, 0, w7]
        offset = push.offset_bytes + i * step * 4
        yield Push(push.col, push.channel, push.arg, words, offset, 1, push.bd_id + 3 * i)


def gelu_erf64(x: F64) -> F64:
    """x/2 (1 + erf(x / sqrt 2)), without cancellation."""
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    result: F64 = x / 2 * erfc(-x / math.sqrt(2))
    return result


def gelu_tanh64(x: F64) -> F64:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    result: F64 = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def epilogue64(x: F64, epilogue: int, n_tile: int) -> F64:
    """What the page says an epilogue does."""
    if epilogue == 3:
        tiles = x.reshape(len(x), -1, n_tile)
        gate, up = tiles[:, :, : n_tile // 2], tiles[:, :, n_tile // 2 :]
        return np.asarray(gelu_tanh64(gate) * up).reshape(len(x), -1)
    if epilogue == 0:
        return x
    if epilogue == 4:
        return np.asarray(np.tanh(x))
    return gelu_erf64(x) if epilogue == 1 else gelu_tanh64(x)


CANARY = 0x1234


class Case:
    """A GEMM's operands in buffers, and what must come out."""

    def __init__(self, gemm: Gemm, seed: int = 0) -> None:
        self.gemm = gemm
        self.a = ramp((gemm.rows, gemm.k), seed)
        self.b = ramp((gemm.k, gemm.n), seed + 1, 1 / np.sqrt(gemm.k))
        self.bias: F32 | None = None
        if gemm.bias:
            self.bias = np.random.default_rng(seed + 2).standard_normal(gemm.n).astype(np.float32)
        self.bench = gemm.tiles.bench()
        self.buffers = Buffers()
        a_rows = np.full((gemm.rows, gemm.a_stride), CANARY, np.uint16)
        a_rows[:, : gemm.k] = to_bf16(self.a)
        self.buffers.add(a_rows)
        self.buffers.add(packed(self.b, self.bias, gemm.tiles))
        self.buffers.add(np.full((gemm.rows, gemm.out_stride), CANARY, np.uint16))

    def run(self, ops: list[txn.Op] | None = None) -> Case:
        self.bench.run(self.gemm.ops() if ops is None else ops, self.buffers)
        return self

    @property
    def c(self) -> U16:
        """The whole result buffer [rows, c_stride]."""
        return self.buffers.bits(2).reshape(self.gemm.rows, -1)

    def check(self) -> None:
        width = sum(self.gemm.n_blocks) * self.gemm.n_out
        wanted, off = self.gemm.wanted(self.a, self.b, self.bias)
        found = to_f32(np.ascontiguousarray(self.c[:, :width]))
        assert (np.abs(found - wanted) <= off).all(), np.abs(found - wanted).max()
        assert (self.c[:, width:] == CANARY).all(), "columns past the result were written"


def all_cores(word: int, value: int, columns: range = range(2)) -> list[txn.Op]:
    return [rtp(col, row, word, value) for col in columns for row in range(2)]
