"""What an Embedder runs on the emulated NPU: its counters, and every run with its context."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cost_model import Gemm, Mha, Shape, Work

from npu_embed import Embedder
from npu_embed.driver import Counters
from npu_embed.flights import Flight
from npu_embed.loaded import MAX_COPIES
from npu_embed.npu import Npu
from npu_embed.runs import GemmRun, Run
from npu_embed.specs import DEFAULT_MHA

Place: TypeAlias = tuple[str, str]  # as Npu has it: xclbin file, kernel name
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Order:
    """Which texts share a forward.

    pack_rows: tokens of a pack at most; None is one text at a time, each run submitted by itself,
    as the reference runtime does.
    """

    pack_rows: int | None

    @property
    def name(self) -> str:
        """Its name in the output."""
        return "one" if self.pack_rows is None else "packed"

    def __str__(self) -> str:
        return "one at a time" if self.pack_rows is None else f"packs of {self.pack_rows}"


@dataclass(frozen=True, slots=True)
class Recording:
    """What one pass over the texts did: the contexts in the order of the submits, and the counts.

    bundle: its name. runs: by shape. submissions: of single runs and of lists. sha256: of the
    vectors.
    """

    bundle: str
    sequence: tuple[Place, ...]
    runs: Mapping[Shape, int]
    submissions: int
    texts: int
    tokens: int
    packs: int
    counters: Counters
    sha256: str

    @property
    def gemm_runs(self) -> int:
        """How many of the runs are GEMMs."""
        return sum(n for shape, n in self.runs.items() if isinstance(shape, Gemm))

    @property
    def contexts(self) -> int:
        """How many contexts it needed."""
        return len(set(self.sequence))

    def work(self, swaps: int) -> Work:
        """What it was for the cost model, with this many swaps.

        Each context that is dropped is taken to be created again; the first creation of each is
        loading, and left aside.
        """
        moved = self.counters.bytes_to_device + self.counters.bytes_from_device
        return Work(
            self.runs,
            self.submissions,
            switches=self.counters.switches,
            creations=swaps,
            host_elems=moved // BF16_BYTES,
        )


class _Recorder:
    """Stands between a model and its Npu, and notes what passes."""

    def __init__(self, npu: Npu) -> None:
        self.sequence: list[Place] = []
        self.runs: Counter[Shape] = Counter()
        self.lists = 0  # submissions, if several runs go off as a list
        self._npu = npu
        self._submit = npu.submit
        npu.submit = self.submit  # type: ignore[method-assign]

    def submit(self, runs: Sequence[Run]) -> Flight:
        """Note the runs, and submit them."""
        flight = self._submit(runs)
        self.sequence.append(self._npu.context_of(runs[0]))
        self.runs.update(self._shape(run) for run in runs)
        self.lists += -(-len(runs) // MAX_COPIES)
        return flight

    def _shape(self, run: Run) -> Shape:
        specs = self._npu.bundle.specs
        if isinstance(run, GemmRun):
            gemm = specs.gemms[run.key]
            return Gemm(gemm.stream_for(run.rows).rows, gemm.K, gemm.N, gemm.n_out)
        bucket = specs.mha_for(run.rows, run.name)
        assert bucket is not None  # it ran
        params = self._npu.bundle.manifest
        suffix = "" if bucket.name == DEFAULT_MHA else f".{bucket.name}"
        heads = params.param_int(f"num_attention_heads{suffix}", minimum=1)
        whole = params.param_int("hidden_size", minimum=1)
        return Mha(bucket.rows, heads, params.param_int(f"head_dim{suffix}", whole // heads))


def emulate(
    bundle: Path, texts: Sequence[str], order: Order, *, slots: int, policy: str, folder: Path
) -> Recording:
    """Embed the texts on an emulated NPU of so many slots, nothing loaded before.

    folder: holds the emulated NPU's slots, so that no other program has a part in them.
    """
    with variables(
        NPU_EMBED_EMU_DIR=str(folder),
        NPU_EMBED_EMU_SLOTS=str(slots),
        NPU_EMBED_EVICTION=policy,
        NPU_EMBED_RUNLISTS="off" if order.pack_rows is None else "on",
        NPU_EMBED_IDLE_RELEASE_MS="0",
    ):
        with Embedder(bundle, "emulated", pack_rows=order.pack_rows) as e:
            recorder = _Recorder(e._model.npu)
            name, before = e.bundle.name, e.stats
            groups = [[text] for text in texts] if order.pack_rows is None else [texts]
            digest = hashlib.sha256()
            for group in groups:
                digest.update(e.embed(group).tobytes())
            after = e.stats
    counters = after.counters.since(before.counters)
    assert counters.runs == recorder.runs.total(), "a run passed the recorder by"
    return Recording(
        bundle=name,
        sequence=tuple(recorder.sequence),
        runs=dict(recorder.runs),
        submissions=recorder.lists if counters.runlists else counters.runs,
        texts=after.texts - before.texts,
        tokens=after.tokens - before.tokens,
        packs=after.packs - before.packs,
        counters=counters,
        sha256=digest.hexdigest(),
    )


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """These environment variables, until the block ends."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
