"""The GEMM array program: C = epilogue(A B + bias), a chunk of rows after another.

bf16 operands, float32 accumulation, float32 epilogue, bf16 result. The streams and run-time
words are described in docs/array-programs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import epilogues
from .controller import Channel, Execution, Fault
from .gemm_call import GemmCall, Tiles
from .program import check_waits, check_work, expect_words, read_rtp, refuse_other_flows

RTP_WORDS = 6
CHUNKS, K_BLOCKS, N_BLOCKS, EPILOGUE, BIAS, ROWS_PER_CORE = range(RTP_WORDS)


@dataclass(frozen=True, slots=True)
class GemmProgram:
    """The compile-time constants of a GEMM xclbin.

    row_tile 0: compiled without the word ROWS_PER_CORE, every run takes all the rows a core can.
    """

    columns: int
    core_rows: int
    rows_per_core: int
    k_tile: int
    n_tile: int
    rtp_offset: int
    row_tile: int = 0

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
            words=RTP_WORDS if self.row_tile else RTP_WORDS - 1,
            active_word=N_BLOCKS,
            shared_words=(CHUNKS, K_BLOCKS, EPILOGUE, BIAS, ROWS_PER_CORE),
        )
        chunks, k_blocks, _, epilogue, bias, *rows_word = rtp[0]
        if epilogue not in range(epilogues.TANH + 1) or bias not in (0, 1):
            raise Fault(end, f"epilogue {epilogue}, bias {bias}: no such mode")
        tiles = self._tiles(end, *rows_word)
        n_blocks = [words[N_BLOCKS] for words in rtp]
        k = k_blocks * self.k_tile
        n_out = self.n_tile // 2 if epilogue == epilogues.GEGLU_TANH else self.n_tile
        rows = chunks * tiles.chunk_rows
        block_words = self.n_tile * (k // 2 + bias)
        a_words = chunks * tiles.rows_per_core * k // 2
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
        call = GemmCall(
            tiles, chunks, k_blocks, tuple(n_blocks), epilogue, bool(bias), n_out, a, b, c
        )
        n = sum(n_blocks) * self.n_tile
        check_work(run, rows * k + rows * n + call.weight_sets * k * n)
        return call

    def _tiles(self, end: int, rows_per_core: int = 0) -> Tiles:
        """What is computed at a time in a run of so many rows a core; 0 is all it can."""
        rows = rows_per_core or self.rows_per_core
        if rows > self.rows_per_core or (self.row_tile and rows % self.row_tile):
            raise Fault(
                end,
                f"{rows} rows a core, wanted a multiple of {self.row_tile} up to "
                f"{self.rows_per_core}, or 0 for those",
            )
        return Tiles(self.core_rows, rows, self.k_tile, self.n_tile)
