"""Attention streams and float64 results, made by hand from docs/array-programs.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from handmade import BF16_HALF_ULP, F32, F32_ULP, F64, NO_WINDOW, Bench, Push, bd, rtp, wait

from npu_embed.emulator import txn


@dataclass(frozen=True)
class Mha:
    """An attention's sizes, and the stream that runs it over one buffer with q, k and v abreast.

    shares: (first head, heads) of each active column. kv and window: of the cores, by (column,
    row), that differ from all_kv (0 = all rows) and all_window.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    shares: tuple[tuple[int, int], ...]
    kv: Mapping[tuple[int, int], int] = field(default_factory=dict)
    window: Mapping[tuple[int, int], int] = field(default_factory=dict)
    all_kv: int = 0
    all_window: int = NO_WINDOW
    columns: int = 3
    core_rows: int = 2
    ragged: bool = False

    def bench(self) -> Bench:
        """An array with this program."""
        return Bench(
            program="mha",
            columns=self.columns,
            core_rows=self.core_rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def width(self) -> int:
        """Elements of a row of the q k v buffer."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def limits(self, col: int, row: int) -> tuple[int, int]:
        """(kv, window) of a core."""
        return (
            self.kv.get((col, row), self.all_kv or self.rows),
            self.window.get((col, row), self.all_window),
        )

    def words(self) -> list[txn.Op]:
        """All run-time words."""
        ops = []
        for col in range(self.columns):
            first, count = self.shares[col] if col < len(self.shares) else (0, 0)
            for row in range(self.core_rows):
                values = (self.rows, *self.limits(col, row), first, count)
                ops += [rtp(col, row, word, value) for word, value in enumerate(values)]
        return ops

    def kv_share(self, col: int) -> tuple[int, int]:
        """(first, number of) key/value heads of a column."""
        first, count = self.shares[col]
        group = self.heads // self.kv_heads
        return first // group, (first + count - 1) // group - first // group + 1

    def _push(
        self,
        col: int,
        channel: str,
        arg: int,
        heads: tuple[int, int],
        at: int,
        stride: int,
    ) -> Push:
        first, count = heads
        d = self.head_dim
        words = bd(count * self.rows * d // 2, (d // 2, 1), (self.rows, stride // 2), d // 2)
        return Push(col, channel, arg, words, (at + first * d) * 2, bd_id=arg)

    def pushes(self, col: int) -> list[Push]:
        """O, Q, K, V of a column."""
        q, kv = self.shares[col], self.kv_share(col)
        k_at = self.heads * self.head_dim
        v_at = k_at + self.kv_heads * self.head_dim
        return [
            self._push(col, "S2MM0", 3, q, 0, self.heads * self.head_dim),
            self._push(col, "MM2S0", 0, q, 0, self.width),
            self._push(col, "MM2S1", 1, kv, k_at, self.width),
            self._push(col, "MM2S1", 2, kv, v_at, self.width),
        ]

    def ops(self) -> list[txn.Op]:
        """The stream."""
        pushes = [push for col in range(len(self.shares)) for push in self.pushes(col)]
        if self.ragged:
            pushes = [part for push in pushes for part in by_head(push, self)]
        ops = self.words() + [op for push in pushes for op in push.ops()]
        ops += [wait(push.col) for push in pushes if push.channel == "S2MM0"]
        return ops

    def wanted(self, qkv: F32) -> tuple[F64, F64]:
        """O [rows, heads, head_dim] in float64, and the most it may be off."""
        x = qkv.astype(np.float64)
        d, group = self.head_dim, self.heads // self.kv_heads
        q = x[:, : self.heads * d].reshape(self.rows, self.heads, d)
        k = x[:, self.heads * d :][:, : self.kv_heads * d].reshape(self.rows, self.kv_heads, d)
        v = x[:, (self.heads + self.kv_heads) * d :].reshape(self.rows, self.kv_heads, d)
        out, off = np.zeros((2, self.rows, self.heads, d))
        column = {h: c for c, (f, n) in enumerate(self.shares) for h in range(f, f + n)}
        for h in range(self.heads):
            for i in range(self.rows):
                core = i * self.core_rows // self.rows
                kv, window = self.limits(column[h], core)
                keys = [j for j in range(kv) if abs(i - j) <= window]
                if not keys:
                    continue
                s = k[keys, h // group] @ q[i, h]
                p = np.exp2(s - s.max())
                p /= p.sum()
                values = v[keys, h // group]
                out[i, h] = p @ values
                # p rounded to bf16, the result rounded to bf16, and float32 scores: d products,
                # whose error is that of an exponent.
                scores = (d + 4) * F32_ULP * (np.abs(k[keys, h // group]) @ np.abs(q[i, h])).max()
                p_off = BF16_HALF_ULP + 2 * scores + len(keys) * F32_ULP
                spread = p @ np.abs(values)
                off[i, h] = BF16_HALF_ULP * np.abs(out[i, h]) + (1 + BF16_HALF_ULP) * p_off * spread
        return out, off


def by_head(push: Push, mha: Mha) -> Iterator[Push]:
    """The same words in the same order by a descriptor for each head."""
    length, _, _, w3, w4, w5, w6, w7 = push.words
    per_head = mha.rows * mha.head_dim // 2
    for i in range(length // per_head):
        words = [per_head, 0, 0, w3, w4, w5, w6, w7]
        offset = push.offset_bytes + i * mha.head_dim * 2
        yield Push(push.col, push.channel, push.arg, words, offset, 1, push.bd_id + 4 * i)
