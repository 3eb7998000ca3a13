"""gemma3_text: what of it can go wrong unseen turns its long texts wrong, and bad bundles are told.

The tiny checkpoint sees |i - j| <= 8 on five of six layers, so that most texts are longer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bundle_edits import edited, with_tensors
from gemma_checkpoints import TINY_GEMMA3
from numpy.typing import NDArray
from references import F32, MIN_COSINE, References, check_vectors, cosines, load_references
from safetensors.numpy import load_file

from npu_embed import BundleError, Embedder
from npu_embed.bf16 import to_bf16, to_f32
from npu_embed.tensors import SAFETENSORS, write_safetensors

PACK_ROWS = 1024
WINDOW = 8
TABLE = "embed_tokens.weight"

WANTED: References = load_references(TINY_GEMMA3)
LENGTHS: NDArray[np.intp] = np.array([len(ids) for ids in WANTED.ids])
LONG = LENGTHS > WINDOW + 1  # some key is outside some window
# A letter over and over: one more of the same keys moves hardly anything.
REPEATED = np.array(["x" * 50 in text for text in WANTED.texts])


def embed(bundle: Path) -> F32:
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        return embedder.embed(WANTED.texts)


def test_the_references_have_texts_on_both_sides_of_the_window() -> None:
    assert 3 <= LONG.sum() <= len(LONG) - 3
    assert LENGTHS.max() == 256  # as long as the model's texts can be


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_bundle", "gemma3_host_bundle"])
@pytest.mark.parametrize("window", [0, WINDOW - 1, WINDOW + 1, 2 * WINDOW])
def test_another_window_turns_every_long_text_wrong_and_no_short_one(
    name: str, window: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bundle = request.getfixturevalue(name)
    other = edited(bundle, tmp_path / "b", (f"param window {WINDOW}\n", f"param window {window}\n"))
    found = cosines(embed(other), WANTED.embeddings)
    assert found[LONG & ~REPEATED].max() < MIN_COSINE
    if window >= WINDOW - 1:
        short = LENGTHS <= WINDOW
        check_vectors(embed(other)[short], WANTED.embeddings[short])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rope_local_base_freq 10000.0", "rope_local_base_freq 1000000.0"),
        ("rope_theta 1000000.0", "rope_theta 10000.0"),
        ("query_pre_attn_scalar 32.0", "query_pre_attn_scalar 256.0"),
        ("rms_norm_eps 1e-06", "rms_norm_eps 0.9"),
        ("attention,full_attention", "attention,sliding_attention"),
    ],
)
def test_another_param_turns_vectors_wrong(
    gemma3_bundle: Path, tmp_path: Path, old: str, new: str
) -> None:
    other = edited(gemma3_bundle, tmp_path / "b", (old, new))
    assert cosines(embed(other), WANTED.embeddings).min() < MIN_COSINE - 0.0005


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor",
    [
        "norm.weight",
        "layers.2.self_attn.q_norm.weight",
        "layers.2.self_attn.k_norm.weight",
        "layers.2.post_attention_layernorm.weight",
        "layers.2.post_feedforward_layernorm.weight",
    ],
)
def test_a_norm_by_its_weight_and_not_by_one_more_turns_vectors_wrong(
    gemma3_bundle: Path, tmp_path: Path, tensor: str
) -> None:
    stored = load_file(gemma3_bundle / "tensors.safetensors")[tensor]
    other = with_tensors(gemma3_bundle, tmp_path / "b", {tensor: stored - np.float32(1)})
    assert cosines(embed(other), WANTED.embeddings).min() < MIN_COSINE - 0.0005


@pytest.mark.slow
def test_a_bfloat16_table_of_embeddings_gives_what_its_numbers_give_in_float32(
    gemma3_bundle: Path, tmp_path: Path
) -> None:
    found = []
    tensors = load_file(gemma3_bundle / SAFETENSORS)
    bits = to_bf16(tensors[TABLE])
    for name, table in (("bf16", bits), ("f32", to_f32(bits))):
        bundle = edited(gemma3_bundle, tmp_path / name)
        bf16 = (TABLE,) if name == "bf16" else ()
        write_safetensors(bundle / SAFETENSORS, {**tensors, TABLE: table}, bf16)
        found.append(embed(bundle))
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != embed(gemma3_bundle)).any()


def test_texts_of_one_pack_have_positions_of_their_own(gemma3_bundle: Path) -> None:
    texts = ["the same text, word for word"] * 40
    with Embedder(gemma3_bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        found = embedder.embed(texts)
    np.testing.assert_allclose(found, np.tile(found[0], (40, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("param window 8", "param window -1", "param window is '-1', wanted an integer 0 to"),
        ("param dense 2", "param dense 1", "2 gemm records dense.*, wanted 1 by param"),
        ("param dense 2", "param dense 3", "no dense.2 record, gemma3_text needs gemm qkv, o,"),
        ("norm,pooling,dense", "norm,pooling", "not the same: dense"),
        ("layers,norm,pooling", "layers,pooling", "not the same: norm"),
        ("param pooling mean", "param pooling cls", "pooling cls, wanted mean"),
        ("param attention npu", "param attention gpu", "attention gpu, wanted npu, host"),
        ("gelu_pytorch_tanh", "silu", "hidden_activation silu, wanted gelu_pytorch_tanh"),
        ("attention,full_attention", "attention,chunked", "layer_types has 6 of chunked, slid"),
        ("num_hidden_layers 6", "num_hidden_layers 7", "layer_types has 6 of"),
        ("num_key_value_heads 1", "num_key_value_heads 2", "3 heads of 32 numbers, 2 of keys"),
        ("param head_dim 32", "param head_dim 31", "3 heads of 31 numbers"),
        ("param head_dim 32", "param head_dim 34", "head_dim is 32, wanted 34 by the params"),
        ("num_attention_heads 3", "num_attention_heads 2", "mha heads is 3, wanted 2 by the"),
        ("rope_theta 1000000.0", "rope_theta 0", "rope_theta is 0, wanted a number above 0"),
        ("rms_norm_eps 1e-06", "rms_norm_eps 1", "rms_norm_eps is 1, wanted a number below 1"),
        ("rms_norm_eps 1e-06", "rms_norm_eps -1", "rms_norm_eps is -1, wanted a number above 0"),
        ("query_pre_attn_scalar 32.0", "query_pre_attn_scalar nan", "wanted a finite number"),
        ("intermediate_size 224", "intermediate_size 300", "gate_up n_out is 256, wanted at"),
        ("param max_tokens 256", "param max_tokens 512", "longest mha bucket has 256 rows"),
        ("param dim 96", "param dim 500", "dense.1 n_out is 128, wanted at least 500"),
        ("hidden_size 96", "hidden_size 90", "shape"),
        ("vocab_size 1400", "vocab_size 1399", "shape"),
        ("gemm gate_up ctx", "gemm gated_up ctx", "follows|right after|no gate_up record"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused(
    gemma3_bundle: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    bundle = edited(gemma3_bundle, tmp_path / "b", (old, new))
    with pytest.raises(BundleError, match=words):
        Embedder(bundle, "emulated")


def test_a_bundle_without_attention_kernels_is_refused_unless_the_host_attends(
    gemma3_host_bundle: Path, tmp_path: Path
) -> None:
    change = ("param attention host", "param attention npu")
    bundle = edited(gemma3_host_bundle, tmp_path / "b", change)
    with pytest.raises(BundleError, match=r"no mha record, gemma3_text needs gemm qkv, .* mha"):
        Embedder(bundle, "emulated")


@pytest.mark.parametrize("tensor", ["layers.3.o.packed", "dense.1.packed", "norm.weight"])
def test_a_missing_tensor_is_named(gemma3_bundle: Path, tmp_path: Path, tensor: str) -> None:
    bundle = with_tensors(gemma3_bundle, tmp_path / "b", {tensor: None})
    with pytest.raises(BundleError, match=f"tensor {tensor} missing"):
        Embedder(bundle, "emulated")


@pytest.mark.slow
def test_without_dense_modules_the_pooled_rows_are_the_embeddings(
    gemma3_bundle: Path, tmp_path: Path
) -> None:
    bundle = edited(
        gemma3_bundle,
        tmp_path / "b",
        ("param dense 2", "param dense 0"),
        ("pooling,dense,", "pooling,"),
        ("gemm dense.", "unknown dense."),
        ("gemm_chunks dense.", "unknown dense."),
        ("gemm_rows dense.", "unknown dense."),
    )
    found = embed(bundle)
    assert found.shape == WANTED.embeddings.shape
    assert cosines(found, WANTED.embeddings).max() < MIN_COSINE
