"""The accuracy bars hold by machine code too: each model's vectors against float32 references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import array_code
import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2, TINY_GEMMA3
from references import (
    MIN_COSINE,
    MINILM,
    NEAR_BITS,
    TINY,
    TINY_CLS,
    check_vectors,
    load_references,
)
from safetensors.numpy import load_file

from npu_embed import Embedder, jit
from npu_embed.emulator.llvm import machine
from npu_embed.emulator.llvm.registers import REGISTERS

PACK_ROWS = 1024  # holds all texts of a model
EG2_MIN_COSINE = 0.9995  # see test_gemma.py and test_embedding_gemma2_images.py


@dataclass(frozen=True)
class Model:
    """The fixture of a model's bundle, its checkpoint, how near its vectors must be."""

    fixture: str
    checkpoint: Path
    lowest: float = MIN_COSINE


MODELS = {
    "tiny-bert": Model("tiny_bundle", TINY),
    "tiny-bert-cls": Model("tiny_cls_bundle", TINY_CLS),
    "minilm": Model("minilm_bundle", MINILM),
    "tiny-gemma3": Model("gemma3_bundle", TINY_GEMMA3),
    "tiny-eg2": Model("eg2_bundle", TINY_EG2, EG2_MIN_COSINE),
}


@pytest.fixture(params=list(REGISTERS))
def calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, compiled_kernels: ModuleType
) -> array_code.Calls:
    """The calls of machine code for these registers; the host's kernels are compiled too."""
    code = array_code.built(request.param)
    monkeypatch.setattr(jit, "kernels", compiled_kernels)
    monkeypatch.setattr(machine, "load", lambda: code)
    return array_code.recorded(monkeypatch)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_texts_vectors_are_the_references_alone_and_together(
    model: Model, calls: array_code.Calls, request: pytest.FixtureRequest
) -> None:
    wanted = load_references(model.checkpoint)
    with Embedder(
        request.getfixturevalue(model.fixture), "emulated", pack_rows=PACK_ROWS
    ) as embedder:
        together = embedder.embed(wanted.texts)
        assert embedder.stats.packs == 1
        alone = np.stack([embedder.embed(text) for text in wanted.texts])
    check_vectors(together, wanted.embeddings, model.lowest)
    check_vectors(alone, wanted.embeddings, model.lowest)
    assert np.abs(together - alone).max() < NEAR_BITS
    assert calls.gemm
    assert calls.attend


def test_images_vectors_are_the_references_alone_and_together(
    eg2_bundle: Path, calls: array_code.Calls
) -> None:
    stored = load_file(TINY_EG2 / "references.safetensors")
    images = [stored[f"image.{i}.rgb"] for i in range(3)]
    wanted = np.stack([stored[f"image.{i}.embedding"] for i in range(3)])
    with Embedder(eg2_bundle, "emulated") as embedder:
        together = embedder.embed_image(images)
        alone = np.stack([embedder.embed_image(image) for image in images])
    check_vectors(together, wanted, EG2_MIN_COSINE)
    check_vectors(alone, wanted, EG2_MIN_COSINE)
    assert np.abs(together - alone).max() < NEAR_BITS
    assert calls.gemm
    assert calls.attend
