"""RoBERTa, XLM-RoBERTa and DistilBERT against float32 references of Hugging Face.

tests/data/tiny-{roberta,xlm-roberta,distilbert} are made by benchmarks/make_tiny_references.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import (
    DATA,
    F32,
    MIN_COSINE,
    NEAR_BITS,
    References,
    check_vectors,
    cosines,
    load_references,
)
from safetensors.numpy import load_file, save_file

from npu_embed import Embedder
from npu_embed.errors import BundleError
from npu_embed.exporters import export_checkpoint
from npu_embed.exporters.bert import bert_reference, reader
from npu_embed.exporters.bert_config import bert_config
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.models.bert import Bert
from npu_embed.models.roberta import Roberta
from npu_embed.selfcheck import self_check
from npu_embed.tensors import open_tensors

ROBERTA, XLM_ROBERTA, DISTILBERT = "roberta", "xlm-roberta", "distilbert"
RELATIVES = (ROBERTA, XLM_ROBERTA, DISTILBERT)
PACK_ROWS = 768  # holds all texts of a model; smaller buffers are quicker to go through
PAD = "<pad>"

# Hugging Face computes in float32: sums of some hundred products, each rounded to 2^-24, in three
# layers of sharp attention, seen in the elements of a unit vector.
REFERENCE_TOLERANCE = 5e-6

# The cosine of a vector that is wrong without doubt: ten times further off than is allowed.
WRONG = 1 - 10 * (1 - MIN_COSINE)

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Relative:
    """A family's tiny checkpoint, the bundle made of it, and what it must give."""

    model_type: str
    folder: Path
    bundle: Path
    wanted: References


def checkpoint_folder(model_type: str) -> Path:
    return DATA / f"tiny-{model_type}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Relative]:
    """Each family's bundle, only to be read."""
    out = tmp_path_factory.mktemp("relatives")
    found = {}
    for model_type in RELATIVES:
        folder = checkpoint_folder(model_type)
        bundle = export_checkpoint(folder, out / model_type)
        found[model_type] = Relative(model_type, folder, bundle, load_references(folder))
    return found


@pytest.fixture(params=RELATIVES)
def relative(request: pytest.FixtureRequest, made: dict[str, Relative]) -> Relative:
    """One family after the other."""
    model_type: str = request.param
    return made[model_type]


def copied(model_type: str, tmp_path: Path) -> Path:
    """A copy of a family's checkpoint, to be changed."""
    source = checkpoint_folder(model_type)
    return shutil.copytree(
        source, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("references*")
    )


def edit_json(path: Path, changes: dict[str, object]) -> None:
    """Set keys of a JSON object in a file; `...` removes one."""
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


def test_the_bundle_names_the_family_as_hugging_face_does(relative: Relative) -> None:
    with Embedder(relative.bundle, "emulated") as embedder:
        assert embedder.bundle.family == relative.model_type
        assert (embedder.dim, embedder.max_tokens) == (64, 64)


def test_token_ids_are_the_references(relative: Relative) -> None:
    with Embedder(relative.bundle, "emulated") as embedder:
        found = embedder.tokenize(relative.wanted.texts)
    assert [tuple(ids) for ids in found] == list(relative.wanted.ids)


def test_vectors_are_the_references_alone_and_together(relative: Relative) -> None:
    wanted = relative.wanted
    with Embedder(relative.bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        together = embedder.embed(wanted.texts)
        assert embedder.stats.packs == 1
        alone = np.stack([embedder.embed(text) for text in wanted.texts])
    check_vectors(together, wanted.embeddings)
    check_vectors(alone, wanted.embeddings)
    assert np.abs(together - alone).max() < NEAR_BITS


def test_one_slot_changes_no_bit(relative: Relative, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[F32] = []
    for slots in ("16", "1"):
        monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", slots)
        with Embedder(relative.bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
            found.append(embedder.embed(relative.wanted.texts))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.slow
def test_the_bundle_passes_its_own_check(relative: Relative) -> None:
    outcomes = list(self_check(relative.bundle, "emulated"))
    assert [outcome for outcome in outcomes if outcome.status == "FAIL"] == []
    assert "token ids" in " ".join(outcome.check for outcome in outcomes)


def test_the_exporters_reference_is_hugging_faces(relative: Relative) -> None:
    checkpoint = open_checkpoint(relative.folder)
    config = bert_config(checkpoint)
    model = bert_reference(config, reader(checkpoint, config))
    for ids, wanted in zip(relative.wanted.ids, relative.wanted.embeddings, strict=True):
        found = model.forward(np.array(ids, dtype=np.int32))
        np.testing.assert_allclose(found.embedding, wanted, atol=REFERENCE_TOLERANCE)


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [ROBERTA, XLM_ROBERTA])
def test_a_wrong_position_offset_turns_every_text_red(
    made: dict[str, Relative], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made[model_type].wanted
    right = Roberta.position_ids
    wrong = {
        "one early": lambda *args: right(*args) - 1,
        "as BERT counts": Bert.position_ids,
    }
    for name, position_ids in wrong.items():
        monkeypatch.setattr(Roberta, "position_ids", position_ids)
        with Embedder(made[model_type].bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
            assert cosines(embedder.embed(wanted.texts), wanted.embeddings).max() < WRONG, name


@pytest.mark.parametrize("model_type", [ROBERTA, XLM_ROBERTA])
def test_counting_typed_padding_as_a_position_turns_red(
    made: dict[str, Relative], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made[model_type].wanted
    typed = np.array([PAD in text for text in wanted.texts])
    assert typed.sum() == 2
    counting_all = Bert.position_ids
    monkeypatch.setattr(Roberta, "position_ids", lambda *args: counting_all(*args) + 2)
    with Embedder(made[model_type].bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        near = cosines(embedder.embed(wanted.texts), wanted.embeddings)
    assert near[typed].max() < MIN_COSINE <= near[~typed].min()


@pytest.mark.slow
def test_positions_begin_behind_the_checkpoints_own_padding_token(tmp_path: Path) -> None:
    folder = copied(ROBERTA, tmp_path)
    for given, padding_idx in ((..., 1), (None, 1), (0, 0)):
        edit_json(folder / "config.json", {"pad_token_id": given})
        assert bert_config(open_checkpoint(folder)).padding_idx == padding_idx
    edit_json(folder / "config.json", {"pad_token_id": 0})
    bundle = export_checkpoint(folder, tmp_path / "bundle")
    wanted = load_references(checkpoint_folder(ROBERTA))
    with Embedder(bundle, "emulated", pack_rows=PACK_ROWS) as embedder:
        assert cosines(embedder.embed(wanted.texts), wanted.embeddings).max() < WRONG


@pytest.mark.parametrize(("model_type", "limit"), [(ROBERTA, 64), (DISTILBERT, 64)])
def test_without_a_limit_a_text_may_fill_the_positions_that_are_used(
    model_type: str, limit: int, tmp_path: Path
) -> None:
    folder = copied(model_type, tmp_path)
    (folder / "sentence_bert_config.json").unlink()
    edit_json(folder / "tokenizer_config.json", {"model_max_length": 512})
    assert bert_config(open_checkpoint(folder)).max_tokens == limit


def test_a_bundle_with_too_few_positions_is_refused(
    made: dict[str, Relative], tmp_path: Path
) -> None:
    bundle = shutil.copytree(made[ROBERTA].bundle, tmp_path / "bundle")
    manifest = (bundle / "manifest.txt").read_text(encoding="utf-8")
    assert "param pad_token_id 1\n" in manifest
    changed = manifest.replace("param pad_token_id 1\n", "param pad_token_id 2\n")
    (bundle / "manifest.txt").write_text(changed, encoding="utf-8")
    words = "max_tokens 64, wanted at most 63 by max_position_embeddings 66"
    with pytest.raises(BundleError, match=words), Embedder(bundle, "emulated"):
        pass


# --- checkpoints in their other forms, and those refused ------------------------------------------


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "prefix", "heads"),
    [
        (ROBERTA, "roberta.", ["lm_head.bias", "lm_head.dense.weight"]),
        (XLM_ROBERTA, "roberta.", ["lm_head.bias", "roberta.embeddings.position_ids"]),
        (DISTILBERT, "distilbert.", ["vocab_transform.weight", "vocab_projector.bias"]),
    ],
)
def test_a_checkpoint_with_a_head_gives_the_same_bundle(
    made: dict[str, Relative], model_type: str, prefix: str, heads: list[str], tmp_path: Path
) -> None:
    folder = copied(model_type, tmp_path)
    unused = {name: np.zeros(4, np.float32) for name in heads}
    edit_weights(folder, lambda w: {**{prefix + name: w[name] for name in w}, **unused})
    bundle = export_checkpoint(folder, tmp_path / "bundle", name=f"tiny-{model_type}")
    files = [path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file()]
    for file in files:
        assert (bundle / file).read_bytes() == (made[model_type].bundle / file).read_bytes()


def test_a_family_without_token_types_has_one_of_zeros(made: dict[str, Relative]) -> None:
    table = open_tensors(made[DISTILBERT].bundle).f32("embeddings.token_type_embeddings.weight")
    assert table.shape == (1, 64)
    assert not table.any()


@pytest.mark.parametrize("name", ["roberta", "distilbert", "xlm-roberta"])
def test_the_limit_is_read_under_the_names_of_old_versions(name: str, tmp_path: Path) -> None:
    folder = copied(ROBERTA, tmp_path)
    old = folder / f"sentence_{name}_config.json"
    (folder / "sentence_bert_config.json").rename(old)
    edit_json(old, {"max_seq_length": 20})
    assert bert_config(open_checkpoint(folder)).max_tokens == 20
    edit_json(old, {"max_seq_length": 65})
    with pytest.raises(BundleError, match=f"{old.name}: max_seq_length 65, wanted at most"):
        bert_config(open_checkpoint(folder))


def config(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "config.json", changes)


def limit(value: int) -> Edit:
    return lambda folder: edit_json(folder / "sentence_bert_config.json", {"max_seq_length": value})


def pooled_width(value: int) -> Edit:
    changes: dict[str, object] = {"word_embedding_dimension": value}
    return lambda folder: edit_json(folder / "1_Pooling/config.json", changes)


def more(name: str) -> Edit:
    extra = {name: np.zeros(4, np.float32)}
    return lambda folder: edit_weights(folder, lambda w: {**w, **extra})


REFUSED: list[tuple[str, Edit, str]] = [
    (ROBERTA, config(model_type="mpnet"), "model_type 'mpnet', wanted 'bert', 'roberta'"),
    (ROBERTA, config(model_type="xlm-roberta-xl"), "model_type 'xlm-roberta-xl', wanted"),
    (ROBERTA, config(model_type="distilbert"), "config.json: dim missing, wanted an integer"),
    (ROBERTA, config(is_decoder=True), "is_decoder True, wanted false; this engine runs encoders"),
    (ROBERTA, config(add_cross_attention=True), "add_cross_attention True, wanted false"),
    (ROBERTA, config(position_embedding_type="relative_key"), "'relative_key', wanted 'absolute'"),
    (ROBERTA, config(hidden_act="relu"), "hidden_act 'relu', wanted 'gelu'"),
    (ROBERTA, config(layer_norm_eps=...), "layer_norm_eps missing, wanted a number > 0"),
    (ROBERTA, config(pad_token_id=-1), "pad_token_id -1, wanted an integer >= 0"),
    (ROBERTA, config(pad_token_id=2),
     "max_seq_length 64, wanted at most max_position_embeddings 66 of config.json less 3 that"),
    (ROBERTA, limit(65),
     "max_seq_length 65, wanted at most max_position_embeddings 66 of config.json less 2 that"),
    (XLM_ROBERTA, config(type_vocab_size=2),
     r"token_type_embeddings.weight has shape \[1, 64\], wanted \[2, 64\]"),
    (XLM_ROBERTA, more("classifier.dense.weight"), "classifier.dense.weight is not part of"),
    (DISTILBERT, config(sinusoidal_pos_embds=True), "sinusoidal_pos_embds True, wanted false"),
    (DISTILBERT, config(activation="relu"), "config.json: activation 'relu', wanted 'gelu'"),
    (DISTILBERT, config(activation=...), "config.json: activation missing, wanted 'gelu'"),
    (DISTILBERT, config(n_heads=5),
     "config.json: n_heads 5, wanted heads of an even width that fill dim 64"),
    (DISTILBERT, config(n_layers=4), r"tensor transformer\.layer\.3\.\S+ is missing"),
    (DISTILBERT, config(n_layers=2), r"tensor transformer\.layer\.2\.\S+ is not part of"),
    (DISTILBERT, config(hidden_dim=161),
     r"ffn.lin1.weight has shape \[160, 64\], wanted \[161, 64\]"),
    (DISTILBERT, limit(65),
     "max_seq_length 65, wanted at most max_position_embeddings 64 of config.json; lower it"),
    (DISTILBERT, pooled_width(32), "word_embedding_dimension 32, wanted dim 64 of config.json"),
    (DISTILBERT, more("pre_classifier.weight"), "pre_classifier.weight is not part of this model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "edit", "words"), REFUSED, ids=[f"{name}: {words}" for name, _, words in REFUSED]
)
def test_what_would_be_computed_differently_is_refused_by_name(
    model_type: str, edit: Edit, words: str, tmp_path: Path
) -> None:
    folder = copied(model_type, tmp_path)
    edit(folder)
    with pytest.raises(BundleError, match=words):
        export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
