"""The published layout: recognised, said in our words, and written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2, TINY_GEMMA3, edit, linked_copy, unpack, unpair
from numpy.typing import NDArray
from safetensors.numpy import load_file

from npu_embed import BundleError, Embedder, InputError, published
from npu_embed.bf16 import to_bf16
from npu_embed.bundle import Bundle
from npu_embed.exporters import export_checkpoint
from npu_embed.manifest import Manifest
from npu_embed.tensors import open_tensors

TYPICAL = {"D": "64", "layers": "6", "layer_types": "s", "hd": "32", "kv_heads": "2", "ple": "64"}
# A real bundle's params and tensors, as its reader asks for them.
PARAMS = """D I layers heads eps hd kv_heads layer_types theta_s theta_g ple out window t.rows
o_width no_window max_text_tokens bos eos
v.D v.I v.layers v.heads v.hd v.patch v.pool v.theta v.eps v.rows max_soft_tokens""".split()
LAYER_F32 = {"q_norm": 32, "k_norm": 32, "post_attn": 64, "post_ff": 64, "post_ple": 64}


def manifest(**params: str | None) -> Manifest:
    lines = [f"param {name} {value}\n" for name, value in params.items() if value is not None]
    return Manifest.parse("version 1\n" + "".join(lines))


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, True),
        ({"family": "embedding_gemma2"}, False),
        *(({name: None}, False) for name in TYPICAL),
    ],
)
def test_the_layout_is_known_by_its_params(changed: dict[str, str | None], wanted: bool) -> None:
    params: dict[str, str | None] = {**TYPICAL, **changed}
    assert published.is_published(manifest(**params)) is wanted


def test_our_own_bundles_are_not_of_the_layout(eg2_bundle: Path, published_bundle: Path) -> None:
    assert not Bundle.open(eg2_bundle).published
    assert Bundle.open(published_bundle).published


def test_params_get_our_names_and_keep_their_lines(published_bundle: Path) -> None:
    found = Bundle.open(published_bundle).manifest
    assert found.param_int("hidden_size") == found.param_int("D") == 64
    assert found.param_lines["hidden_size"] == found.param_lines["D"] > 1
    assert found.param_str("layer_types") == ",".join(
        ["sliding_attention"] * 5 + ["full_attention"]
    )
    assert [found.param_int(f"head_dim.{kind}") for kind in ("sliding", "full")] == [32, 64]
    assert [found.param_int(f"num_key_value_heads.{k}") for k in ("sliding", "full")] == [2, 1]
    assert found.param_float("rope_theta") == 1e6
    assert found.param_float("rope_local_base_freq") == 1e4
    assert found.param_int("vocab_size") == 1400


def test_the_exporter_writes_the_files_params_and_records_of_the_layout(
    published_bundle: Path,
) -> None:
    files = {path.name for path in published_bundle.iterdir()}
    assert files == {"manifest.txt", "tensors.txt", "tensors.bin", "kernels"}
    found = Manifest.read(published_bundle)
    assert set(found.params) == {*PARAMS, "name", "target"}
    assert found.param_ints("hd") == (32, 32, 32, 32, 32, 64)
    tags = {record.tag for record in found.records}
    assert tags == {
        "version", "param", "xclbin", "gemm", "gemm_chunks", "gemm_rows", "mha", "prompt", "added",
        "ref", "text", "tref", "sha256"
    }  # fmt: skip
    gemms = {record.fields[0]: record for record in found.tagged("gemm")}
    shapes = {key: tuple(r.get_int(n) for n in ("K", "N", "lda")) for key, r in gemms.items()}
    assert shapes == {
        "t_ple": (64, 384, 64),
        "t_qkv256": (64, 256, 64),
        "t_qkv384": (64, 384, 64),
        "t_o": (64, 64, 256),
        "t_gu": (64, 512, 64),
        "t_down": (64, 64, 256),
        "t_pleg": (64, 64, 64),
        "t_plep": (64, 64, 64),
        "v_patch": (768, 128, 768),
        "v_qkv": (128, 320, 128),
        "v_o": (128, 128, 128),
        "v_gu": (128, 768, 128),
        "v_down": (128, 128, 384),
        "v_ev": (128, 64, 128),
    }
    buckets = [r.field_int(0, "ROWS") for r in found.tagged("mha")]
    assert buckets == [128, 256, 384, 512, 640]
    assert [r.field_int(0, "ID") for r in found.tagged("added")] == list(range(8))
    assert found.tagged("added")[7].field_hex(1, "text") == "<|image|>"


def test_the_exporter_writes_every_tensor_of_the_layout(published_bundle: Path) -> None:
    tensors = open_tensors(published_bundle)
    wanted = {"t.ple", "t.ple_norm", "t.norm", "t.proj", "t.embed", "t.layer_scalar"}
    wanted |= {"tok.vocab", "tok.vocab_off", "tok.merges"}
    for i in range(6):
        slices = 4 if i == 5 else 2
        wanted |= {f"t{i}.{key}" for key in ("qkv", "gu", "pleg", "plep", *LAYER_F32)}
        wanted |= {f"t{i}.o{s}" for s in range(slices)} | {f"t{i}.down{s}" for s in range(4)}
    wanted |= {"v.patch", "v.ev", "v.pos", "t.tok", "ref.texts"}
    for i in range(3):
        norms = ("q_norm", "k_norm", "post_attn", "post_ff")
        wanted |= {f"v{i}.{key}" for key in ("qkv", "o", "gu", *norms)}
        wanted |= {f"v{i}.down{s}" for s in range(3)}
    parts = ("rgb", "pixels", "positions", "soft", "embedding")
    wanted |= {f"ref.waves.{part}" for part in parts}
    wanted |= {f"tref.{j}.{part}" for j in range(6) for part in ("ids", "embedding")}
    assert set(tensors.names()) == wanted
    for key, width in LAYER_F32.items():
        tensors.f32(f"t0.{key}", (width,))
        tensors.f32(f"t5.{key}", (2 * width if width == 32 else width,))


def test_packed_weights_and_tables_are_the_checkpoints(published_bundle: Path) -> None:
    tensors = open_tensors(published_bundle)
    stored = load_file(TINY_EG2 / "model.safetensors")

    def bf16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
        return to_bf16(np.ascontiguousarray(array, dtype=np.float32))

    layer = "language_model.layers.5"
    down = np.concatenate([unpack(tensors.u8(f"t5.down{s}"), 64, 64) for s in range(4)])
    np.testing.assert_array_equal(bf16(down), bf16(stored[f"{layer}.mlp.down_proj.weight"].T))
    o = np.concatenate([unpack(tensors.u8(f"t5.o{s}"), 64, 64) for s in range(4)])
    np.testing.assert_array_equal(bf16(o), bf16(stored[f"{layer}.self_attn.o_proj.weight"].T))
    gate, up = unpair(unpack(tensors.u8("t5.gu"), 64, 512), 256)
    norm = stored[f"{layer}.pre_feedforward_layernorm.weight"][:, None]
    for found, name in ((gate, "gate"), (up, "up")):
        folded = norm * stored[f"{layer}.mlp.{name}_proj.weight"].T
        np.testing.assert_array_equal(bf16(found), bf16(folded))
    np.testing.assert_array_equal(
        tensors.bf16("t.embed"), bf16(stored["language_model.embed_tokens.weight"])
    )
    tok = tensors.f32("t.tok")
    scaled = 8 * stored["language_model.embed_tokens.weight"][[2, 5, 6, 1]]
    np.testing.assert_array_equal(tok, scaled)  # bos, boi, eoi, eos; 8 = sqrt(64)
    scalars = [stored[f"language_model.layers.{i}.layer_scalar"][0] for i in range(6)]
    np.testing.assert_array_equal(tensors.f32("t.layer_scalar"), scalars)


@pytest.mark.slow
def test_the_same_checkpoint_gives_the_same_bytes(published_bundle: Path, tmp_path: Path) -> None:
    again = export_checkpoint(TINY_EG2, tmp_path / "b", name="tiny-eg2", layout="published")
    for path in published_bundle.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (again / path.relative_to(published_bundle)).read_bytes()


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        (("text_config",), {"hidden_size": 96}, "hidden_size 96, wanted a multiple of 64"),
        (("text_config",), {"intermediate_size": 300}, "intermediate_size 300, wanted a multiple"),
        (("text_config",), {"hidden_size_per_layer_input": 32}, "per_layer_input 32, wanted a"),
        (("text_config",), {"head_dim": 24}, "width of sliding heads 96, wanted a multiple of 64"),
    ],
)
def test_a_model_the_layout_cannot_hold_is_refused(
    tmp_path: Path, path: tuple[str, ...], changes: dict[str, object], words: str
) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    edit(folder / "config.json", *path, **changes)
    with pytest.raises(BundleError, match=words):
        export_checkpoint(folder, tmp_path / "b", layout="published")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 400}, "vision_config: intermediate_size 400, wanted a multiple of"),
        ({"num_key_value_heads": 1}, "vision_config: 1 key/value heads, wanted 3 in the published"),
    ],
)
def test_a_tower_the_layout_cannot_hold_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    edit(folder / "config.json", "vision_config", **changes)
    with pytest.raises(BundleError, match=words):
        export_checkpoint(folder, tmp_path / "b", layout="published")


@pytest.mark.slow
def test_a_checkpoint_without_a_tower_gives_a_bundle_for_texts(tmp_path: Path) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    edit(folder / "config.json", vision_config=...)
    out = export_checkpoint(folder, tmp_path / "b", layout="published")
    found = Manifest.read(out)
    assert not found.tagged("mha") + found.tagged("ref") + found.tagged("text")
    assert not any(name.startswith("v.") for name in found.params)
    with Embedder(out, "emulated", pack_rows=512) as embedder:
        assert np.isfinite(embedder.embed("a text")).all()
        with pytest.raises(InputError, match="a bundle for texts only"):
            embedder.embed_image(np.zeros((48, 48, 3), np.uint8))


def test_vectors_that_are_not_of_unit_length_are_refused(tmp_path: Path) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    with pytest.raises(BundleError, match="Normalize False, wanted one number and Normalize"):
        export_checkpoint(folder, tmp_path / "b", layout="published")


def test_another_family_has_no_published_layout(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="'gemma3_text', wanted 'embedding_gemma2'"):
        export_checkpoint(TINY_GEMMA3, tmp_path / "b", layout="published")


def test_an_unknown_layout_and_attention_on_the_npu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layout='ours': unknown, wanted 'npu-embed' or 'publ"):
        export_checkpoint(TINY_EG2, tmp_path / "b", layout="ours")
    with pytest.raises(InputError, match="attention on the host, wanted 'host'"):
        export_checkpoint(TINY_EG2, tmp_path / "b", layout="published", attention="npu")
