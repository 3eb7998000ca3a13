"""gemma3_text (EmbeddingGemma): a Gemma encoder, a mean over tokens, Dense modules."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from itertools import pairwise
from typing import ClassVar

from ..bf16 import F32
from ..bundle import Bundle
from ..errors import BundleError
from ..runs import GemmRun
from ..schedule import Stretch, stretches
from ..specs import GemmSpec
from . import checks
from .gemma import Gemma, Pass
from .gemma_params import FULL, SLIDING

MAX_DENSE = 64


class Gemma3Text(Gemma):
    """A gemma3_text encoder on a device.

    Both types of layer have the same heads, and share kernels: a window is a word of the stream.
    Each Dense module is a GEMM whose rows are texts.
    """

    suffixes: ClassVar[Mapping[str, str]] = {SLIDING: "", FULL: ""}

    def _scale(self, bundle: Bundle) -> float:
        return 1 / math.sqrt(checks.positive(bundle.manifest, "query_pre_attn_scalar"))

    def _read(self, bundle: Bundle) -> None:
        count = bundle.manifest.param_int("dense", minimum=0, maximum=MAX_DENSE)
        self.after_pooling = tuple(f"dense.{i}" for i in range(count))
        # Width and length of a vector would look right without the last ones.
        found = sum(key.startswith("dense.") for key in bundle.specs.gemms)
        if found > count:
            raise BundleError(
                f"manifest.txt: {found} gemm records dense.*, wanted {count} by param dense; "
                "re-export the bundle."
            )

    def stages(self) -> list[str]:
        """What happens to a text, in order, as the manifest must name it."""
        found = ["embeddings", "layers", "norm", "pooling"]
        found += ["dense"] if self.after_pooling else []
        return [*found, "normalize"] if self.params.normalize else found

    def _sizes(self, gemms: Mapping[str, GemmSpec]) -> dict[str, tuple[int, int, int | None]]:
        d, dim = self.params.hidden_size, self.params.dim
        if not self.after_pooling:
            return {"down n_out": (gemms["down"].n_out, d, None), "dim": (dim, d, d)}
        modules = [gemms[key] for key in self.after_pooling]
        wanted: dict[str, tuple[int, int, int | None]] = {
            "dense.0 K": (modules[0].K, d, None),
            f"{modules[-1].key} n_out": (modules[-1].n_out, dim, None),
        }
        for before, after in pairwise(modules):
            wanted[f"{after.key} lda"] = (after.lda, before.c_stride, before.c_stride)
        return wanted

    def _widths(self, gemms: Mapping[str, GemmSpec]) -> dict[str, int]:
        widths = {key: gemms[key].c_stride for key in self.after_pooling}
        return {"pooled": gemms["dense.0"].lda, **widths} if widths else {}

    def _load(self) -> None:
        self._dense = [self.upload(key, key) for key in self.after_pooling]

    def _head(self, p: Pass, pooled: F32) -> Generator[Stretch, None, F32]:
        if not self.after_pooling:
            return pooled
        with p.timing.stage("pooling"):
            p.buffers["pooled"].put(pooled)
        inputs = ("pooled", *self.after_pooling)
        runs = [
            GemmRun(key, p.buffers[a], packed, p.buffers[key], len(pooled))
            for key, a, packed in zip(self.after_pooling, inputs, self._dense, strict=False)
        ]
        yield from stretches(self.npu, "gemm", runs)
        return p.buffers[self.after_pooling[-1]].get(len(pooled), self.dim)
