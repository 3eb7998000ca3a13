"""embedding_gemma2 from the published layout, against float32 references of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bundle_edits import edited
from commandline import run
from gemma_checkpoints import TINY_EG2
from published_bundles import with_tensors, without_lines
from references import (
    F32,
    NEAR_BITS,
    check_vectors,
    cosines,
    load_references,
    stored_references,
)
from safetensors.numpy import load_file

from npu_embed import BundleError, DeviceError, Embedder, InputError
from npu_embed.bundle import Bundle
from npu_embed.emulator import xclbin
from npu_embed.tensors import open_tensors

# Rounding every linear to bfloat16 leaves 0.99993, and each slice's sum is rounded once more.
LOWEST = 0.9995
PACK_ROWS = 1024  # holds all texts; smaller buffers are quicker to go through
WANTED = load_references(TINY_EG2)
LENGTHS = np.array([len(ids) for ids in WANTED.ids])
WINDOW = 12


STORED = load_file(TINY_EG2 / "references.safetensors")
IMAGES = [STORED[f"image.{i}.rgb"] for i in range(3)]
IMAGE_VECTORS = np.stack([STORED[f"image.{i}.embedding"] for i in range(3)])


def embed(bundle: Path) -> F32:
    """The vectors of all texts, in one pack."""
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        return embedder.embed(WANTED.texts)


def test_token_ids_are_the_references(published_bundle: Path) -> None:
    with Embedder(published_bundle, "emulated") as embedder:
        found = embedder.tokenize(WANTED.texts)
    assert [tuple(ids) for ids in found] == list(WANTED.ids)


@pytest.mark.parametrize("mode", ["strict", pytest.param("loose", marks=pytest.mark.slow)])
def test_vectors_are_the_references_alone_and_together(
    published_bundle: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    some = slice(None) if mode == "strict" else slice(None, None, 6)
    with Embedder(published_bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        together = embedder.embed(WANTED.texts)
        assert embedder.stats.packs == 1
        alone = np.stack([embedder.embed(text) for text in WANTED.texts[some]])
    check_vectors(together, WANTED.embeddings, LOWEST)
    check_vectors(alone, WANTED.embeddings[some], LOWEST)
    assert np.abs(together[some] - alone).max() < NEAR_BITS


@pytest.mark.slow
def test_both_layouts_agree_but_for_roundings(
    published_bundle: Path, eg2_host_bundle: Path
) -> None:
    found, own = embed(published_bundle), embed(eg2_host_bundle)
    assert cosines(found, own).min() > LOWEST
    assert np.abs(found - own).max() > 0  # sums of slices, each rounded, are other sums


def test_o_and_down_are_sums_of_slices(published_bundle: Path) -> None:
    with Embedder(published_bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        embedder.embed("one pack")
        # ple; then qkv, o in 2 or 4 slices, gate_up, down in 4, ple_gate, ple_proj.
        assert embedder.stats.runs == 1 + 5 * (4 + 2 + 4) + (4 + 4 + 4)
        assert embedder.stats.swaps == embedder.stats.switches == 0


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["t0.o1", "t5.o3", "t2.down3"])
def test_no_slice_is_left_out(published_bundle: Path, tmp_path: Path, tensor: str) -> None:
    zeros = np.zeros_like(open_tensors(published_bundle).u8(tensor))
    other = with_tensors(published_bundle, tmp_path / "b", {tensor: zeros})
    assert cosines(embed(other), WANTED.embeddings).max() < LOWEST


@pytest.mark.slow
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_another_window_turns_long_texts_wrong_and_no_short_one(
    published_bundle: Path, tmp_path: Path, window: int
) -> None:
    change = (f"param window {WINDOW}\n", f"param window {window}\n")
    found = embed(edited(published_bundle, tmp_path / "b", change))
    long = LENGTHS > 3 * WINDOW
    assert cosines(found, WANTED.embeddings)[long].min() < LOWEST
    short = LENGTHS <= WINDOW
    check_vectors(found[short], WANTED.embeddings[short], LOWEST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("theta_s 10000.0", "theta_s 1000000.0"),
        ("theta_g 1000000.0", "theta_g 100.0"),
        ("eps 1e-06", "eps 0.9"),
    ],
)
def test_another_param_turns_vectors_wrong(
    published_bundle: Path, tmp_path: Path, old: str, new: str
) -> None:
    found = embed(edited(published_bundle, tmp_path / "b", (old, new)))
    assert cosines(found, WANTED.embeddings).min() < LOWEST


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor",
    ["t.norm", "t.ple_norm", "t.layer_scalar", "t2.q_norm", "t2.k_norm", "t2.post_attn",
     "t2.post_ff", "t2.post_ple"],
)  # fmt: skip
def test_every_host_tensor_counts(published_bundle: Path, tmp_path: Path, tensor: str) -> None:
    stored = open_tensors(published_bundle).f32(tensor)
    other = with_tensors(published_bundle, tmp_path / "b", {tensor: np.ones_like(stored)})
    assert cosines(embed(other), WANTED.embeddings).min() < LOWEST


def test_the_references_in_the_bundle_are_met_and_none_is_cut(published_bundle: Path) -> None:
    wanted = stored_references(published_bundle)
    with Embedder(published_bundle, "emulated") as embedder:
        assert max(map(len, wanted.ids)) < embedder.max_tokens
        found = [*embedder.embed(wanted.texts[:-1])]
        found.append(embedder.embed(wanted.texts[-1], prompt="SearchQuery"))
    check_vectors(np.stack(found), wanted.embeddings, LOWEST)


@pytest.mark.parametrize("mode", ["strict", pytest.param("loose", marks=pytest.mark.slow)])
def test_images_are_the_references_alone_and_together(
    published_bundle: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    some = slice(None) if mode == "strict" else slice(2, None)
    with Embedder(published_bundle, "emulated") as embedder:
        together = embedder.embed_image(IMAGES)
        alone = np.stack([embedder.embed_image(image) for image in IMAGES[some]])
    check_vectors(together, IMAGE_VECTORS, LOWEST)
    check_vectors(alone, IMAGE_VECTORS[some], LOWEST)
    assert np.abs(together[some] - alone).max() < NEAR_BITS


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["v0.down2", "v2.o", "v.patch", "v.ev"])
def test_no_weight_of_the_tower_is_left_out(
    published_bundle: Path, tmp_path: Path, tensor: str
) -> None:
    zeros = np.zeros_like(open_tensors(published_bundle).u8(tensor))
    other = with_tensors(published_bundle, tmp_path / "b", {tensor: zeros})
    with Embedder(other, "emulated") as embedder:
        found = embedder.embed_image(IMAGES)
    assert cosines(found, IMAGE_VECTORS).max() < LOWEST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"), [("v.theta 100.0", "v.theta 10000.0"), ("v.eps 1e-06", "v.eps 0.9")]
)
def test_another_param_of_the_tower_turns_vectors_wrong(
    published_bundle: Path, tmp_path: Path, old: str, new: str
) -> None:
    other = edited(published_bundle, tmp_path / "b", (old, new))
    with Embedder(other, "emulated") as embedder:
        assert cosines(embedder.embed_image(IMAGES), IMAGE_VECTORS).min() < LOWEST


@pytest.mark.slow
def test_check_fails_over_another_nearest_text(published_bundle: Path, tmp_path: Path) -> None:
    tensors = open_tensors(published_bundle)
    texts, image = tensors.f32("ref.texts"), tensors.f32("ref.waves.embedding")
    # Two texts: the image's true vector, and one that the reference is made to be.
    turned = np.roll(image, 1)
    assert texts.shape[1] == len(image)
    changed = {"ref.texts": np.stack([image, turned]), "ref.waves.embedding": turned}
    other = with_tensors(published_bundle, tmp_path / "b", changed)
    result = run("check", other, "--device", "emulated")
    assert result.code == 1
    assert "FAIL  nearest text    0 of 1 images nearest to the same text: not waves" in result.out


def test_prompts_are_those_of_the_checkpoint(published_bundle: Path) -> None:
    with Embedder(published_bundle, "emulated") as embedder:
        prompted = embedder.embed("cats", prompt="Document")
        np.testing.assert_array_equal(prompted, embedder.embed("title: none | text: cats"))
        with pytest.raises(InputError, match="Classification, Document, SearchQuery"):
            embedder.embed("cats", prompt="query")


@pytest.mark.slow
def test_check_passes_and_skips_what_the_layout_does_not_hold(published_bundle: Path) -> None:
    result = run("check", published_bundle, "--device", "emulated")
    assert (result.code, result.err) == (0, "")
    assert "6 of 6 texts equal" in result.out
    assert "wanted 0.999000" in result.out
    assert "1 of 1 images prepared alike" in result.out
    assert "1 of 1 images nearest to the same text" in result.out
    assert "FAIL" not in result.out


@pytest.mark.slow
def test_check_fails_over_a_wrong_vector_and_wrong_ids(
    published_bundle: Path, tmp_path: Path
) -> None:
    tensors = open_tensors(published_bundle)
    turned = tensors.f32("tref.1.embedding")[::-1].copy()
    ids = tensors.i32("tref.0.ids")[[0, 2, 1, *range(3, len(tensors.i32("tref.0.ids")))]]
    changed = {"tref.1.embedding": turned, "tref.0.ids": ids}
    other = with_tensors(published_bundle, tmp_path / "b", changed)
    result = run("check", other, "--device", "emulated")
    assert result.code == 1
    assert "FAIL  token ids       5 of 6 texts equal, others: 0" in result.out
    assert "FAIL  embedding" in result.out


def image_only(bundle: Path, folder: Path) -> Path:
    """A copy without anything of texts but the encoder."""
    tables = ("t.embed", "tok.vocab", "tok.vocab_off", "tok.merges")
    other = with_tensors(bundle, folder, dict.fromkeys(tables))
    return without_lines(
        other, "param max_text_tokens", "param bos", "param eos", "added", "tref", "sha256 tensors."
    )


@pytest.mark.slow
def test_a_bundle_for_images_only_opens_and_says_so_when_given_a_text(
    published_bundle: Path, tmp_path: Path
) -> None:
    bundle = image_only(published_bundle, tmp_path / "b")
    with Embedder(bundle, "emulated") as embedder:
        check_vectors(embedder.embed_image(IMAGES), IMAGE_VECTORS, LOWEST)
        assert embedder.max_tokens == 0
        for call in (embedder.embed, embedder.tokenize):
            with pytest.raises(InputError, match="tiny-eg2: a bundle for images only"):
                call("a text")
    result = run("check", bundle, "--device", "emulated")
    assert result.code == 0
    assert "SKIP  references" in result.out
    assert "PASS  image vector" in result.out


@pytest.mark.slow
@pytest.mark.parametrize("device", ["emulated", "auto"])
def test_real_machine_code_is_refused_by_the_emulated_npu_in_one_clear_error(
    published_bundle: Path, tmp_path: Path, device: str
) -> None:
    bundle = edited(published_bundle, tmp_path / "b")
    # The beginning of a PDI as AMD's tools write it, and no array program in it.
    real = xclbin.build(pdi_image=bytes.fromhex("DD00000044332211") + bytes(64))
    for name in ("gemm", "mha"):
        (bundle / f"kernels/{name}.xclbin").write_bytes(real)
    with pytest.raises(DeviceError, match=r'AIE cores.*cannot run; use device="npu"'):
        Embedder(bundle, device)
    result = run("check", bundle, "--device", "emulated")
    assert result.code == 1
    assert 'use device="npu"' in result.out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hd 32,32,32,32,32,64", "hd 32,32,32,32,64", "hd has 5 items, wanted 6, one a layer"),
        ("hd 32,32", "hd 32,64", "hd is 64 in layer 1, wanted 32 as in the other sliding layers"),
        ("kv_heads 2,2", "kv_heads 2,1", "kv_heads is 1 in layer 1, wanted 2"),
        ("s,s,g", "s,s,x", "layer_types has 'x', wanted s or g"),
        ("param D 64", "param D 60", "param D is 60, wanted 64 as t.embed has"),
        ("param layers 6", "param layers 5", "layer_types has 6 items, wanted 5"),
        ("param heads 4", "param heads 8", "no gemm t_qkv384 record|no gemm t_qkv640 record"),
        ("gemm t_gu", "gemm t_gate", "no gemm t_gu record|right after"),
        ("param I 256", "param I 250", "down K x 4 slices is 256, wanted exactly 250"),
        ("param I 256", "param I 320", "gate_up n_out is 256, wanted at least 320"),
        ("max_text_tokens 512", "max_text_tokens 4096", "max_rows 2048, wanted at least"),
        ("max_text_tokens 512", "max_text_tokens 0", "max_text_tokens is '0', wanted an integer"),
        ("param bos 2\n", "", "param bos is missing"),
        ("param out 96", "param out 97", r"tensor t.proj has shape \[96, 64\], wanted \[97, 64\]"),
        ("param theta_s 10000.0", "param theta_s 0", "rope_local_base_freq is 0"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused(
    published_bundle: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    bundle = edited(published_bundle, tmp_path / "b", (old, new))
    with pytest.raises(BundleError, match=words):
        Embedder(bundle, "emulated")


@pytest.mark.parametrize("tensor", ["t3.o1", "t5.down0", "t.norm", "t1.post_ple", "tok.merges"])
def test_a_missing_tensor_is_named_as_the_layout_names_it(
    published_bundle: Path, tmp_path: Path, tensor: str
) -> None:
    bundle = with_tensors(published_bundle, tmp_path / "b", {tensor: None})
    with pytest.raises(BundleError, match=f"tensor {tensor} missing from tensors.bin"):
        Embedder(bundle, "emulated")


def test_inspect_shows_each_gemm_once_by_its_own_name(published_bundle: Path) -> None:
    bundle = Bundle.open(published_bundle)
    keys = [gemm.key for gemm in bundle.specs.all_gemms]
    texts = ["t_ple", "t_qkv256", "t_qkv384", "t_o", "t_gu", "t_down", "t_pleg", "t_plep"]
    assert keys == [*texts, "v_patch", "v_qkv", "v_o", "v_gu", "v_down", "v_ev"]
    result = run("inspect", published_bundle)
    assert result.code == 0
    assert result.out.count("t_down ") == 1
