"""gemma3_text checkpoint -> bundle, on a tiny one whose vectors Hugging Face computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma_checkpoints import TINY_GEMMA3, edit, edit_weights, unpack, unpair
from gemma_exports import LONGEST, REFERENCE_TOLERANCE, Loaded, export_fixtures
from numpy.typing import NDArray
from references import load_references
from safetensors.numpy import load_file

from npu_embed.bf16 import round_f32, to_bf16, to_f32
from npu_embed.bundle import Bundle
from npu_embed.emulator import xclbin
from npu_embed.errors import BundleError, InputError
from npu_embed.exporters import export_checkpoint, gemma3_text, selfcheck
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.exporters.gemma3_config import gemma3_config
from npu_embed.exporters.gemma_reference import AttentionShape, Dense, GemmaReference, GemmaShape

LAYERS = 6

F32 = NDArray[np.float32]

MAX_CHUNKS = 4
_quick, weights, bundle, checkpoint = export_fixtures(
    TINY_GEMMA3, gemma3_text, MAX_CHUNKS, ("a cat", "two cats " * 20)
)


def reference(weights: dict[str, F32], rope_theta: float = 1e4, window: int = 8) -> GemmaReference:
    """The tiny checkpoint's forward, or one with another attention on its sliding layers."""
    shape = GemmaShape(
        layer_types=["sliding"] * 5 + ["full"],
        attention={
            "sliding": AttentionShape(3, 1, 32, rope_theta, scale=32**-0.5, window=window),
            "full": AttentionShape(3, 1, 32, rope_theta=1e6, scale=32**-0.5, window=None),
        },
        rms_norm_eps=1e-6,
        normalize=True,
    )
    files = (TINY_GEMMA3 / f"{i}_Dense" / "model.safetensors" for i in (2, 3))
    dense = [Dense(load_file(file)["linear.weight"], None) for file in files]
    return GemmaReference(Loaded(weights), shape, dense)


# --- the reference ------------------------------------------------------------------------------


def test_the_reference_forward_agrees_with_hugging_face(weights: dict[str, F32]) -> None:
    stored, model = load_references(TINY_GEMMA3), reference(weights)
    for ids, wanted in zip(stored.ids, stored.embeddings, strict=True):
        found = model.forward(np.array(ids, np.int32)).embedding
        np.testing.assert_allclose(found, wanted, atol=REFERENCE_TOLERANCE)


@pytest.mark.parametrize(("rope_theta", "window"), [(1e4, 7), (1e4, 9), (1e6, 8)])
def test_a_long_text_shows_a_wrong_window_or_base(
    weights: dict[str, F32], rope_theta: float, window: int
) -> None:
    stored = load_references(TINY_GEMMA3)
    found = reference(weights, rope_theta, window).forward(np.array(stored.ids[LONGEST], np.int32))
    assert np.abs(found.embedding - stored.embeddings[LONGEST]).max() > 1e-3


# --- the bundle ---------------------------------------------------------------------------------


def test_the_params_are_the_checkpoints_own(bundle: Bundle) -> None:
    config = json.loads((TINY_GEMMA3 / "config.json").read_text())
    params = bundle.manifest.params
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "vocab_size",
        "max_position_embeddings",
        "pad_token_id",
    ):
        assert bundle.manifest.param_int(key) == config[key]
    assert bundle.manifest.param_list("layer_types") == tuple(config["layer_types"])
    wanted = {
        "name": "tiny-gemma3",
        "family": "gemma3_text",
        "target": "npu2",
        "attention": "npu",
        "window": "8",
        "query_pre_attn_scalar": "32.0",
        "rope_theta": "1000000.0",
        "rope_local_base_freq": "10000.0",
        "rms_norm_eps": "1e-06",
        "hidden_activation": "gelu_pytorch_tanh",
        "pooling": "mean",
        "dense": "2",
        "normalize": "1",
        "dim": "96",
        "max_tokens": "256",
        "stages": "embeddings,layers,norm,pooling,dense,normalize",
    }
    assert wanted.items() <= params.items()
    prompts = json.loads((TINY_GEMMA3 / "config_sentence_transformers.json").read_text())["prompts"]
    assert bundle.prompts == prompts


def test_the_gemms_fit_each_others_buffers(bundle: Bundle) -> None:
    gemms = bundle.specs.gemms.values()
    shapes = {g.key: (g.K, g.N, g.lda, g.c_stride, g.n_out) for g in gemms}
    assert shapes == {
        "qkv": (128, 192, 128, 192, 192),  # 96 + 2 x 32 columns, padded to whole tiles
        "o": (128, 128, 128, 128, 128),
        "gate_up": (128, 512, 128, 256, 256),  # pairs of 224, padded to 256
        "down": (256, 128, 256, 128, 128),
        "dense.0": (128, 192, 128, 192, 192),
        "dense.1": (192, 128, 192, 128, 128),
    }
    assert {g.max_rows for g in gemms} == {MAX_CHUNKS * 64}


def test_attention_reads_q_k_and_v_where_the_host_puts_them(bundle: Bundle) -> None:
    assert [m.rows for m in bundle.specs.mhas] == [*range(16, 129, 16), 160, 192, 224, 256]
    for mha in bundle.specs.mhas:
        before = 192 * (mha.rows - 1)
        views = (mha.q_elems, mha.k_elems, mha.v_elems, mha.o_elems)
        assert views == (before + 96, before + 128, before + 160, 128 * (mha.rows - 1) + 96)
    parsed = xclbin.read(bundle.xclbin("mha"))
    assert parsed.partition is not None
    assert b'"head_dim":32,"heads":3,"kv_heads":1' in parsed.partition.pdis[0].image


def test_packed_weights_have_the_norms_before_them_folded_in(
    bundle: Bundle, weights: dict[str, F32]
) -> None:
    for i in range(LAYERS):
        layer = f"layers.{i}"

        def linear(name: str, layer: str = layer) -> F32:
            transposed: F32 = weights[f"{layer}.{name}.weight"].T
            return transposed

        def packed(key: str, k: int, n: int, layer: str = layer) -> F32:
            return unpack(bundle.tensors.u8(f"{layer}.{key}.packed"), k, n)

        qkv = np.concatenate([linear(f"self_attn.{part}_proj") for part in "qkv"], axis=1)
        norm = 1 + weights[f"{layer}.input_layernorm.weight"][:, None]
        np.testing.assert_array_equal(packed("qkv", 96, 160), round_f32(norm * qkv))
        norm = 1 + weights[f"{layer}.pre_feedforward_layernorm.weight"][:, None]
        pair = unpair(packed("gate_up", 96, 512), 224)
        for found, name in zip(pair, ("gate", "up"), strict=True):
            np.testing.assert_array_equal(found, round_f32(norm * linear(f"mlp.{name}_proj")))
        for key, name, k in (("o", "self_attn.o", 96), ("down", "mlp.down", 224)):
            np.testing.assert_array_equal(packed(key, k, 96), round_f32(linear(f"{name}_proj")))
    for j, (k, n) in enumerate([(96, 192), (192, 96)]):
        dense = load_file(TINY_GEMMA3 / f"{j + 2}_Dense/model.safetensors")["linear.weight"]
        found = unpack(bundle.tensors.u8(f"dense.{j}.packed"), k, n)
        np.testing.assert_array_equal(found, round_f32(dense.T.copy()))


def test_host_tensors_hold_what_multiplies(bundle: Bundle, weights: dict[str, F32]) -> None:
    layers = [f"layers.{i}" for i in range(LAYERS)]
    norms = [
        "self_attn.q_norm",
        "self_attn.k_norm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ]
    scales = ["norm.weight", *(f"{layer}.{norm}.weight" for layer in layers for norm in norms)]
    for name in scales:
        np.testing.assert_array_equal(bundle.tensors.f32(name), 1 + weights[name])
    embeddings = bundle.tensors.f32("embed_tokens.weight")
    np.testing.assert_array_equal(embeddings, weights["embed_tokens.weight"])
    packed = {
        f"{layer}.{key}.packed" for layer in layers for key in ("qkv", "o", "gate_up", "down")
    }
    trefs = {f"tref.{j}.{part}" for j in range(7) for part in ("ids", "hidden", "embedding")}
    others = {"embed_tokens.weight", "dense.0.packed", "dense.1.packed"}
    assert set(bundle.tensors.names()) == {*scales, *packed, *trefs, *others}


def test_token_ids_are_the_references(bundle: Bundle) -> None:
    stored = load_references(TINY_GEMMA3)
    found = bundle.open_tokenizer().encode_batch(stored.texts)
    assert [tuple(encoded.ids) for encoded in found] == list(stored.ids)


def test_references_end_with_a_text_at_the_limit_and_one_behind_a_prompt(bundle: Bundle) -> None:
    records = bundle.manifest.tagged("tref")
    assert [record.fields[1] for record in records] == ["-"] * 6 + ["query"]
    lengths = [len(bundle.tensors.i32(f"tref.{j}.ids")) for j in range(7)]
    assert lengths[5] == 256
    assert lengths[6] > lengths[1]
    for j, length in enumerate(lengths):
        assert bundle.tensors.shape(f"tref.{j}.hidden") == (LAYERS + 1, length, 96)
        embedding = bundle.tensors.f32(f"tref.{j}.embedding", (96,))
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-6)


def test_the_first_hidden_rows_are_the_scaled_embeddings(
    bundle: Bundle, weights: dict[str, F32]
) -> None:
    rows = weights["embed_tokens.weight"][bundle.tensors.i32("tref.1.ids")]
    hidden = bundle.tensors.f32("tref.1.hidden")
    np.testing.assert_allclose(hidden[0], rows * np.float32(np.sqrt(96)), rtol=1e-6)


def test_large_hidden_rows_are_left_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "MAX_HIDDEN_BYTES", 7 * 20 * 96 * 4)
    bundle = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out"))
    assert bundle.tensors.shape("tref.0.hidden")[1] <= 20
    assert len(bundle.tensors.i32("tref.1.ids")) > 20
    assert not bundle.tensors.has("tref.1.hidden")
    assert bundle.tensors.has("tref.1.embedding")


def test_attention_on_the_host_leaves_its_kernels_out(
    checkpoint: Path, tmp_path: Path, bundle: Bundle
) -> None:
    host = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out", attention="host"))
    assert host.manifest.params["attention"] == "host"
    assert host.specs.all_mhas == ()
    assert list(host.manifest.xclbins) == ["gemm"]
    assert not list((tmp_path / "out").glob("kernels/mha*"))
    assert list(host.specs.gemms) == list(bundle.specs.gemms)


def test_an_unknown_place_for_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="attention='gpu': unknown, wanted 'npu' or 'host'"):
        export_checkpoint(TINY_GEMMA3, tmp_path / "out", attention="gpu")


def test_bfloat16_weights_stay_bfloat16(
    checkpoint: Path, tmp_path: Path, weights: dict[str, F32]
) -> None:
    write_bf16(checkpoint / "model.safetensors", weights)
    bundle = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out"))
    wanted = to_bf16(weights["embed_tokens.weight"])
    np.testing.assert_array_equal(bundle.tensors.bf16("embed_tokens.weight"), wanted)
    norm = 1 + round_f32(weights["norm.weight"])
    np.testing.assert_array_equal(bundle.tensors.f32("norm.weight"), norm)
    ids = bundle.tensors.i32("tref.1.ids")
    hidden = bundle.tensors.f32("tref.1.hidden")
    np.testing.assert_allclose(hidden[0], to_f32(wanted)[ids] * np.sqrt(96), rtol=1e-6)


def write_bf16(file: Path, tensors: dict[str, F32]) -> None:
    """A safetensors file of bfloat16, which numpy has no type for."""
    header, data = {}, b""
    for name, value in tensors.items():
        bits = to_bf16(value).tobytes()
        offsets = [len(data), len(data) + len(bits)]
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": offsets}
        data += bits
    text = json.dumps(header).encode()
    file.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_names_may_begin_with_the_model(
    checkpoint: Path, tmp_path: Path, weights: dict[str, F32], bundle: Bundle
) -> None:
    changes: dict[str, Any] = {name: ... for name in weights}
    changes |= {f"model.{name}": value for name, value in weights.items()}
    edit_weights(checkpoint / "model.safetensors", **changes)
    found = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out")).tensors
    own = {name for name in bundle.tensors.names() if not name.startswith("tref.")}
    assert own == {name for name in found.names() if not name.startswith("tref.")}


# --- configurations -----------------------------------------------------------------------------


def test_the_older_form_of_the_config_says_the_same(checkpoint: Path) -> None:
    wanted = gemma3_config(open_checkpoint(checkpoint))
    edit(
        checkpoint / "config.json",
        rope_parameters=...,
        layer_types=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=None,
    )
    assert gemma3_config(open_checkpoint(checkpoint)) == wanted


@pytest.mark.parametrize(("sliding_window", "window"), [(512, 256), (513, 256), (16, 8), (1, 0)])
def test_a_window_reaches_half_of_what_the_config_says(
    checkpoint: Path, sliding_window: int, window: int
) -> None:
    edit(checkpoint / "config.json", sliding_window=sliding_window)
    assert gemma3_config(open_checkpoint(checkpoint)).window == window


def test_a_model_without_dense_modules_has_the_width_of_its_layers(checkpoint: Path) -> None:
    modules = json.loads((checkpoint / "modules.json").read_text())
    (checkpoint / "modules.json").write_text(json.dumps(modules[:2]))
    config = gemma3_config(open_checkpoint(checkpoint))
    assert (config.dim, config.normalize) == (96, False)
    assert config.stages == ("embeddings", "layers", "norm", "pooling")


ROPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu', wanted 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention False, wanted true"),
        ({"use_bidirectional_attention": ...}, "use_bidirectional_attention missing, wanted true"),
        ({"attention_bias": True}, "attention_bias True, wanted false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, wanted none"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, wanted none"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2, wanted a divisor of num_attention"),
        ({"head_dim": 31}, "head_dim 31, wanted an even number to 1024"),
        ({"layer_types": ["full_attention"]}, "layer_types .*, wanted 6 of"),
        ({"layer_types": ["causal"] * 6}, "layer_types .*, wanted 6 of 'sliding_attention' or"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters .*, wanted an object with"),
        (
            {"rope_parameters": ROPE | {"full_attention": {"rope_type": "linear"}}},
            "rope_parameters.full_attention: rope_type 'linear', wanted 'default'",
        ),
        (
            {"rope_parameters": ROPE | {"full_attention": {"rope_theta": 1e6, "factor": 8.0}}},
            "rope_parameters.full_attention: factor 8.0, wanted none",
        ),
        ({"rope_parameters": ROPE | {"full_attention": 3}}, "no object rope_parameters.full_att"),
        ({"rope_parameters": ..., "rope_scaling": {"a": 1}}, "rope_scaling .*, wanted none"),
        ({"rope_parameters": ..., "rope_theta": 1e6}, "rope_local_base_freq missing, wanted a num"),
        ({"sliding_window": None}, "sliding_window missing, wanted an integer >= 1"),
        ({"max_position_embeddings": 128}, "max_seq_length 256, wanted at most max_position"),
        ({"query_pre_attn_scalar": 10**400}, "00, wanted a number > 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0, wanted a number > 0"),
    ],
)
def test_what_this_engine_would_compute_differently_is_refused(
    checkpoint: Path, changes: dict[str, Any], words: str
) -> None:
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(BundleError, match=words):
        gemma3_config(open_checkpoint(checkpoint))


def longer(folder: Path) -> None:
    edit(folder / "sentence_bert_config.json", max_seq_length=4096)
    edit(folder / "config.json", max_position_embeddings=8192)


def reorder(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[2], modules[4] = modules[4], modules[2]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (longer, "texts of 4096 tokens, wanted 3 to 2048"),
        (reorder, "Normalize, Dense, Dense after Pooling, wanted Dense modules and then Normal"),
        (
            lambda folder: edit(
                folder / "1_Pooling/config.json",
                pooling_mode_mean_tokens=False,
                pooling_mode_cls_token=True,
            ),
            "cls pooling, wanted mean",
        ),
        (
            lambda folder: edit(folder / "1_Pooling/config.json", word_embedding_dimension=64),
            "word_embedding_dimension 64, wanted 96",
        ),
        (
            lambda folder: edit(
                folder / "2_Dense/config.json",
                activation_function="torch.nn.modules.activation.Tanh",
            ),
            "2_Dense/config.json: activation_function 'torch.*Tanh', wanted '.*Identity'",
        ),
        (
            lambda folder: edit(folder / "3_Dense/config.json", in_features=96),
            "3_Dense/config.json: in_features 96, wanted 192",
        ),
        (
            lambda folder: edit(
                folder / "2_Dense/config.json", module_input_name="token_embeddings"
            ),
            "module_input_name 'token_embeddings', wanted 'sentence_embedding'",
        ),
    ],
)
def test_modules_this_engine_does_not_run_are_refused(
    checkpoint: Path, change: Callable[[Path], None], words: str
) -> None:
    change(checkpoint)
    with pytest.raises(BundleError, match=words):
        gemma3_config(open_checkpoint(checkpoint))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("model.safetensors", {"lm_head.weight": np.ones(2, np.float32)}, "tensor lm_head.weight"),
        ("model.safetensors", {"norm.weight": ...}, "norm.weight is missing"),
        ("model.safetensors", {"norm.weight": np.full(96, np.nan, np.float32)}, "96 values that"),
        ("2_Dense/model.safetensors", {"linear.bias": np.ones(192, np.float32)}, "linear.bias"),
        ("2_Dense/model.safetensors", {"linear.weight": np.ones((2, 2), np.float32)}, r"\[2, 2\]"),
    ],
)
def test_weights_that_do_not_belong_are_refused(
    checkpoint: Path, tmp_path: Path, file: str, changes: dict[str, Any], words: str
) -> None:
    edit_weights(checkpoint / file, **changes)
    with pytest.raises(BundleError, match=f"^{file}: .*{words}"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dense_module_without_its_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "3_Dense/model.safetensors").rename(checkpoint / "3_Dense/pytorch_model.bin")
    with pytest.raises(BundleError, match=r"3_Dense/model\.safetensors: missing, wanted it"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_a_dense_module_may_have_a_bias(checkpoint: Path, tmp_path: Path) -> None:
    bias = np.linspace(-1, 1, 192, dtype=np.float32)
    edit(checkpoint / "2_Dense/config.json", bias=True)
    edit_weights(checkpoint / "2_Dense/model.safetensors", **{"linear.bias": bias})
    bundle = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out"))
    flags = {r.fields[0]: r.get("bias") for r in bundle.manifest.tagged("gemm")}
    assert flags == dict.fromkeys(flags, "0") | {"dense.0": "1"}
    blocks = bundle.tensors.u8("dense.0.packed").reshape(3, -1)
    np.testing.assert_array_equal(blocks[:, :256].copy().view("<f4").reshape(-1), bias)
