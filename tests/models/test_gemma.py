"""What holds for both Gemma families, against float32 references of Hugging Face."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from commandline import run
from gemma_checkpoints import TINY_EG2, TINY_GEMMA3
from references import (
    F32,
    MIN_COSINE,
    NEAR_BITS,
    References,
    check_vectors,
    cosines,
    load_references,
    stored_references,
)

from npu_embed import Embedder, models
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.packing import make_packs
from npu_embed.trace import Timing

PACK_ROWS = 1024  # holds all texts of a model; smaller buffers are quicker to go through
LAYERS = 6

# bfloat16 roundings alone leave 0.99993 for embedding_gemma2, whose layers have two linears more
# and a scalar that lets errors of early layers grow; seven times that is allowed.
EG2_MIN_COSINE = 0.9995


@dataclass(frozen=True)
class Model:
    """A tiny model: the fixture of its bundle, its checkpoint, how near its vectors must be."""

    fixture: str
    checkpoint: Path
    lowest: float


ON_NPU = [
    pytest.param(Model("gemma3_bundle", TINY_GEMMA3, MIN_COSINE), id="gemma3"),
    pytest.param(Model("eg2_bundle", TINY_EG2, EG2_MIN_COSINE), id="eg2"),
]
ON_HOST = [  # where little is left to the NPU
    pytest.param(model, id=name, marks=pytest.mark.slow)
    for name, model in (
        ("gemma3-host", Model("gemma3_host_bundle", TINY_GEMMA3, MIN_COSINE)),
        ("eg2-host", Model("eg2_host_bundle", TINY_EG2, EG2_MIN_COSINE)),
    )
]
EVERY = [*ON_NPU, *ON_HOST]


@pytest.fixture
def bundle(request: pytest.FixtureRequest, model: Model) -> Path:
    """The model's bundle."""
    found: Path = request.getfixturevalue(model.fixture)
    return found


@pytest.fixture
def wanted(model: Model) -> References:
    """The model's references."""
    return load_references(model.checkpoint)


def embed_all(bundle: Path, wanted: References) -> F32:
    """The vectors of all texts, in one pack."""
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        vectors = embedder.embed(wanted.texts)
        assert embedder.stats.packs == 1
    return vectors


@pytest.mark.parametrize("model", ON_NPU)
def test_token_ids_are_the_references(bundle: Path, wanted: References) -> None:
    with Embedder(bundle, "emulated") as embedder:
        found = embedder.tokenize(wanted.texts)
    assert [tuple(ids) for ids in found] == list(wanted.ids)


@pytest.mark.parametrize("mode", ["strict", pytest.param("loose", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", EVERY)
def test_vectors_are_the_references_alone_and_together(
    bundle: Path,
    wanted: References,
    model: Model,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_MODE", mode)
    # Loose memory goes through every line of every buffer before every run: fewer texts alone.
    some = slice(None) if mode == "strict" else slice(None, None, 6)
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        together = embedder.embed(wanted.texts)
        alone = np.stack([embedder.embed(text) for text in wanted.texts[some]])
    check_vectors(together, wanted.embeddings, model.lowest)
    check_vectors(alone, wanted.embeddings[some], model.lowest)
    assert np.abs(together[some] - alone).max() < NEAR_BITS


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_NPU)
def test_slots_memory_mode_and_runlists_change_no_bit(
    bundle: Path, wanted: References, monkeypatch: pytest.MonkeyPatch
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
        found.append(embed_all(bundle, wanted))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("model", EVERY)
def test_one_slot_swaps_twice_a_layer_where_attention_is_on_the_npu(
    bundle: Path, wanted: References, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        for packs in (1, 2):
            embedder.embed(wanted.texts)
            a_pack = 0 if "host" in model.fixture else 2 * LAYERS
            assert embedder.stats.packs == packs
            assert embedder.stats.swaps == embedder.stats.switches == a_pack * packs


@pytest.mark.slow
@pytest.mark.parametrize("model", EVERY)
def test_packs_that_run_in_step_have_buffers_of_their_own(
    bundle: Path, wanted: References, model: Model
) -> None:
    texts = wanted.texts * 3
    with Embedder(bundle, "emulated") as embedder:
        found = embedder.embed(texts)
        assert (embedder.stats.packs, embedder.bundle.max_rows) == (2, 2048)
    check_vectors(found, np.concatenate([wanted.embeddings] * 3), model.lowest)
    for other in np.split(found, 3)[1:]:
        assert np.abs(found[: len(wanted.texts)] - other).max() < NEAR_BITS


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_NPU)
def test_a_pack_may_be_full_to_the_last_row_though_buckets_write_past_it(bundle: Path) -> None:
    with Embedder(bundle, "emulated") as embedder:
        wanted, rows = embedder.embed("hello"), embedder.max_tokens
        (ids,) = embedder.tokenize("hello")
    texts = ["hello"] * (rows // len(ids))
    assert rows - len(texts) * len(ids) < len(ids)  # the last text's bucket does not fit
    with Embedder(bundle, "emulated", pack_rows=rows) as embedder:
        found = embedder.embed(texts)
        assert embedder.stats.packs == 1
    assert np.abs(found - wanted).max() < NEAR_BITS


@pytest.mark.parametrize("model", EVERY)
def test_contexts_are_told_in_the_order_they_are_used(bundle: Path, wanted: References) -> None:
    opened = Bundle.open(bundle)
    loaded = models.load(Session.open("emulated"), opened, opened.max_rows)
    ids = [np.array(row, dtype=np.int32) for row in wanted.ids[:3]]
    (pack,) = make_packs([len(row) for row in ids], opened.max_rows)
    used = []
    for stretch in loaded.steps([ids[i] for i in pack.indices], pack, 0, Timing()):
        used += [run.step(opened.specs, opened.no_window).spec.ctx for run in stretch.runs]
        loaded.npu.submit(stretch.runs).wait()
    assert [ctx for ctx, _ in groupby(loaded.contexts())] == [ctx for ctx, _ in groupby(used)]
    loaded.close()
    opened.close()


@pytest.mark.parametrize("model", EVERY)
def test_a_longer_text_leaves_nothing_behind(bundle: Path, wanted: References) -> None:
    longest = max(wanted.texts, key=len)
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        before = embedder.embed("short")
        embedder.embed(longest)
        np.testing.assert_array_equal(embedder.embed("short"), before)


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_NPU)
def test_attention_on_the_host_gives_the_same_but_for_roundings(
    bundle: Path, wanted: References, model: Model, request: pytest.FixtureRequest
) -> None:
    on_host: Path = request.getfixturevalue(model.fixture.replace("_bundle", "_host_bundle"))
    assert not Bundle.open(on_host).specs.all_mhas
    found = cosines(embed_all(bundle, wanted), embed_all(on_host, wanted))
    assert found.min() > model.lowest


@pytest.mark.parametrize("model", EVERY)
def test_stages_are_tapped_in_order(bundle: Path, wanted: References, model: Model) -> None:
    opened = Bundle.open(bundle)
    loaded = models.load(Session.open("emulated"), opened, opened.max_rows)
    ids = [np.array(row, dtype=np.int32) for row in wanted.ids]
    (pack,) = make_packs([len(row) for row in ids], opened.max_rows)
    stages: list[tuple[str, tuple[int, ...]]] = []
    vectors = models.forward(
        loaded,
        [ids[i] for i in pack.indices],
        pack,
        Timing(),
        tap=lambda stage, rows: stages.append((stage, rows.shape)),
    )
    shape = (pack.rows, opened.manifest.param_int("hidden_size"))
    assert stages == [
        ("embeddings", shape),
        *((f"layer {i}", shape) for i in range(LAYERS)),
    ]
    check_vectors(vectors, wanted.embeddings[list(pack.indices)], model.lowest)
    loaded.close()
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("model", EVERY)
def test_check_passes(bundle: Path) -> None:
    result = run("check", bundle, "--device", "emulated")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert {line[:4] for line in lines[:-1]} == {"PASS"}
    stages = ["embeddings", *(f"layer {i}" for i in range(LAYERS)), "embedding"]
    assert [line[6:20].strip() for line in lines[-1 - len(stages) : -1]] == stages
    assert "7 of 7 texts equal" in result.out


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["npu", "host"])
@pytest.mark.parametrize("model", ON_NPU)
def test_the_command_line_exports_a_bundle_that_embeds(
    model: Model, attention: str, wanted: References, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    result = run("export", model.checkpoint, out, "--attention", attention)
    assert result.code == 0, result.err
    result = run("embed", "--bundle", out, "--device", "emulated", "--json", wanted.texts[0])
    (line,) = result.json_lines
    vector = np.array(line["embedding"], dtype=np.float32)
    check_vectors(vector[None], wanted.embeddings[:1], model.lowest)
    shutil.rmtree(out)


@pytest.mark.parametrize("model", ON_NPU)
def test_the_references_in_the_bundle_are_met_too(bundle: Path, model: Model) -> None:
    wanted = stored_references(bundle)
    texts, behind_a_prompt = wanted.texts[:-1], wanted.texts[-1]
    with Embedder(bundle, "emulated") as embedder:
        found = embedder.embed(texts)
        (first, *_) = embedder.bundle.prompts
        prompted = embedder.embed(behind_a_prompt, prompt=first)
    check_vectors(np.vstack([found, prompted]), wanted.embeddings, model.lowest)
