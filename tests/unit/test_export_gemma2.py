"""embedding_gemma2 checkpoint -> text bundle, on a tiny one whose vectors Hugging Face computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import EllipsisType

import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2, edit, edit_weights, unpack, unpair
from gemma_exports import LONGEST, REFERENCE_TOLERANCE, eg2_reference, export_fixtures
from numpy.typing import NDArray
from references import load_references

from npu_embed.bf16 import round_f32
from npu_embed.bundle import Bundle
from npu_embed.emulator import xclbin
from npu_embed.errors import BundleError
from npu_embed.exporters import embedding_gemma2, export_checkpoint
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.exporters.embedding_gemma2_config import embedding_gemma2_config
from npu_embed.exporters.gemma_config import Heads

LAYERS = 6

F32 = NDArray[np.float32]

_quick, weights, bundle, checkpoint = export_fixtures(
    TINY_EG2, embedding_gemma2, 8, ("a cat", "two cats")
)


def of_images(name: str) -> bool:
    """Whether a tensor is only there for images, which test_export_vision.py looks at."""
    return name.startswith(("vision_tower.", "embed_vision.", "ref."))


# --- the reference ------------------------------------------------------------------------------


def test_the_reference_forward_agrees_with_hugging_face(weights: dict[str, F32]) -> None:
    stored, model = load_references(TINY_EG2), eg2_reference(weights)
    for ids, wanted in zip(stored.ids, stored.embeddings, strict=True):
        found = model.forward(np.array(ids, np.int32)).embedding
        np.testing.assert_allclose(found, wanted, atol=REFERENCE_TOLERANCE)


@pytest.mark.parametrize("window", [11, 13])
def test_a_long_text_shows_a_window_off_by_one(weights: dict[str, F32], window: int) -> None:
    stored = load_references(TINY_EG2)
    found = eg2_reference(weights, window).forward(np.array(stored.ids[LONGEST], np.int32))
    assert np.abs(found.embedding - stored.embeddings[LONGEST]).max() > 1e-3


# --- the bundle ---------------------------------------------------------------------------------


def test_the_params_are_the_text_configs_own(bundle: Bundle) -> None:
    config = json.loads((TINY_EG2 / "config.json").read_text())["text_config"]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "hidden_size_per_layer_input",
        "embedding_dim",
        "sliding_window",
        "vocab_size",
        "max_position_embeddings",
        "pad_token_id",
    ):
        assert bundle.manifest.param_int(key) == config[key]
    assert bundle.manifest.param_list("layer_types") == tuple(config["layer_types"])
    wanted = {
        "name": "tiny-eg2",
        "family": "embedding_gemma2",
        "attention": "npu",
        "window": "12",
        "num_attention_heads.sliding": "4",
        "num_key_value_heads.sliding": "2",
        "head_dim.sliding": "32",
        "num_attention_heads.full": "4",
        "num_key_value_heads.full": "1",
        "head_dim.full": "64",
        "rope_theta": "1000000.0",
        "rope_local_base_freq": "10000.0",
        "rms_norm_eps": "1e-06",
        "hidden_activation": "gelu_pytorch_tanh",
        "pooling": "mean",
        "normalize": "1",
        "dim": "96",
        "max_tokens": "512",
        "stages": "embeddings,per_layer_inputs,layers,norm,pooling,embedding_projection,normalize",
    }
    assert wanted.items() <= bundle.manifest.params.items()
    assert list(bundle.prompts) == ["SearchQuery", "Document", "Classification"]


def test_the_gemms_fit_each_others_buffers(bundle: Bundle) -> None:
    gemms = [g for g in bundle.specs.gemms.values() if not g.key.endswith(".vision")]
    shapes = {g.key: (g.K, g.N, g.lda, g.c_stride, g.n_out) for g in gemms}
    assert shapes == {
        "ple": (64, 384, 64, 384, 384),
        "qkv.sliding": (64, 256, 64, 256, 256),
        "o.sliding": (128, 64, 128, 64, 64),
        "qkv.full": (64, 384, 64, 384, 384),
        "o.full": (256, 64, 256, 64, 64),
        "gate_up": (64, 512, 64, 256, 256),
        "down": (256, 64, 256, 64, 64),
        "ple_gate": (64, 64, 64, 64, 64),
        "ple_proj": (64, 64, 64, 64, 64),
    }
    told = {r.fields[0]: r.get("epilogue") for r in bundle.manifest.tagged("gemm")}
    told = {key: epilogue for key, epilogue in told.items() if not key.endswith(".vision")}
    assert told == dict.fromkeys(told, "none") | {"gate_up": "geglu_pair", "ple_gate": "gelu_tanh"}


def test_each_type_of_layer_has_its_own_attention(bundle: Bundle) -> None:
    assert list(bundle.specs.buckets) == ["sliding", "full", "vision"]
    for name, stride, views, constants in (
        ("sliding", 256, (128, 192, 256, 128), b'"head_dim":32,"heads":4,"kv_heads":2'),
        ("full", 384, (256, 320, 384, 256), b'"head_dim":64,"heads":4,"kv_heads":1'),
    ):
        buckets = bundle.specs.buckets[name]
        assert [m.rows for m in buckets] == [
            *range(16, 129, 16), 160, 192, 224, 256, 320, 384, 448, 512
        ]  # fmt: skip
        for mha in buckets:
            before = mha.rows - 1
            q, k, v, o = views
            assert mha.ctx == f"mha.{name}"
            assert (mha.q_elems, mha.k_elems, mha.v_elems, mha.o_elems) == (
                before * stride + q,
                before * stride + k,
                before * stride + v,
                before * views[3] + o,
            )
        parsed = xclbin.read(bundle.xclbin(f"mha.{name}"))
        assert parsed.partition is not None
        assert constants in parsed.partition.pdis[0].image


def test_packed_weights_have_the_norms_before_them_folded_in(
    bundle: Bundle, weights: dict[str, F32]
) -> None:
    text = "language_model."
    ple = weights[f"{text}ple.per_layer_model_projection.weight"].T.copy()
    found = unpack(bundle.tensors.u8(f"{text}ple.packed"), 64, 384)
    np.testing.assert_array_equal(found, round_f32(ple))
    for i in range(LAYERS):
        layer, o_width = f"{text}layers.{i}", 256 if i == 5 else 128

        def linear(name: str, layer: str = layer) -> F32:
            transposed: F32 = weights[f"{layer}.{name}.weight"].T
            return transposed

        def packed(key: str, k: int, n: int, layer: str = layer) -> F32:
            return unpack(bundle.tensors.u8(f"{layer}.{key}.packed"), k, n)

        qkv = np.concatenate([linear(f"self_attn.{part}_proj") for part in "qkv"], axis=1)
        norm = weights[f"{layer}.input_layernorm.weight"][:, None]
        np.testing.assert_array_equal(packed("qkv", 64, qkv.shape[1]), round_f32(norm * qkv))
        norm = weights[f"{layer}.pre_feedforward_layernorm.weight"][:, None]
        pair = unpair(packed("gate_up", 64, 512), 256)
        for half, name in zip(pair, ("gate", "up"), strict=True):
            np.testing.assert_array_equal(half, round_f32(norm * linear(f"mlp.{name}_proj")))
        for key, name, k in (
            ("o", "self_attn.o_proj", o_width),
            ("down", "mlp.down_proj", 256),
            ("ple_gate", "ple_block.per_layer_input_gate", 64),
            ("ple_proj", "ple_block.per_layer_projection", 64),
        ):
            np.testing.assert_array_equal(packed(key, k, 64), round_f32(linear(name)))


def test_host_tensors_are_the_text_encoders_own(bundle: Bundle, weights: dict[str, F32]) -> None:
    text = "language_model."
    host = [
        f"{text}{name}.weight"
        for name in (
            "embed_tokens",
            "norm",
            "embedding_projection",
            "ple.per_layer_projection_norm",
        )
    ]
    packed = {f"{text}ple.packed"}
    for i in range(LAYERS):
        layer = f"{text}layers.{i}"
        host += [
            f"{layer}.self_attn.q_norm.weight",
            f"{layer}.self_attn.k_norm.weight",
            f"{layer}.post_attention_layernorm.weight",
            f"{layer}.post_feedforward_layernorm.weight",
            f"{layer}.ple_block.post_per_layer_input_norm.weight",
            f"{layer}.layer_scalar",
        ]
        keys = ("qkv", "o", "gate_up", "down", "ple_gate", "ple_proj")
        packed |= {f"{layer}.{key}.packed" for key in keys}
    for name in host:
        np.testing.assert_array_equal(bundle.tensors.f32(name), weights[name])
    trefs = {f"tref.{j}.{part}" for j in range(7) for part in ("ids", "hidden", "embedding")}
    found = {name for name in bundle.tensors.names() if not of_images(name)}
    assert found == {*host, *packed, *trefs}


def test_token_ids_are_the_references(bundle: Bundle) -> None:
    stored = load_references(TINY_EG2)
    found = bundle.open_tokenizer().encode_batch(stored.texts)
    assert [tuple(encoded.ids) for encoded in found] == list(stored.ids)


def test_references_end_with_a_text_at_the_limit_and_one_behind_a_prompt(bundle: Bundle) -> None:
    records = bundle.manifest.tagged("tref")
    assert [record.fields[1] for record in records] == ["-"] * 6 + ["SearchQuery"]
    assert len(bundle.tensors.i32("tref.5.ids")) == 512
    for j in range(7):
        length = len(bundle.tensors.i32(f"tref.{j}.ids"))
        assert bundle.tensors.shape(f"tref.{j}.hidden") == (LAYERS + 1, length, 64)
        embedding = bundle.tensors.f32(f"tref.{j}.embedding", (96,))
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_attention_on_the_host_leaves_its_kernels_out(checkpoint: Path, tmp_path: Path) -> None:
    host = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out", attention="host"))
    assert host.manifest.params["attention"] == "host"
    assert host.specs.all_mhas == ()
    assert list(host.manifest.xclbins) == ["gemm"]


@pytest.mark.slow
def test_a_checkpoint_without_other_towers_is_exported_alike(
    checkpoint: Path, tmp_path: Path, weights: dict[str, F32], bundle: Bundle
) -> None:
    edit(checkpoint / "config.json", vision_config=None)
    others: dict[str, F32 | EllipsisType] = {
        name: ... for name in weights if not name.startswith("language_model.")
    }
    assert others
    edit_weights(checkpoint / "model.safetensors", **others)
    found = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out", name="tiny-eg2"))
    assert not [name for name in found.manifest.params if name.endswith(".vision")]
    assert not found.manifest.tagged("ref")
    own = {n for n in bundle.tensors.names() if not n.startswith("tref.") and not of_images(n)}
    assert own == {name for name in found.tensors.names() if not name.startswith("tref.")}
    for name in own:
        np.testing.assert_array_equal(found.tensors.raw(name), bundle.tensors.raw(name))


# --- configurations -----------------------------------------------------------------------------


def test_full_layers_have_the_wide_heads_where_no_layer_has_its_own(checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    edit(file, "text_config", per_layer_config=..., rope_parameters=..., layer_types=...)
    config = embedding_gemma2_config(open_checkpoint(checkpoint))
    assert config.heads == {
        "sliding_attention": Heads(4, 2, 32),
        "full_attention": Heads(4, 1, 512),
    }
    assert config.layer_types == ("sliding_attention",) * 5 + ("full_attention",)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    edit(file, "text_config", global_head_dim=128, num_global_key_value_heads=2)
    config = embedding_gemma2_config(open_checkpoint(checkpoint))
    assert config.heads["full_attention"] == Heads(4, 2, 128)


def test_layers_of_one_type_need_no_kernels_of_the_other(checkpoint: Path) -> None:
    edit(
        checkpoint / "config.json",
        "text_config",
        layer_types=["full_attention"] * 6,
        per_layer_config={},
    )
    config = embedding_gemma2_config(open_checkpoint(checkpoint))
    assert config.heads == {"full_attention": Heads(4, 2, 32)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "silu"}, "text_config: hidden_activation 'silu', wanted 'gelu_pyto"),
        ({"model_type": "gemma4_text"}, "model_type 'gemma4_text', wanted 'embedding_gemma2_text'"),
        ({"attention_bias": True}, "attention_bias True, wanted false"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, wanted none"),
        (
            {"layer_types": ["full_attention"] + ["sliding_attention"] * 5},
            "layer_types .*, wanted full_attention at its end",
        ),
        (
            {"per_layer_config": {"5": {"head_dim": 64, "sliding_window": 3}}},
            "per_layer_config.5: sliding_window 3, wanted nothing of that name",
        ),
        (
            {"per_layer_config": {"6": {"head_dim": 64}}},
            "per_layer_config: 6 .*, wanted layers 0 t",
        ),
        ({"per_layer_config": {"05": {}}}, "per_layer_config: 05 .*, wanted layers 0 to 5"),
        ({"per_layer_config": {"9" * 5000: {}}}, "per_layer_config: '9+.*, wanted layers 0 to 5"),
        ({"layer_types": [["full_attention"]] * 6}, "layer_types .*, wanted 6 of 'sliding"),
        ({"num_attention_heads": 257}, "num_attention_heads 257, wanted an integer 1 to 256"),
        (
            {"num_attention_heads": 256, "num_key_value_heads": 64, "head_dim": 256},
            "text_config: layer 0: q, k and v of 98304 numbers, wanted at most 32768",
        ),
        (
            {"hidden_size_per_layer_input": 2**14},
            "text_config: all layers' per-layer inputs of 98304 numbers, wanted at most 32768",
        ),
        ({"sliding_window": 10**20}, "sliding_window 1.*, wanted an integer 1 to 2147483647"),
        ({"per_layer_config": {"a": {}}}, "per_layer_config: a .*, wanted layers 0 to 5"),
        ({"per_layer_config": {"5": 1}}, "no object per_layer_config.5, wanted one"),
        (
            {"per_layer_config": {"2": {"head_dim": 64}}},
            "layer 2: 2 key/value heads of 64, wanted 2 of 32 as other sliding layers have",
        ),
        ({"per_layer_config": {"5": {"head_dim": 33}}}, "layer 5: head_dim 33, wanted an even"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional"},
                    "sliding_attention": {},
                }
            },
            "full_attention: rope_type 'proportional', wanted 'default'",
        ),
        ({"embedding_dim": 64}, "word_embedding_dimension 96, wanted 64"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input missing, wanted an"),
        ({"max_position_embeddings": 128}, "max_seq_length 512, wanted at most max_position"),
    ],
)
def test_what_this_engine_would_compute_differently_is_refused(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit(checkpoint / "config.json", "text_config", **changes)
    with pytest.raises(BundleError, match=words):
        embedding_gemma2_config(open_checkpoint(checkpoint))


def add_dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_dense, "modules.json: Dense, Normalize after Pooling, wanted Normalize or nothing"),
        (
            lambda folder: edit(folder / "config.json", text_config=None),
            "config.json: no object text_config, wanted one",
        ),
        (
            lambda folder: edit(folder / "sentence_bert_config.json", max_seq_length=4096),
            "texts of 4096 tokens, wanted 3 to 2048; set max_seq_length",
        ),
    ],
)
def test_modules_this_engine_does_not_run_are_refused(
    checkpoint: Path, change: Callable[[Path], None], words: str
) -> None:
    edit(checkpoint / "config.json", "text_config", max_position_embeddings=4096)
    change(checkpoint)
    with pytest.raises(BundleError, match=words):
        embedding_gemma2_config(open_checkpoint(checkpoint))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"language_model.extra": np.ones(2, np.float32)}, "tensor language_model.extra is not"),
        ({"language_model.layers.3.layer_scalar": ...}, "layers.3.layer_scalar is missing"),
        (
            {"language_model.layers.5.self_attn.q_norm.weight": np.ones(32, np.float32)},
            r"layers.5.self_attn.q_norm.weight has shape \[32\], wanted \[64\]",
        ),
    ],
)
def test_weights_that_do_not_belong_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, F32 | EllipsisType], words: str
) -> None:
    edit_weights(checkpoint / "model.safetensors", **changes)
    with pytest.raises(BundleError, match=words):
        export_checkpoint(checkpoint, tmp_path / "out")
