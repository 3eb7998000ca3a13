"""What the tests of the Gemma exporters share: a bundle, a checkpoint to change, its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gemma_checkpoints import F32, linked_copy
from made_bundles import MakeBundle
from numpy.typing import NDArray
from safetensors.numpy import load_file

from npu_embed.bundle import Bundle
from npu_embed.exporters import export_checkpoint, selfcheck
from npu_embed.exporters.gemma_reference import AttentionShape, EmbeddingGemma2Reference, GemmaShape

# Two float computations of a unit vector in different orders; Hugging Face's is in float32.
REFERENCE_TOLERANCE = 1e-5
LONGEST = 20  # the first of the references that is longer than any window


class Loaded:
    """A checkpoint's tensors as the reference reads them."""

    def __init__(self, tensors: dict[str, F32]) -> None:
        self._tensors = tensors

    def f32(self, name: str) -> F32:
        return self._tensors[name]

    def rows(self, name: str, indices: NDArray[np.int32]) -> F32:
        return self._tensors[name][indices]


def eg2_reference(weights: dict[str, F32], window: int = 12) -> EmbeddingGemma2Reference:
    """The tiny embedding_gemma2's forward, or one with another window."""
    shape = GemmaShape(
        layer_types=["sliding"] * 5 + ["full"],
        attention={
            "sliding": AttentionShape(4, 2, 32, rope_theta=1e4, scale=1.0, window=window),
            "full": AttentionShape(4, 1, 64, rope_theta=1e6, scale=1.0, window=None),
        },
        rms_norm_eps=1e-6,
        normalize=True,
    )
    return EmbeddingGemma2Reference(Loaded(weights), shape)


def export_fixtures(
    tiny: Path, exporter: ModuleType, max_chunks: int, texts: tuple[str, ...]
) -> tuple[Any, ...]:
    """The fixtures (quick, weights, bundle, checkpoint) of a module about one tiny checkpoint.

    exporter: the module that makes its bundles, of as many chunks as hold the longest text;
    texts: what they check themselves by.
    """

    @pytest.fixture(autouse=True)
    def quick(monkeypatch: pytest.MonkeyPatch) -> None:
        """Fewer streams and texts for the bundles of single tests."""
        monkeypatch.setattr(exporter, "MAX_CHUNKS", max_chunks)
        monkeypatch.setattr(selfcheck, "self_check_texts", lambda _: texts)

    @pytest.fixture(scope="module")
    def weights() -> dict[str, F32]:
        """The checkpoint's tensors."""
        return load_file(tiny / "model.safetensors")

    @pytest.fixture(scope="module")
    def bundle(make_bundle: MakeBundle) -> Iterator[Bundle]:
        """The checkpoint's bundle, only to be read."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporter, "MAX_CHUNKS", max_chunks)
            made = make_bundle(f"{tiny.name}-{max_chunks}-chunks", partial(export_checkpoint, tiny))
        opened = Bundle.open(made)
        yield opened
        opened.close()

    @pytest.fixture
    def checkpoint(tmp_path: Path) -> Path:
        """A copy of the checkpoint, to be changed."""
        return linked_copy(tiny, tmp_path / "checkpoint")

    return quick, weights, bundle, checkpoint
