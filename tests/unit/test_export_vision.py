"""Gemma 4's vision tower: a checkpoint's images in the bundle, against Hugging Face's vectors."""

from __future__ import annotations

import json
from pathlib import Path
from types import EllipsisType

import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2, edit, edit_weights, unpack, unpair
from gemma_exports import REFERENCE_TOLERANCE, Loaded, eg2_reference, export_fixtures
from numpy.typing import NDArray
from safetensors.numpy import load_file

from npu_embed.bf16 import round_f32, to_bf16
from npu_embed.bundle import Bundle
from npu_embed.emulator import xclbin
from npu_embed.errors import BundleError
from npu_embed.exporters import embedding_gemma2, export_checkpoint
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.exporters.gemma4_vision_config import Gemma4VisionConfig, gemma4_vision_config
from npu_embed.exporters.gemma4_vision_reference import Gemma4VisionReference, VisionShape
from npu_embed.exporters.gemma_reference import (
    AttentionShape,
)
from npu_embed.exporters.image_reference import image_embedding, self_check_image
from npu_embed.images import ImageLimits, preprocess, target_size
from npu_embed.tensors import open_safetensors, write_safetensors

LAYERS = 3
TOKENS = (2, 5, 6, 1)
MAX_TOKENS, VOCAB_SIZE = 512, 1400
TOWER = "vision_tower.encoder.layers"

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_quick, weights, bundle, checkpoint = export_fixtures(
    TINY_EG2, embedding_gemma2, 8, ("a cat", "two cats")
)


def vision_config(checkpoint: Path) -> Gemma4VisionConfig | None:
    return gemma4_vision_config(open_checkpoint(checkpoint), MAX_TOKENS, VOCAB_SIZE)


def embed(weights: dict[str, F32], pixels: F32, positions: I32, rope_theta: float = 100.0) -> F32:
    """The vector of an image by the plain numpy forwards."""
    attention = AttentionShape(3, 3, 32, rope_theta=rope_theta, scale=1.0, window=None)
    vision = Gemma4VisionReference(Loaded(weights), VisionShape(LAYERS, attention, 1e-6, 3))
    return image_embedding(vision, eg2_reference(weights), TOKENS, pixels, positions)[1]


# --- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_the_reference_forward_agrees_with_hugging_face(
    weights: dict[str, F32], index: int
) -> None:
    stored = load_file(TINY_EG2 / "references.safetensors")
    pixels, positions = stored[f"image.{index}.pixels"], stored[f"image.{index}.positions"]
    found = embed(weights, pixels, positions)
    wanted = stored[f"image.{index}.embedding"]
    np.testing.assert_allclose(found, wanted, atol=REFERENCE_TOLERANCE)


def test_columns_in_the_place_of_rows_show(weights: dict[str, F32]) -> None:
    stored = load_file(TINY_EG2 / "references.safetensors")
    image = stored["image.0.pixels"]  # a square: its patches still are one
    found = embed(weights, image, stored["image.0.positions"][:, ::-1])
    assert np.abs(found - stored["image.0.embedding"]).max() > 1e-3


def test_another_rope_theta_shows(weights: dict[str, F32]) -> None:
    stored = load_file(TINY_EG2 / "references.safetensors")
    found = embed(weights, stored["image.2.pixels"], stored["image.2.positions"], rope_theta=1e4)
    assert np.abs(found - stored["image.2.embedding"]).max() > 1e-3


# --- the bundle ---------------------------------------------------------------------------------


def test_the_params_are_the_vision_configs_own(bundle: Bundle) -> None:
    config = json.loads((TINY_EG2 / "config.json").read_text())["vision_config"]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "position_embedding_size",
        "patch_size",
        "pooling_kernel_size",
    ):
        assert bundle.manifest.param_int(f"{key}.vision") == config[key]
    wanted = {
        "rope_theta.vision": "100.0",
        "rms_norm_eps.vision": "1e-06",
        "max_soft_tokens": "70",
        "max_rows.vision": "640",
        "bos_token_id": "2",
        "boi_token_id": "5",
        "eoi_token_id": "6",
        "eos_token_id": "1",
    }
    assert wanted.items() <= bundle.manifest.params.items()


def test_the_gemms_fit_each_others_buffers_and_an_image(bundle: Bundle) -> None:
    gemms = [g for g in bundle.specs.gemms.values() if g.key.endswith(".vision")]
    assert {g.key: (g.K, g.N, g.lda, g.c_stride, g.n_out) for g in gemms} == {
        "patch.vision": (768, 128, 768, 128, 128),
        "qkv.vision": (128, 320, 128, 320, 320),
        "o.vision": (128, 128, 128, 128, 128),
        "gate_up.vision": (128, 768, 128, 384, 384),
        "down.vision": (384, 128, 384, 128, 128),
        "projection.vision": (128, 64, 128, 64, 64),
    }
    assert {g.max_rows for g in gemms} == {640}


def test_attention_has_buckets_up_to_the_patches_of_an_image(bundle: Bundle) -> None:
    buckets = bundle.specs.buckets["vision"]
    assert [m.rows for m in buckets] == [128, 256, 384, 512, 640]
    assert {m.ctx for m in buckets} == {"mha.vision"}
    parsed = xclbin.read(bundle.xclbin("mha.vision"))
    assert parsed.partition is not None
    assert b'"head_dim":32,"heads":3,"kv_heads":3' in parsed.partition.pdis[0].image


def test_packed_weights_have_the_norms_before_them_folded_in(
    bundle: Bundle, weights: dict[str, F32]
) -> None:
    for name, n in (
        ("vision_tower.patch_embedder.input_proj", 96),
        ("embed_vision.embedding_projection", 64),
    ):
        wanted = weights[f"{name}.weight"].T
        found = unpack(bundle.tensors.u8(f"{name}.packed"), len(wanted), n)
        np.testing.assert_array_equal(found, round_f32(wanted.copy()))
    for i in range(LAYERS):
        layer = f"{TOWER}.{i}"

        def linear(name: str, layer: str = layer) -> F32:
            transposed: F32 = weights[f"{layer}.{name}.linear.weight"].T
            return transposed

        def packed(key: str, k: int, n: int, layer: str = layer) -> F32:
            return unpack(bundle.tensors.u8(f"{layer}.{key}.packed"), k, n)

        qkv = np.concatenate([linear(f"self_attn.{part}_proj") for part in "qkv"], axis=1)
        norm = weights[f"{layer}.input_layernorm.weight"][:, None]
        np.testing.assert_array_equal(packed("qkv", 96, 288), round_f32(norm * qkv))
        norm = weights[f"{layer}.pre_feedforward_layernorm.weight"][:, None]
        pair = unpair(packed("gate_up", 96, 768), 384)
        for half, name in zip(pair, ("gate", "up"), strict=True):
            np.testing.assert_array_equal(half, round_f32(norm * linear(f"mlp.{name}_proj")))
        for key, name, k in (("o", "self_attn.o_proj", 96), ("down", "mlp.down_proj", 384)):
            np.testing.assert_array_equal(packed(key, k, 96), round_f32(linear(name)))


def test_host_tensors_are_the_towers_own(bundle: Bundle, weights: dict[str, F32]) -> None:
    norms = ("q_norm", "k_norm")
    host = {"vision_tower.patch_embedder.position_embedding_table"}
    for i in range(LAYERS):
        host |= {f"{TOWER}.{i}.self_attn.{norm}.weight" for norm in norms}
        host |= {
            f"{TOWER}.{i}.post_{part}_layernorm.weight" for part in ("attention", "feedforward")
        }
    found = {n for n in bundle.tensors.names() if n.startswith(("vision_", "embed_vision."))}
    assert {name for name in found if not name.endswith(".packed")} == host
    for name in host:
        np.testing.assert_array_equal(bundle.tensors.f32(name), weights[name])


@pytest.mark.slow
def test_tables_of_positions_stay_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    name = "vision_tower.patch_embedder.position_embedding_table"
    file = checkpoint / "model.safetensors"
    tensors = {n: open_safetensors(file).f32(n) for n in open_safetensors(file).names()}
    bits = to_bf16(tensors[name])
    file.unlink()
    write_safetensors(file, {**tensors, name: bits}, {name})
    found = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out"))
    np.testing.assert_array_equal(found.tensors.bf16(name), bits)


def test_the_bundle_carries_an_image_its_soft_tokens_and_its_vector(
    bundle: Bundle, weights: dict[str, F32]
) -> None:
    (record,) = bundle.manifest.tagged("ref")
    name, width, height = record.fields
    rgb = bundle.tensors.u8(f"ref.{name}.rgb", (int(height), int(width), 3))
    limits = ImageLimits(16, 3, 70)
    np.testing.assert_array_equal(rgb, self_check_image(limits))
    patches = preprocess(rgb, limits)
    pixels = bundle.tensors.f32(f"ref.{name}.pixels")
    positions = bundle.tensors.i32(f"ref.{name}.positions")
    np.testing.assert_array_equal(pixels, patches.pixels)
    np.testing.assert_array_equal(positions, patches.positions)
    assert bundle.tensors.shape(f"ref.{name}.soft") == (len(pixels) // 9, 64)
    found = bundle.tensors.f32(f"ref.{name}.embedding")
    np.testing.assert_allclose(found, embed(weights, pixels, positions), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 5, 70, 140, 280, 560, 1120])
def test_the_bundles_image_needs_no_resizing(most: int) -> None:
    limits = ImageLimits(16, 3, most)
    image = self_check_image(limits)
    assert target_size(image.shape[0], image.shape[1], limits) == image.shape[:2]
    assert len(np.unique(image)) > 200


@pytest.mark.slow
def test_attention_on_the_host_leaves_its_kernels_out(checkpoint: Path, tmp_path: Path) -> None:
    host = Bundle.open(export_checkpoint(checkpoint, tmp_path / "out", attention="host"))
    assert "patch.vision" in host.specs.gemms
    assert host.specs.all_mhas == ()


# --- configurations -----------------------------------------------------------------------------


def test_the_processors_sizes_are_found_in_either_file_or_are_the_defaults(
    checkpoint: Path,
) -> None:
    file = checkpoint / "preprocessor_config.json"
    config = vision_config(checkpoint)
    assert config is not None
    assert config.limits == ImageLimits(16, 3, 70)
    assert config.tokens == TOKENS
    whole = {"image_processor": {**json.loads(file.read_text()), "max_soft_tokens": 35}}
    file.unlink()
    (checkpoint / "processor_config.json").write_text(json.dumps(whole))
    config = vision_config(checkpoint)
    assert config is not None
    assert config.limits.max_soft_tokens == 35
    (checkpoint / "processor_config.json").unlink()
    edit(checkpoint / "config.json", "vision_config", position_embedding_size=10240)
    config = vision_config(checkpoint)
    assert config is not None
    assert config.limits.max_soft_tokens == 280


def test_a_checkpoint_without_a_tower_has_no_config(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", vision_config=None)
    assert vision_config(checkpoint) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "siglip"}, "model_type 'siglip', wanted 'gemma4_vision'"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu', wanted 'gelu_pytorch_tanh'"),
        ({"standardize": True}, "standardize True, wanted false"),
        ({"use_clipped_linears": True}, "use_clipped_linears True, wanted false"),
        ({"attention_bias": True}, "attention_bias True, wanted false"),
        ({"head_dim": 30}, "head_dim 30, wanted a multiple of 4"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2, wanted a divisor"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type 'default', wanted 'axial'"),
        ({"rope_parameters": {"rope_theta": 1e2, "factor": 2}}, "factor 2, wanted none"),
        ({"position_embedding_size": 209}, "position_embedding_size 209, wanted at least 210"),
        ({"patch_size": 14}, "patch_size 16, wanted 14 of the vision tower"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size 3, wanted 2 of the vision tower"),
        ({"pooling_kernel_size": 65}, "pooling_kernel_size 65, wanted an integer 1 to 64"),
        ({"patch_size": 65}, "patch_size 65, wanted an integer 1 to 64"),
        ({"intermediate_size": 2**16}, "intermediate_size 65536, wanted an integer 1 to 32768"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0, wanted a number > 0"),
    ],
)
def test_a_tower_this_engine_would_compute_differently_is_refused(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit(checkpoint / "config.json", "vision_config", **changes)
    with pytest.raises(BundleError, match=words):
        vision_config(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"do_normalize": True}, "preprocessor_config.json: do_normalize True, wanted False"),
        ({"do_resize": False}, "do_resize False, wanted True"),
        ({"resample": 2}, "resample 2, wanted 3"),
        ({"rescale_factor": 0.5}, "rescale_factor 0.5, wanted 1/255"),
        ({"max_soft_tokens": 0}, "max_soft_tokens 0, wanted an integer >= 1"),
        ({"max_soft_tokens": 456}, "config.json: images of 4104 patches, wanted at most 4096"),
        ({"max_soft_tokens": 10**9}, "max_soft_tokens 1000000000, wanted an integer 1 to 16384"),
    ],
)
def test_a_processor_that_prepares_differently_is_refused(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit(checkpoint / "preprocessor_config.json", **changes)
    with pytest.raises(BundleError, match=words):
        vision_config(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boi_token_id": None}, "boi_token_id missing, wanted an integer"),
        ({"eoi_token_id": 1400}, "eoi_token_id 1400, wanted less than vocab_size 1400"),
    ],
)
def test_tokens_around_an_image_must_be_there(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(BundleError, match=words):
        vision_config(checkpoint)


def test_an_image_must_fit_the_text_encoder(checkpoint: Path) -> None:
    with pytest.raises(BundleError, match="images of 74 tokens, wanted at most 73"):
        gemma4_vision_config(open_checkpoint(checkpoint), 73, VOCAB_SIZE)
    assert gemma4_vision_config(open_checkpoint(checkpoint), 74, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{TOWER}.3.extra": np.ones(2, np.float32)}, "layers.3.extra is not part of this model"),
        (
            {f"{TOWER}.1.self_attn.q_norm.weight": ...},
            "layers.1.self_attn.q_norm.weight is missing",
        ),
        (
            {"embed_vision.embedding_projection.weight": np.ones((64, 95), np.float32)},
            r"embedding_projection.weight has shape \[64, 95\], wanted \[64, 96\]",
        ),
    ],
)
def test_weights_that_do_not_belong_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, F32 | EllipsisType], words: str
) -> None:
    edit_weights(checkpoint / "model.safetensors", **changes)
    with pytest.raises(BundleError, match=words):
        export_checkpoint(checkpoint, tmp_path / "out")
