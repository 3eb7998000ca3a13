"""Milliseconds on an NPU2 (Ryzen AI 300, 8 columns), modelled from public figures, not measured.

Nothing here was measured by this project, which has not run on hardware yet. Each constant names
the figure it comes from. Three of them are fitted to published times of the reference runtime; what
the same constants say of its other times shows how far to trust them (reference_runtime.py).

Not modelled: loading streams into a context, page faults, power states, and the host's work going
on beside the device's, so that a total is what it takes without any overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeAlias

# A switch between two resident contexts that are 8 columns wide. Source: taconite's XRT shim
# says 90 us a tile, 2.9 ms for an 8-column GEMM; its documentation, about 2 ms.
SWITCH_MS = 2.9

# Creating a hardware context. Source: amd/Triton-XDNA, pull request 113, on a Strix.
CREATE_MS = 35.0

# One run submitted by itself from a host runtime, and a run of a list of 64. Source: IRON's
# iron_batch log. In between: a line through both, so much a submission and so much a run.
SINGLE_RUN_MS = 0.1698
LISTED_RUN_MS = 0.0363
LISTED_RUNS = 64
RUN_MS = (LISTED_RUNS * LISTED_RUN_MS - SINGLE_RUN_MS) / (LISTED_RUNS - 1)
SUBMISSION_MS = SINGLE_RUN_MS - RUN_MS

# The GEMM kernel: M 1024, K 1536, N 6144 in 1.143 ms with 47 MB moved; of that 0.107 ms is the
# floor of a run. Source: amd/IRON, flm.GEMM. Which of the two rates bounded it is not known, so a
# GEMM takes what the slower of the two says.
GEMM_FLOOR_MS = 0.107
GEMM_MS = 1.143
GEMM_FLOP_PER_MS = 2 * 1024 * 1536 * 6144 / (GEMM_MS - GEMM_FLOOR_MS)
GEMM_BYTES_PER_MS = 47e6 / (GEMM_MS - GEMM_FLOOR_MS)

# The kernel computes whole blocks of 256 rows. Source: flm.GEMM, M % 256 == 0 (4 core rows of 64).
GEMM_BLOCK_ROWS = 256

# Weights as two bfp16 parts (9 bytes for 8 weights each), multiplied one after the other.
# Deduced from 288 M GEMM weights in the reference's published bundle of about 770 MB; that the
# second part takes as long as the first is assumed.
WEIGHT_PARTS = 2
WEIGHT_BYTES = WEIGHT_PARTS * 9 / 8

# FITTED to the reference's 0.25 s for the 16 attention runs of an image (2,560 rows, 12 heads of
# 64), less 16 submissions and the 16 switches that such a time includes: 322 GFLOP in 201 ms.
MHA_FLOP_PER_MS = 1.6e9

# FITTED to the reference's published times, both at once. Host work an element that goes to or
# comes from the device (conversion, norm, residual): the image's 1.15 s less the NPU's 0.6 s.
# Attention on the host: the 1.7 s of a text of 1,421 tokens.
HOST_NS_PER_ELEM = 1.0
HOST_ATTENTION_FLOP_PER_MS = 1.3e8


@dataclass(frozen=True, slots=True)
class Gemm:
    """C [rows, out_columns] = epilogue(A [rows, K] B [K, N]); gated, out_columns are N / 2."""

    rows: int
    K: int
    N: int
    out_columns: int

    @property
    def ms(self) -> float:
        """The array's time, the submission left aside."""
        rows = -(-self.rows // GEMM_BLOCK_ROWS) * GEMM_BLOCK_ROWS
        flop = WEIGHT_PARTS * 2 * rows * self.K * self.N
        moved = 2 * rows * (self.K + self.out_columns) + WEIGHT_BYTES * self.K * self.N
        return max(flop / GEMM_FLOP_PER_MS, moved / GEMM_BYTES_PER_MS)


@dataclass(frozen=True, slots=True)
class Mha:
    """Attention of all rows of a bucket to all of them."""

    rows: int
    heads: int
    head_dim: int

    @property
    def ms(self) -> float:
        """The array's time, the submission left aside."""
        return 4 * self.heads * self.rows**2 * self.head_dim / MHA_FLOP_PER_MS


Shape: TypeAlias = Gemm | Mha


@dataclass(frozen=True)
class Work:
    """What was run: how many runs of each shape, in how many submissions, and what else it took.

    host_elems: elements that went to or came from the device. host_attention_flop: of attention
    on the host.
    """

    runs: Mapping[Shape, int]
    submissions: int
    switches: int = 0
    creations: int = 0
    host_elems: int = 0
    host_attention_flop: int = 0

    @cached_property
    def gemm_ms(self) -> float:
        """The array's time in GEMMs."""
        return sum(n * shape.ms for shape, n in self.runs.items() if isinstance(shape, Gemm))

    @cached_property
    def mha_ms(self) -> float:
        """The array's time in attention."""
        return sum(n * shape.ms for shape, n in self.runs.items() if isinstance(shape, Mha))


@dataclass(frozen=True, slots=True)
class Cost:
    """Modelled milliseconds: creating contexts, switching, submitting, array, host."""

    create: float
    switch: float
    submit: float
    gemm: float
    mha: float
    host: float

    @classmethod
    def of(cls, work: Work) -> Cost:
        """What work costs."""
        return cls(
            create=work.creations * CREATE_MS,
            switch=work.switches * SWITCH_MS,
            submit=work.submissions * SUBMISSION_MS + sum(work.runs.values()) * RUN_MS,
            gemm=work.gemm_ms,
            mha=work.mha_ms,
            host=work.host_elems * HOST_NS_PER_ELEM / 1e6
            + work.host_attention_flop / HOST_ATTENTION_FLOP_PER_MS,
        )

    @property
    def npu(self) -> float:
        """All but the host's part: what a clock round the runs shows."""
        return self.total - self.host

    @property
    def total(self) -> float:
        """All of it, nothing overlapping."""
        return self.create + self.switch + self.submit + self.gemm + self.mha + self.host

    def each(self, count: int) -> dict[str, float]:
        """The parts and the total divided by count, for JSON."""
        parts = {f.name: round(getattr(self, f.name) / count, 4) for f in fields(self)}
        return {**parts, "total": round(self.total / count, 4)}
