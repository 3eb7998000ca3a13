"""The multi-head attention array program: O = softmax2(Q K^T) V, all rows of a bucket.

Base-2 softmax of scores the host has scaled; see docs/array-programs.md for streams and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .controller import Channel, Execution, Fault
from .flows import flow_words
from .mha_call import Column, MhaCall
from .program import check_waits, check_work, expect_words, read_rtp, refuse_other_flows

RTP_WORDS = 5
ROWS, KV, WINDOW, FIRST_HEAD, HEADS = range(RTP_WORDS)
NO_WINDOW = 0xFFFFFFFF


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
        columns: list[Column] = []
        for col, words in enumerate(rtp):
            first, heads = words[FIRST_HEAD], words[HEADS]
            if first + heads > self.heads:
                raise Fault(end, f"heads {first} to {first + heads - 1} of {self.heads}")
            first_kv = first // group
            kv_heads = (first + heads - 1) // group - first_kv + 1
            per_head = rows * self.head_dim // 2
            columns.append(
                Column(
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
        return MhaCall(self.heads, self.kv_heads, self.head_dim, rows, columns, limits)
