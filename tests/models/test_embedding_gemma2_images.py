"""embedding_gemma2's images against float32 references of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_edits import edited, with_tensors
from commandline import run
from gemma_checkpoints import TINY_EG2
from numpy.typing import NDArray
from PIL import Image
from references import F32, NEAR_BITS, check_vectors, load_references
from safetensors.numpy import load_file

from npu_embed import BundleError, DeviceError, Embedder, InputError, InputTypeError
from npu_embed.bundle import Bundle
from npu_embed.imagecheck import check_images, read_image_references
from npu_embed.models import image_encoder
from npu_embed.selfcheck import self_check

# Rounding the linears' weights, inputs and outputs to bfloat16 alone leaves 0.99991; five times
# that is allowed.
MIN_COSINE = 0.9995
LAYERS, TEXT_LAYERS = 3, 6

U8 = NDArray[np.uint8]


@pytest.fixture(scope="module")
def images() -> list[U8]:
    """The images Hugging Face embedded: a square, a photo's shape, a strip."""
    stored = load_file(TINY_EG2 / "references.safetensors")
    return [stored[f"image.{i}.rgb"] for i in range(3)]


@pytest.fixture(scope="module")
def wanted() -> F32:
    """Their vectors, [3, 96]."""
    stored = load_file(TINY_EG2 / "references.safetensors")
    return np.stack([stored[f"image.{i}.embedding"] for i in range(3)])


@pytest.fixture(scope="module")
def engine(eg2_bundle: Path) -> Iterator[Embedder]:
    """An Embedder that tests share, and must leave embedding."""
    with Embedder(eg2_bundle, "emulated") as opened:
        yield opened


def embed(bundle: Path, images: list[U8]) -> F32:
    with Embedder(bundle, "emulated") as embedder:
        return embedder.embed_image(images)


@pytest.mark.parametrize("mode", ["strict", pytest.param("loose", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fixture", ["eg2_bundle", pytest.param("eg2_host_bundle", marks=pytest.mark.slow)]
)
def test_vectors_are_the_references_alone_and_together(
    fixture: str,
    mode: str,
    images: list[U8],
    wanted: F32,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    some = slice(None) if mode == "strict" else slice(2, None)  # loose memory is slow
    with Embedder(request.getfixturevalue(fixture), "emulated") as embedder:
        together = embedder.embed_image(images)
        alone = np.stack([embedder.embed_image(image) for image in images[some]])
    check_vectors(together, wanted, MIN_COSINE)
    check_vectors(alone, wanted[some], MIN_COSINE)
    assert np.abs(together[some] - alone).max() < NEAR_BITS


@pytest.mark.slow
def test_many_images_run_in_several_packs_in_step(
    eg2_bundle: Path, images: list[U8], wanted: F32
) -> None:
    order = [0, 1, 2, 2, 1, 0, 1, 0, 2, 1]
    found = embed(eg2_bundle, [images[i] for i in order])
    check_vectors(found, wanted[order], MIN_COSINE)
    for i, vector in zip(order, found, strict=True):
        assert np.abs(vector - found[order.index(i)]).max() < NEAR_BITS


@pytest.mark.slow
def test_slots_memory_mode_and_runlists_change_no_bit(
    eg2_bundle: Path, images: list[U8], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for mode, slots, runlists in (
        ("strict", 16, "on"),
        ("strict", 1, "on"),
        ("strict", 2, "off"),
        ("loose", 1, "off"),
    ):
        monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
        monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(slots))
        monkeypatch.setenv("NPU_EMBED_RUNLISTS", runlists)
        found.append(embed(eg2_bundle, images[1:]))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 8])
def test_images_of_a_group_share_the_switches_of_one(
    eg2_bundle: Path, images: list[U8], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    with Embedder(eg2_bundle, "emulated") as embedder:
        embedder.embed_image((images * 3)[:count])
        assert embedder.stats.images == count
        assert embedder.stats.swaps == 2 * (LAYERS + TEXT_LAYERS)


@pytest.mark.slow
def test_a_text_and_another_image_leave_nothing_behind(eg2_bundle: Path, images: list[U8]) -> None:
    longest = max(load_references(TINY_EG2).texts, key=len)
    with Embedder(eg2_bundle, "emulated") as embedder:
        before = embedder.embed_image(images[2]), embedder.embed("short")
        embedder.embed(longest)
        embedder.embed_image(images)
        after = embedder.embed_image(images[2]), embedder.embed("short")
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_files_and_arrays_are_the_same_and_one_is_a_row(
    eg2_bundle: Path, images: list[U8], tmp_path: Path
) -> None:
    path = tmp_path / "strip.png"
    Image.fromarray(images[2]).save(path)
    with Embedder(eg2_bundle, "emulated") as embedder:
        one = embedder.embed_image(images[2])
        assert one.shape == (96,)
        assert one.dtype == np.float32
        for other in (path, str(path), Image.fromarray(images[2])):
            np.testing.assert_array_equal(embedder.embed_image(other), one)
        for several in ([path], (path,), iter([path]), images[2][None]):
            np.testing.assert_array_equal(embedder.embed_image(several), one[None])


def test_dim_cuts_to_unit_length(engine: Embedder, images: list[U8]) -> None:
    whole = engine.embed_image(images[2])
    found = engine.embed_image(images[2], dim=32)
    np.testing.assert_allclose(found, whole[:32] / np.linalg.norm(whole[:32]), atol=1e-6)
    assert engine.embed_image(images[2:], dim=32).shape == (1, 32)
    for dim in (0, 97, True, "32"):
        with pytest.raises(InputError, match="dim="):
            engine.embed_image(images[2], dim=dim)  # type: ignore[arg-type]


def test_no_images_are_no_rows(engine: Embedder) -> None:
    found = engine.embed_image([])
    assert found.shape == (0, 96)
    assert found.dtype == np.float32


def test_statistics_count_images_and_their_tokens(engine: Embedder, images: list[U8]) -> None:
    engine.embed_image(images)
    last = engine.last_stats
    # 64, 63 and 46 soft tokens, and four tokens around each.
    assert (last.images, last.texts, last.tokens) == (3, 0, 64 + 63 + 46 + 3 * 4)
    assert {"preprocess", "gemm", "mha", "host"} <= set(last.seconds)


# --- what cannot be embedded ---------------------------------------------------------------------


def test_a_bundle_for_texts_only_says_so(gemma3_bundle: Path, tiny_bundle: Path) -> None:
    for bundle in (gemma3_bundle, tiny_bundle):
        with (
            Embedder(bundle, "emulated") as embedder,
            pytest.raises(InputError, match="a bundle for texts only, wanted one that embeds im"),
        ):
            embedder.embed_image("a.png")


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (None, InputTypeError, r"images\[1\]: NoneType, wanted a PIL image"),
        ("/nowhere.png", InputError, r"images\[1\]: '/nowhere.png': no such file"),
        (np.zeros((4, 4), np.uint8), InputError, r"images\[1\]: array 4x4, wanted \[height"),
        (np.zeros((4, 4, 3)), InputTypeError, r"images\[1\]: float64 array, wanted uint8"),
        (np.zeros((4, 0, 3), np.uint8), InputError, r"images\[1\]: array 4x0x3, wanted at least"),
    ],
)
def test_a_bad_image_is_named_by_its_index(
    engine: Embedder,
    images: list[U8],
    bad: Any,  # noqa: ANN401
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        engine.embed_image([images[2], bad])
    assert engine.embed_image(images[2]).shape == (96,)


def test_a_closed_embedder_embeds_no_image(eg2_bundle: Path, images: list[U8]) -> None:
    embedder = Embedder(eg2_bundle, "emulated")
    embedder.close()
    with pytest.raises(InputError, match="this Embedder is closed"):
        embedder.embed_image(images[0])


@pytest.mark.slow
def test_a_vector_that_is_not_finite_is_not_returned(
    eg2_bundle: Path, images: list[U8], tmp_path: Path
) -> None:
    name = "vision_tower.encoder.layers.2.post_feedforward_layernorm.weight"
    broken = with_tensors(
        eg2_bundle, tmp_path / "nan", {name: np.full(96, np.nan, dtype=np.float32)}
    )
    with (
        Embedder(broken, "emulated") as embedder,
        pytest.raises(DeviceError, match=r"images\[0\]: its vector is not finite"),
    ):
        embedder.embed_image(images[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("gemm patch.vision ", "gemm patch.other "), "no patch.vision record, embedding_gemma2"),
        (("name=vision ", "name=other "), "no mha name=vision record"),
        (("position_embedding_size.vision 256", "position_embedding_size.vision 209"), "at least"),
        (("max_rows.vision 2048", "max_rows.vision 629"), "max_rows.vision 629, wanted at least"),
        (("max_rows.vision 2048", "max_rows.vision 2049"), "rows.vision is 2048, wanted at least"),
        (("max_soft_tokens 70", "max_soft_tokens 72"), "rows, wanted 648, the patches of an image"),
        (("param eoi_token_id 6\n", ""), "eoi_token_id"),
        (("param eoi_token_id 6\n", "param eoi_token_id 1400\n"), "eoi_token_id"),
        (("head_dim.vision 32", "head_dim.vision 30"), "wanted a multiple of the latter, and of 4"),
        (("head_dim.vision 32", "head_dim.vision 64"), "qkv n_out.vision is 320, wanted at least"),
        (("rope_theta.vision 100.0", "rope_theta.vision 0"), "rope_theta.vision is 0, wanted a nu"),
        (("hidden_size.vision 96", "hidden_size.vision 300"), "n_out.vision is 128, wanted at lea"),
    ],
)
def test_a_damaged_bundle_is_refused(
    eg2_bundle: Path, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    changes = [change]
    if "patch" in change[0]:  # the records of its other streams follow a gemm by its key
        tags = ("gemm_chunks", "gemm_rows")
        changes += [(f"{tag} patch.vision ", f"{tag} patch.other ") for tag in tags]
    broken = edited(eg2_bundle, tmp_path / "broken", *changes)
    with pytest.raises(BundleError, match=words):
        Embedder(broken, "emulated")


# --- check and the command line ------------------------------------------------------------------


@pytest.mark.slow
def test_check_compares_the_bundles_image(eg2_bundle: Path) -> None:
    found = {o.check: o.status for o in self_check(eg2_bundle, "emulated")}
    assert [found[name] for name in ("pixels", "soft tokens", "image vector")] == ["PASS"] * 3


@pytest.mark.slow
def test_check_says_what_is_not_alike(eg2_bundle: Path) -> None:
    with Embedder(eg2_bundle, "emulated") as embedder:
        encoder = image_encoder(embedder._model)
        assert encoder is not None
        (stored,) = read_image_references(embedder.bundle)
        for change, failed in (
            (replace(stored, pixels=stored.pixels + np.float32(1e-3)), "pixels"),
            (replace(stored, pixels=stored.pixels[1:]), "pixels"),
            (replace(stored, positions=stored.positions[:, ::-1]), "pixels"),
            (replace(stored, soft=stored.soft[::-1]), "soft tokens"),
            (replace(stored, soft=stored.soft[1:]), "soft tokens"),
            (replace(stored, embedding=np.roll(stored.embedding, 1)), "image vector"),
            (replace(stored, embedding=stored.embedding[1:]), "image vector"),
        ):
            outcomes = list(check_images(encoder, [change]))
            assert [o.check for o in outcomes if o.status == "FAIL"] == [failed]
            assert outcomes[-1].status in ("PASS", "FAIL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("ref waves 432 336", "ref waves 432 335"), r"ref.waves.rgb has shape \[336, 432, 3\]"),
        (("ref waves 432 336", "ref waves 432"), "ref"),
        (("ref waves 432 336", "ref others 432 336"), "ref.others.pixels"),
    ],
)
def test_a_damaged_image_reference_fails_the_check(
    eg2_bundle: Path, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    bundle = Bundle.open(edited(eg2_bundle, tmp_path / "broken", change))
    with pytest.raises(BundleError, match=words):
        read_image_references(bundle)


@pytest.mark.slow
def test_the_command_line_embeds_images_beside_texts(
    eg2_bundle: Path, images: list[U8], wanted: F32, tmp_path: Path
) -> None:
    path = tmp_path / "strip.png"
    Image.fromarray(images[2]).save(path)
    common = ("embed", "--bundle", eg2_bundle, "--device", "emulated")
    result = run(*common, "--image", path, "--json", "a cat")
    assert result.code == 0, result.err
    text, image = result.json_lines
    assert (text["index"], text["text"], image["index"], image["image"]) == (
        0,
        "a cat",
        1,
        str(path),
    )
    vector = np.array(image["embedding"], dtype=np.float32)
    check_vectors(vector[None], wanted[2:], MIN_COSINE)
    only = run(*common, "--image", path, "--json").json_lines
    assert [line["image"] for line in only] == [str(path)]
    table = run(*common, "--image", path, "--table", "a cat")
    assert "strip.png" in table.out
    nothing = run(*common)
    assert nothing.code == 2
    assert "wanted a TEXT, - or --image FILE" in nothing.err
