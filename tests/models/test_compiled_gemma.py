"""The Gemma encoders and the vision tower give the same vectors by numpy and compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2, TINY_GEMMA3
from references import F32, load_references
from safetensors.numpy import load_file

from npu_embed import Embedder, jit

PACK_ROWS = 1024
IMAGES = [load_file(TINY_EG2 / "references.safetensors")[f"image.{i}.rgb"] for i in range(3)]
TEXTS = load_references(TINY_GEMMA3).texts[::2]


def assert_same_vectors(
    compiled: ModuleType, monkeypatch: pytest.MonkeyPatch, vectors: Callable[[], F32]
) -> None:
    found = []
    for kernels in (None, compiled):
        monkeypatch.setattr(jit, "kernels", kernels)
        found.append(vectors())
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize(
    "fixture",
    ["gemma3_bundle", "gemma3_host_bundle", "eg2_bundle", "eg2_host_bundle", "published_bundle"],
)
def test_texts(
    fixture: str,
    compiled_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with Embedder(request.getfixturevalue(fixture), "emulated", pack_rows=PACK_ROWS) as embedder:
        assert_same_vectors(compiled_kernels, monkeypatch, lambda: embedder.embed(TEXTS))


@pytest.mark.parametrize("fixture", ["eg2_bundle", "eg2_host_bundle", "published_bundle"])
def test_images(
    fixture: str,
    compiled_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with Embedder(request.getfixturevalue(fixture), "emulated") as embedder:
        assert_same_vectors(compiled_kernels, monkeypatch, lambda: embedder.embed_image(IMAGES))
