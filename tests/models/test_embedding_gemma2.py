"""embedding_gemma2's texts: what can go wrong unseen turns vectors wrong, and bad bundles are told.

The tiny checkpoint sees |i - j| <= 12 on five of six layers, so that most texts are longer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bundle_edits import edited, with_tensors
from gemma_checkpoints import TINY_EG2
from numpy.typing import NDArray
from references import F32, References, check_vectors, cosines, load_references
from safetensors.numpy import load_file

from npu_embed import BundleError, Embedder
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.models.embedding_gemma2 import EmbeddingGemma2
from npu_embed.models.gemma import Pass
from npu_embed.packing import Pack
from npu_embed.trace import Timing

PACK_ROWS = 1024
WINDOW = 12
MIN_COSINE = 0.9995  # see test_gemma.py
WRONG = 0.998

WANTED: References = load_references(TINY_EG2)
LENGTHS: NDArray[np.intp] = np.array([len(ids) for ids in WANTED.ids])
LONG = LENGTHS > WINDOW + 1  # some key is outside some window
# A letter over and over: one more of the same keys moves hardly anything.
REPEATED = np.array(["x" * 50 in text for text in WANTED.texts])
TEXT = "language_model."


def embed(bundle: Path) -> F32:
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        return embedder.embed(WANTED.texts)


def lowest(bundle: Path) -> float:
    return float(cosines(embed(bundle), WANTED.embeddings).min())


def test_the_references_have_texts_on_both_sides_of_the_window() -> None:
    assert 3 <= LONG.sum() <= len(LONG) - 3
    assert LENGTHS.max() > 256  # the longest bucket is used


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eg2_bundle", "eg2_host_bundle"])
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_window_off_by_one_turns_every_long_text_wrong_and_no_short_one(
    name: str, window: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bundle = request.getfixturevalue(name)
    other = edited(bundle, tmp_path / "b", (f"param window {WINDOW}\n", f"param window {window}\n"))
    found = embed(other)
    assert cosines(found, WANTED.embeddings)[LONG & ~REPEATED].max() < MIN_COSINE
    short = LENGTHS <= WINDOW
    check_vectors(found[short], WANTED.embeddings[short], MIN_COSINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rope_local_base_freq 10000.0", "rope_local_base_freq 1000000.0"),
        ("rope_theta 1000000.0", "rope_theta 10000.0"),
        ("rms_norm_eps 1e-06", "rms_norm_eps 0.9"),
    ],
)
def test_another_param_turns_vectors_wrong(
    eg2_bundle: Path, tmp_path: Path, old: str, new: str
) -> None:
    assert lowest(edited(eg2_bundle, tmp_path / "b", (old, new))) < WRONG


@pytest.mark.slow
def test_values_without_their_norm_turn_vectors_wrong(
    eg2_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddingGemma2, "value_norm", False)
    assert lowest(eg2_bundle) < WRONG


@pytest.mark.slow
@pytest.mark.parametrize("layers", [range(6), range(2, 4)])
def test_a_layer_scalar_of_one_turns_vectors_wrong(
    eg2_bundle: Path, tmp_path: Path, layers: range
) -> None:
    ones = {f"{TEXT}layers.{i}.layer_scalar": np.ones(1, np.float32) for i in layers}
    assert lowest(with_tensors(eg2_bundle, tmp_path / "b", ones)) < WRONG


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor",
    [
        "norm.weight",
        "ple.per_layer_projection_norm.weight",
        "layers.2.ple_block.post_per_layer_input_norm.weight",
        "layers.2.post_attention_layernorm.weight",
        "layers.2.self_attn.q_norm.weight",
    ],
)
def test_a_norm_without_its_weight_turns_vectors_wrong(
    eg2_bundle: Path, tmp_path: Path, tensor: str
) -> None:
    stored = load_file(eg2_bundle / "tensors.safetensors")[TEXT + tensor]
    ones = {TEXT + tensor: np.ones_like(stored)}
    assert lowest(with_tensors(eg2_bundle, tmp_path / "b", ones)) < WRONG


@pytest.mark.slow
def test_inputs_of_another_layer_turn_vectors_wrong(
    eg2_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EmbeddingGemma2._gate
    monkeypatch.setattr(
        EmbeddingGemma2, "_gate", lambda model, p, index: right(model, p, (index + 1) % 6)
    )
    assert lowest(eg2_bundle) < WRONG


def test_a_layers_input_is_the_norm_of_its_columns_scaled(eg2_bundle: Path) -> None:
    bundle = Bundle.open(eg2_bundle)
    model = EmbeddingGemma2(Session.open("emulated"), bundle, bundle.max_rows)
    c = np.random.default_rng(0).standard_normal((3, 384)).astype(np.float32)
    bits = to_bf16(c * np.float32(0.01))  # so small that eps counts
    buffers = model._slot(0)
    buffers["gate"].put(np.ones((3, 64), np.float32))
    pack, rows = Pack((0,), (0,), (3,), 3), (bits.reshape(-1), 0, 384)
    p = Pass(np.zeros((3, 64), np.float32), buffers, pack, np.arange(3)[:, None], Timing(), rows)
    weight = bundle.tensors.f32(f"{TEXT}ple.per_layer_projection_norm.weight")
    for index in range(6):
        x = to_f32(bits[:, index * 64 : (index + 1) * 64]).astype(np.float64) * 64**-0.5
        wanted = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight
        model._gate(p, index)
        np.testing.assert_allclose(buffers["gated"].get(3, 64), wanted, rtol=2.0**-8)
    model.close()
    bundle.close()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("per_layer_inputs,", "", "not the same: per_layer_inputs"),
        (",embedding_projection", "", "not the same: embedding_projection"),
        ("head_dim.full 64", "head_dim.full 32", "mha name=full head_dim is 64, wanted 32"),
        ("heads.sliding 4", "heads.sliding 3", "3 heads.sliding of 32 numbers, 2 of keys"),
        ("per_layer_input 64", "per_layer_input 65", "ple n_out is 384, wanted at least 390"),
        ("param dim 96", "param dim 95", "shape"),
        ("name=full ", "name=fill ", "no mha name=full record, embedding_gemma2 needs"),
        ("gemm ple ctx", "gemm pie ctx", "right after|no ple record"),
        ("param max_tokens 512", "param max_tokens 513", "longest mha bucket name=sliding has 512"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused(
    eg2_bundle: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    bundle = edited(eg2_bundle, tmp_path / "b", (old, new))
    with pytest.raises(BundleError, match=words):
        Embedder(bundle, "emulated")


@pytest.mark.parametrize(
    "tensor", ["ple.packed", "layers.3.ple_gate.packed", "layers.3.layer_scalar"]
)
def test_a_missing_tensor_is_named(eg2_bundle: Path, tmp_path: Path, tensor: str) -> None:
    bundle = with_tensors(eg2_bundle, tmp_path / "b", {TEXT + tensor: None})
    with pytest.raises(BundleError, match=f"tensor {TEXT}{tensor} missing"):
        Embedder(bundle, "emulated")
