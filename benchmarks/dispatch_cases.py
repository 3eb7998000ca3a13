"""The submits that dispatch.py measures, and their arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.bundle import Bundle
from npu_embed.device import Buffer, Session
from npu_embed.npu import Npu
from npu_embed.rows import Rows
from npu_embed.runs import GemmRun, MhaRun, Run

F32 = NDArray[np.float32]

GEMM_TARGET_US = 60.0
MHA_TARGET_US = 40.0
TEXTS = 64  # of a pack, each an MHA run
LONGEST, SHORTEST = 16, 5  # tokens, as a pack of short texts has them: like lengths together
LAYER = "encoder.layer.0"
GEMMS = {"qkv": ("x", "qkv"), "o": ("attended", "out"), "down": ("inner", "out")}  # A, C


@dataclass(frozen=True, slots=True)
class Case:
    """So many runs in one submit: what they are the n-th time, and the same arithmetic by hand."""

    name: str
    runs: int
    make: Callable[[int], Sequence[Run]]
    by_hand: Callable[[int], object]
    target_us: float | None = None


class Kernels:
    """A bert bundle's kernels on the emulated NPU, with buffers for TEXTS texts; closes itself.

    Raises:
        ValueError: the bundle is of another family.
    """

    def __init__(self, path: Path | str) -> None:
        self.bundle = Bundle.open(path)
        if "num_attention_heads" not in self.bundle.manifest.params:
            raise ValueError(
                f"{path}: a bundle of {self.bundle.family}, wanted one of the bert family."
            )
        self.heads = self.bundle.manifest.param_int("num_attention_heads", minimum=1)
        self.hidden_size = self.bundle.manifest.param_int("hidden_size", minimum=1)
        self.session = Session.open("emulated")
        self.npu = Npu(self.session, self.bundle)
        gemms = self.bundle.specs.gemms
        rows = TEXTS * LONGEST + self.bundle.specs.mhas[-1].rows
        widths = {
            "x": gemms["qkv"].lda,
            "qkv": gemms["qkv"].c_stride,
            "attended": gemms["o"].lda,
            "inner": gemms["up"].c_stride,
            "out": gemms["o"].c_stride,
        }
        self.buffers = {name: Rows(self.session, rows, width) for name, width in widths.items()}
        self.weights = {key: self._packed(key) for key in GEMMS}
        generator = np.random.default_rng(0)
        for name in ("x", "qkv"):
            numbers = generator.standard_normal((rows, widths[name]), dtype=np.float32)
            self.buffers[name].put(numbers)

    def _packed(self, key: str) -> Buffer:
        packed = self.bundle.tensors.raw(f"{LAYER}.{key}.packed")
        buffer = self.session.buffer(packed.nbytes)
        buffer.host[:] = packed
        buffer.to_device(0, packed.nbytes)
        return buffer

    def gemm(self, key: str) -> GemmRun:
        """A GEMM of one whole chunk of rows, which has no activation, as a layer runs it."""
        a, c = GEMMS[key]
        rows = self.bundle.specs.gemms[key].M
        return GemmRun(key, self.buffers[a], self.weights[key], self.buffers[c], rows)

    def attention(self, lengths: Sequence[int]) -> list[MhaRun]:
        """The attention of texts that stand one after another."""
        starts = np.cumsum([0, *lengths[:-1]])
        qkv, attended = self.buffers["qkv"], self.buffers["attended"]
        return [
            MhaRun(qkv, attended, n, row=int(row)) for n, row in zip(lengths, starts, strict=True)
        ]

    def busy_seconds(self) -> float:
        """What the emulated array computed so far."""
        busy: dict[str, float] = self.session.device.busy_seconds
        return sum(busy.values())

    def __enter__(self) -> Kernels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.npu.close()


def pack_lengths(number: int, texts: int = TEXTS) -> list[int]:
    """The lengths of a pack's texts, longest first; packs of other numbers are another list."""
    generator = np.random.default_rng(number)
    lengths = generator.integers(SHORTEST, LONGEST, size=texts, endpoint=True)
    return sorted((int(n) for n in lengths), reverse=True)


def cases(kernels: Kernels) -> list[Case]:
    """All that is measured."""
    same = kernels.attention(pack_lengths(0))
    alone = kernels.attention([LONGEST])
    gemm, pair = [kernels.gemm("qkv")], [kernels.gemm("o"), kernels.gemm("down")]
    hands = GemmByHand(kernels)
    attend = AttentionByHand(kernels)
    return [
        Case("GEMM", 1, lambda _: gemm, lambda _: hands("qkv"), GEMM_TARGET_US),
        Case("GEMM, two in a list", 2, lambda _: pair, lambda _: (hands("o"), hands("down"))),
        Case("MHA, in a list", TEXTS, lambda _: same, lambda _: attend(same), MHA_TARGET_US),
        # A pack's list is new in its first layer, and the same in the others.
        Case(
            "MHA, in a new list",
            TEXTS,
            lambda number: kernels.attention(pack_lengths(number + 1)),
            lambda number: attend(kernels.attention(pack_lengths(number + 1))),
        ),
        Case("MHA, alone", 1, lambda _: alone, lambda _: attend(alone)),
    ]


class GemmByHand:
    """The arithmetic of a GEMM run: A widened, times B, C rounded. B was widened before.

    The bias is left out, so that what is subtracted is rather too little.
    """

    def __init__(self, kernels: Kernels) -> None:
        generator = np.random.default_rng(1)
        self._operands = {}
        for key in kernels.weights:
            spec = kernels.bundle.specs.gemms[key]
            a = generator.standard_normal((spec.M, spec.K), dtype=np.float32)
            b = generator.standard_normal((spec.K, spec.N), dtype=np.float32)
            self._operands[key] = to_bf16(a), b

    def __call__(self, key: str) -> NDArray[np.uint16]:
        """C, bf16 bits."""
        a, b = self._operands[key]
        return to_bf16(to_f32(a) @ b)


class AttentionByHand:
    """The arithmetic of a list of attentions: of texts of one length together, rows of texts only.

    A bucket's other rows are left out, so that what is subtracted is rather too little.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._heads = kernels.heads
        self._head_dim = kernels.hidden_size // kernels.heads
        rows = TEXTS * LONGEST
        self._qkv = kernels.buffers["qkv"].bits(rows)[:, : 3 * kernels.hidden_size]

    def __call__(self, runs: Sequence[MhaRun]) -> list[NDArray[np.uint16]]:
        """What each group of texts of one length gives, bf16 bits [texts, heads, tokens, dim]."""
        found = []
        for n, group in groupby(runs, key=lambda run: run.rows):
            first, count = -1, 0
            for run in group:
                first, count = run.row if first < 0 else first, count + 1
            bits = self._qkv[first : first + count * n]
            parts = to_f32(bits).reshape(count, n, 3, self._heads, self._head_dim)
            q, k, v = parts.transpose(2, 0, 3, 1, 4)
            scores: F32 = q @ k.transpose(0, 1, 3, 2)
            np.exp2(scores - scores.max(axis=-1, keepdims=True), out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            found.append(to_bf16(scores @ v))
        return found
