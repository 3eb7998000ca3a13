"""The BERT family against float32 references of Hugging Face and sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from references import (
    F32,
    MINILM,
    NEAR_BITS,
    TINY,
    TINY_CLS,
    References,
    check_vectors,
    load_references,
    stored_references,
)

from npu_embed import Embedder, models
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.packing import make_packs
from npu_embed.trace import Timing

MODELS = [
    pytest.param("tiny_bundle", TINY, id="tiny-bert"),
    pytest.param("tiny_cls_bundle", TINY_CLS, id="tiny-bert-cls"),
    pytest.param("minilm_bundle", MINILM, id="minilm", marks=pytest.mark.slow),
]
SLOTS = (1, 2, 16)
PACK_ROWS = 768  # holds all texts of a model; smaller buffers are quicker to go through


@pytest.fixture
def bundle(request: pytest.FixtureRequest, model: str) -> Path:
    """The bundle of the fixture named by the parameter `model`."""
    found: Path = request.getfixturevalue(model)
    return found


@pytest.fixture
def wanted(folder: Path) -> References:
    """The references in the folder named by the parameter `folder`."""
    return load_references(folder)


def each_alone(embedder: Embedder, texts: tuple[str, ...]) -> F32:
    return np.stack([embedder.embed(text) for text in texts])


@pytest.mark.parametrize(("model", "folder"), MODELS)
def test_token_ids_are_the_references(bundle: Path, wanted: References) -> None:
    with Embedder(bundle, "emulated") as embedder:
        found = embedder.tokenize(wanted.texts)
    assert [tuple(ids) for ids in found] == list(wanted.ids)


@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        ("strict", 2),
        *(
            pytest.param(mode, slots, marks=pytest.mark.slow)
            for mode, slots in (("strict", 1), ("strict", 16), *(("loose", n) for n in SLOTS))
        ),
    ],
)
@pytest.mark.parametrize(("model", "folder"), MODELS)
def test_vectors_are_the_references(
    bundle: Path, wanted: References, mode: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(slots))
    # Loose memory goes through every line of every buffer before every run: fewer texts alone.
    some = slice(None) if mode == "strict" else slice(None, None, 4)
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        together = embedder.embed(wanted.texts)
        alone = each_alone(embedder, wanted.texts[some])
    check_vectors(together, wanted.embeddings)
    check_vectors(alone, wanted.embeddings[some])
    assert np.abs(together[some] - alone).max() < NEAR_BITS


@pytest.mark.slow
@pytest.mark.parametrize(("model", "folder"), MODELS)
def test_slots_and_memory_mode_change_no_bit(
    bundle: Path, wanted: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for mode, slots, seed in (
        ("strict", 16, 0),
        ("strict", 1, 0),
        ("loose", 2, 0),
        ("loose", 1, 7),
    ):
        monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
        monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(slots))
        monkeypatch.setenv("NPU_EMBED_EMU_SEED", str(seed))
        with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
            found.append(embedder.embed(wanted.texts))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize(("model", "folder"), MODELS)
@pytest.mark.parametrize("slots", SLOTS)
def test_one_slot_swaps_twice_a_layer_and_two_slots_never(
    bundle: Path, wanted: References, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(slots))
    with Embedder(bundle, "emulated") as embedder:
        layers = embedder.bundle.manifest.param_int("num_hidden_layers")
        for packs in (1, 2, 3):
            embedder.embed(wanted.texts)  # one pack
            assert embedder.stats.packs == packs
            assert embedder.stats.swaps == (2 * layers * packs if slots == 1 else 0)
            assert embedder.stats.switches == 2 * layers * packs


@pytest.mark.slow
def test_minilm_swaps_twelve_times_a_pack_in_one_slot(
    minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    with Embedder(minilm_bundle, "emulated") as embedder:
        embedder.embed("one pack")
        assert embedder.stats.swaps == 12


@pytest.mark.parametrize(("model", "folder"), MODELS)
def test_stages_are_tapped_in_order_and_do_not_depend_on_the_pack(
    bundle: Path, wanted: References
) -> None:
    opened = Bundle.open(bundle)
    model = models.load(Session.open("emulated"), opened, opened.max_rows)
    ids = [np.array(row, dtype=np.int32) for row in wanted.ids]
    (pack,) = make_packs([len(row) for row in ids], opened.max_rows)
    stages: list[tuple[str, tuple[int, ...]]] = []
    vectors = models.forward(
        model,
        [ids[i] for i in pack.indices],
        pack,
        Timing(),
        tap=lambda stage, rows: stages.append((stage, rows.shape)),
    )
    layers = opened.manifest.param_int("num_hidden_layers")
    shape = (pack.rows, opened.manifest.param_int("hidden_size"))
    assert stages == [
        ("embeddings", shape),
        *((f"layer {i}", shape) for i in range(layers)),
    ]
    check_vectors(vectors, wanted.embeddings[list(pack.indices)])
    model.close()
    opened.close()


@pytest.mark.parametrize("mode", ["strict", pytest.param("loose", marks=pytest.mark.slow)])
def test_widths_that_are_no_multiple_of_a_tile_are_padded_unseen(
    narrow_bundle: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    wanted = stored_references(narrow_bundle)
    with Embedder(narrow_bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        assert embedder.dim == 48
        assert [tuple(ids) for ids in embedder.tokenize(wanted.texts)] == list(wanted.ids)
        check_vectors(embedder.embed(wanted.texts), wanted.embeddings)


@pytest.mark.parametrize(("model", "folder"), MODELS)
def test_the_references_in_the_bundle_are_met_too(bundle: Path, folder: Path) -> None:
    wanted = stored_references(bundle)
    assert wanted.embeddings.shape[1] == load_references(folder).embeddings.shape[1]
    with Embedder(bundle, "emulated") as embedder:
        check_vectors(embedder.embed(wanted.texts), wanted.embeddings)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_minilm_64_texts_in_a_pack_share_what_each_alone_would_take(
    minilm_bundle: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(slots))
    texts = [f"text {i} of the pack" for i in range(64)]
    layers, gemms = 6, 4
    with Embedder(minilm_bundle, "emulated") as embedder:
        for _ in range(2):
            embedder.embed(texts)
            packed = embedder.last_stats
            assert packed.packs == 1
            assert packed.swaps == (2 * layers if slots == 1 else 0)
            assert packed.switches <= 2 * layers
            assert packed.runs == layers * (gemms + len(texts))
            assert packed.runlists == layers * 2
        embedder.embed(texts[0])
        alone = embedder.last_stats
    assert packed.swaps / len(texts) <= 0.19
    attention = layers * len(texts)
    assert 8 * (packed.runs - attention) / len(texts) <= alone.runs - layers
