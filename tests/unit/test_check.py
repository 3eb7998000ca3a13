"""`check`: a sound bundle passes, and each kind of damage fails by name, the later checks made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commandline import run
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from npu_embed.flights import Flight
from npu_embed.manifest import sha256_file
from npu_embed.nearness import LAYER_DEVIATION, Nearness
from npu_embed.npu import Npu
from npu_embed.outcomes import Outcome
from npu_embed.runs import MhaRun, Run
from npu_embed.selfcheck import self_check

CHECKS = [
    "sha256",
    "bundle",
    "streams",
    *(f"mha_{rows} words" for rows in range(16, 129, 16)),
    "token ids",
    "device",
    "embeddings",
    *(f"layer {layer}" for layer in range(3)),
    "embedding",
]
STAGES = CHECKS[-5:]

Tensors = dict[str, NDArray[np.generic]]


@pytest.fixture(scope="module")
def small_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with fewer chunks and texts: it is checked again and again."""
    out = tmp_path_factory.mktemp("small") / "bundle"
    shutil.copytree(tiny_bundle, out)
    dropped = [path for path in out.glob("kernels/*_x*") if int(path.name.split("_x")[1][:-10]) > 4]
    names = {f"kernels/{path.name}" for path in dropped}
    for path in dropped:
        path.unlink()

    def edit(text: str) -> str:
        lines = [
            line
            for line in text.replace("param max_rows 2048", "param max_rows 256").splitlines()
            if not any(name in line for name in names) and line[:7] not in ("tref 4 ", "tref 5 ")
        ]
        return "\n".join(lines) + "\n"

    edit_manifest(out, edit)
    return out


@pytest.fixture
def copy(small_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the small bundle, to be damaged."""
    return Path(shutil.copytree(small_bundle, tmp_path / "bundle"))


def failed(bundle: Path) -> list[str]:
    """The checks that failed, by name."""
    return [o.check for o in outcomes(bundle) if o.status == "FAIL"]


def outcomes(bundle: Path) -> list[Outcome]:
    """What every check found."""
    return list(self_check(bundle, "emulated"))


def first_failure(bundle: Path) -> Outcome:
    """What the first check that failed found; later ones are not made."""
    return next(o for o in self_check(bundle, "emulated") if o.status == "FAIL")


def edit_manifest(bundle: Path, edit: Callable[[str], str]) -> None:
    """Rewrite the manifest, which must change."""
    path = bundle / "manifest.txt"
    text = path.read_text(encoding="utf-8")
    edited = edit(text)
    assert edited != text
    path.write_text(edited, encoding="utf-8")


def edit_line(bundle: Path, begin: str, old: str, new: str) -> None:
    """Replace `old` once in the line of the manifest that begins so."""

    def edit(text: str) -> str:
        lines = text.splitlines()
        (index,) = [i for i, line in enumerate(lines) if line.startswith(begin)]
        assert old in lines[index]
        lines[index] = lines[index].replace(old, new, 1)
        return "\n".join(lines) + "\n"

    edit_manifest(bundle, edit)


def record_hash(bundle: Path, file: str) -> None:
    """Make the manifest's hash of a file the one it has now: damage a hash does not show."""
    wanted = sha256_file(bundle / file)

    def edit(text: str) -> str:
        lines = [
            f"sha256 {file} {wanted}" if line.startswith(f"sha256 {file} ") else line
            for line in text.splitlines()
        ]
        return "\n".join(lines) + "\n"

    edit_manifest(bundle, edit)


def edit_tensors(bundle: Path, edit: Callable[[Tensors], None]) -> None:
    """Rewrite the tensors and their hash."""
    path = bundle / "tensors.safetensors"
    tensors: Tensors = dict(load_file(path))
    edit(tensors)
    save_file(tensors, path)
    record_hash(bundle, path.name)


# A sound bundle


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_cls_bundle"])
def test_a_sound_bundle_passes_every_check(name: str, request: pytest.FixtureRequest) -> None:
    result = run("check", request.getfixturevalue(name), "--device", "emulated")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert [line[6:22].strip() for line in lines[:-1]] == CHECKS
    assert {line[:4] for line in lines[:-1]} == {"PASS"}
    assert lines[-1] == f"{len(CHECKS)} passed, 0 failed, 0 skipped"
    assert "6 of 6 texts equal" in result.out
    assert "emulated: Emulated NPU (npu2)" in result.out


def test_the_outcomes_are_told_in_json(small_bundle: Path) -> None:
    result = run("check", small_bundle, "--device", "emulated", "--json")
    *found, verdict = result.json_lines
    assert result.code == 0
    assert [line["check"] for line in found] == CHECKS
    assert verdict == {"verdict": "PASS", "passed": len(CHECKS), "failed": 0, "skipped": 0}
    layer = next(line for line in found if line["check"] == "layer 1")
    assert layer["figures"]["cosine"] >= layer["figures"]["cosine_wanted"]
    assert layer["figures"]["cosine_wanted"] == 1 - 2 * LAYER_DEVIATION
    assert layer["figures"]["texts"] == 4


def test_a_failure_ends_with_1_and_does_not_end_the_checks(copy: Path) -> None:
    edit_line(copy, "mha 64 ", "kv_words=14,", "kv_words=15,")  # a bucket no text is in
    result = run("check", copy, "--device", "emulated")
    assert result.code == 1
    lines = result.out.splitlines()
    assert [line[:22].strip() for line in lines if line.startswith("FAIL")] == [
        "FAIL  mha_64 words"
    ]
    assert lines[-1] == f"{len(CHECKS) - 1} passed, 1 failed, 0 skipped"
    told = run("check", copy, "--device", "emulated", "--json")
    assert told.code == 1
    assert told.json_lines[-1]["verdict"] == "FAIL"


def test_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "manifest.txt"), (tmp_path / "nowhere", "no such folder")):
        result = run("check", path)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert words in result.err


# Files


@pytest.mark.parametrize("place", [0, 100_000, -1])
def test_a_changed_byte_of_the_weights_fails(copy: Path, place: int) -> None:
    path = copy / "tensors.safetensors"
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    data = bytearray(path.read_bytes())
    data[place if place < 0 else header_bytes + place] ^= 1
    path.write_bytes(data)
    found = outcomes(copy)
    assert found[0].status == "FAIL"
    assert found[0].detail.startswith("tensors.safetensors: found ")
    assert [o.check for o in found] == CHECKS  # all the others were made


def test_a_file_that_is_gone_fails_and_ends_the_checks(copy: Path) -> None:
    (copy / "kernels" / "mha_64.insts.bin").unlink()
    found = outcomes(copy)
    assert [(o.check, o.status) for o in found] == [("sha256", "FAIL"), ("bundle", "FAIL")]
    assert "mha_64.insts.bin" in found[1].detail
    assert found[1].detail.endswith("Nothing further could be checked.")


def test_a_stream_that_is_none_fails(copy: Path) -> None:
    path = copy / "kernels" / "up_x4.insts.bin"
    data = bytearray(path.read_bytes())
    data[8] ^= 1  # the count of ops
    path.write_bytes(data)
    record_hash(copy, "kernels/up_x4.insts.bin")
    failure = first_failure(copy)
    assert failure.check == "streams"
    assert "up_x4.insts.bin: no instruction stream" in failure.detail


def test_an_mha_stream_that_is_none_fails_its_words_too(copy: Path) -> None:
    path = copy / "kernels" / "mha_64.insts.bin"
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    assert failed(copy)[:3] == ["sha256", "streams", "mha_64 words"]


# Words


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kv_words=14,", "kv_words=15,", "kv word 15 is no value of a WRITE"),
        ("kv_words=14,", "kv_words=8,", "kv words are at data memory +0x400, +0x404"),
        ("kv_words=14,", "kv_words=26,", "kv word 26 holds 0, wanted 16"),
        ("kv_words=14,", "kv_words=", "no kv word for core (0,2)"),
        ("win_words=20,", "win_words=21,", "window word 21 is no value of a WRITE"),
        ("win_words=20,", "win_words=", "no window word for core (0,2)"),
        (",464 ", ",484 ", "kv word 484"),
        # The whole column is left out of both lists, but for one core.
        ("14,44,74,104,", "14,", "no kv word for core (0,3)"),
    ],
)
def test_a_word_that_is_another_fails(copy: Path, old: str, new: str, words: str) -> None:
    edit_line(copy, "mha 16 ", old, new)
    failure = first_failure(copy)
    assert failure.check == "mha_16 words"
    assert words in failure.detail
    assert failure.detail.startswith("manifest.txt:")


def test_words_of_the_other_kind_fail(copy: Path) -> None:
    def swap(text: str) -> str:
        return (
            text.replace("kv_words", "others")
            .replace("win_words", "kv_words")
            .replace("others", "win_words")
        )

    edit_manifest(copy, swap)
    assert "kv word 20 holds 4294967295, wanted 16" in first_failure(copy).detail


def test_kv_and_window_words_of_different_cores_fail(copy: Path) -> None:
    edit_line(copy, "mha 16 ", "win_words=20,50,80,110,", "win_words=")
    failure = first_failure(copy)
    assert "kv and window words are not in the same cores" in failure.detail


def test_a_stream_compiled_for_another_bucket_fails(copy: Path) -> None:
    shutil.copyfile(copy / "kernels/mha_32.insts.bin", copy / "kernels/mha_16.insts.bin")
    record_hash(copy, "kernels/mha_16.insts.bin")
    failure = first_failure(copy)
    assert "kv word 14 holds 32, wanted 16 as compiled" in failure.detail


# Token ids


def test_a_tokenizer_that_reads_another_token_fails_and_the_stages_pass(copy: Path) -> None:
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["the"], vocabulary["a"] = vocabulary["a"], vocabulary["the"]
    path.write_text(json.dumps(content), encoding="utf-8")
    record_hash(copy, "tokenizer.json")
    (failure,) = [o for o in outcomes(copy) if o.status == "FAIL"]
    assert failure.check == "token ids"
    assert "of 4 texts equal, others: 1" in failure.detail


def test_a_tokenizer_that_is_none_fails_and_the_stages_pass(copy: Path) -> None:
    path = copy / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    found = outcomes(copy)
    assert [o.check for o in found] == CHECKS
    assert [o.check for o in found if o.status == "FAIL"] == ["sha256", "token ids"]


# Numbers


def swap_layers(tensors: Tensors) -> None:
    a, b = "encoder.layer.1.up.packed", "encoder.layer.2.up.packed"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def scale_norm(tensors: Tensors) -> None:
    name = "encoder.layer.2.output.LayerNorm.weight"
    tensors[name] = tensors[name].astype(np.float32) * np.float32(1.5)


def shift_embeddings(tensors: Tensors) -> None:
    name = "embeddings.LayerNorm.bias"
    tensors[name] = tensors[name].astype(np.float32) + np.float32(0.01)


@pytest.mark.parametrize(
    ("damage", "first"),
    [(shift_embeddings, "embeddings"), (swap_layers, "layer 1"), (scale_norm, "layer 2")],
)
def test_the_first_stage_that_is_wrong_is_the_first_that_fails(
    copy: Path, damage: Callable[[Tensors], None], first: str
) -> None:
    edit_tensors(copy, damage)
    found = outcomes(copy)
    assert next(o.check for o in found if o.status == "FAIL") == first
    assert [o.check for o in found] == CHECKS


def test_a_wrong_vector_fails_though_its_stages_pass(copy: Path) -> None:
    edit_line(copy, "param pooling ", "mean", "max")
    assert failed(copy) == ["embedding"]


def test_a_vector_that_is_not_of_unit_length_fails(copy: Path) -> None:
    edit_line(copy, "param normalize ", "1", "0")
    edit_line(copy, "param stages ", ",normalize", "")
    assert failed(copy) == ["embedding"]


def test_a_single_key_too_many_fails(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Npu.submit

    def wrong(npu: Npu, runs: Sequence[Run]) -> Flight:
        one_more = [
            replace(run, rows=26) if isinstance(run, MhaRun) and run.rows == 25 else run
            for run in runs
        ]
        return right(npu, one_more)

    monkeypatch.setattr(Npu, "submit", wrong)
    assert failed(small_bundle) == STAGES[1:]


def test_a_run_that_fails_is_told_and_what_ran_before_is_too(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_TIMEOUT_MS", "0")
    found = outcomes(small_bundle)
    assert [o.check for o in found if o.status == "FAIL"] == ["run"]
    assert "NPU_EMBED_TIMEOUT_MS" in next(o.detail for o in found if o.check == "run")
    assert (found[-1].check, found[-1].status) == ("embedding", "SKIP")


# References


def cut_hidden(tensors: Tensors) -> None:
    tensors["tref.3.hidden"] = np.ascontiguousarray(tensors["tref.3.hidden"][:-1])


def lengthen_hidden(tensors: Tensors) -> None:
    hidden = tensors["tref.3.hidden"]
    tensors["tref.3.hidden"] = np.concatenate([hidden, hidden[-1:]])


def narrow_hidden(tensors: Tensors) -> None:
    tensors["tref.3.hidden"] = np.ascontiguousarray(tensors["tref.3.hidden"][:, :, :-1])


def cut_embedding(tensors: Tensors) -> None:
    tensors["tref.3.embedding"] = np.ascontiguousarray(tensors["tref.3.embedding"][:-1])


def id_out_of_range(tensors: Tensors) -> None:
    ids = tensors["tref.3.ids"].copy()
    ids[1] = np.int32(1000)
    tensors["tref.3.ids"] = ids


def drop_row(tensors: Tensors) -> None:
    tensors["tref.3.hidden"] = np.ascontiguousarray(tensors["tref.3.hidden"][:, :-1])


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (cut_hidden, "run", "a stage 3 (layer 2) of 64 columns as the model has"),
        (lengthen_hidden, "run", "hidden [5, 26, 64], embedding [64], wanted 4 stages as the"),
        (narrow_hidden, "run", "a stage 0 (embeddings) of 64 columns as the model has"),
        (cut_embedding, "run", "an embedding of 64 numbers as the model has"),
        (id_out_of_range, "references", "tensor tref.3.ids has 26 ids, wanted 1 to 128 from 0 to"),
        (drop_row, "references", "tensor tref.3.hidden has shape [4, 25, 64]"),
    ],
)
def test_references_that_do_not_fit_the_model_fail(
    copy: Path, damage: Callable[[Tensors], None], check: str, words: str
) -> None:
    edit_tensors(copy, damage)
    failure = first_failure(copy)
    assert failure.check == check
    assert words in failure.detail


def test_an_unknown_prompt_of_a_reference_fails(copy: Path) -> None:
    edit_line(copy, "tref 0 ", "tref 0 - ", "tref 0 query ")
    assert failed(copy) == ["references"]


def test_nothing_to_check_against_is_skipped_and_not_passed(copy: Path) -> None:
    edit_manifest(
        copy,
        lambda text: "".join(
            line
            for line in text.splitlines(keepends=True)
            if not line.startswith(("sha256 ", "tref "))
        ),
    )
    result = run("check", copy, "--device", "emulated")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("SKIP  sha256")
    assert lines[-2].startswith("SKIP  references")
    assert lines[-1] == "10 passed, 0 failed, 2 skipped"


def test_a_bundle_without_hidden_rows_has_its_vectors_checked(copy: Path) -> None:
    def drop_hidden(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".hidden")]:
            del tensors[name]

    edit_tensors(copy, drop_hidden)
    status = {o.check: o.status for o in outcomes(copy)}
    assert {status[stage] for stage in STAGES[:-1]} == {"SKIP"}
    assert status["embedding"] == "PASS"


# Nearness


def test_a_number_that_is_none_is_the_worst_and_stays() -> None:
    rows = np.ones((2, 4), dtype=np.float32)
    nearness = Nearness.of_stage(1)
    damaged = rows.copy()
    damaged[1, 2] = np.nan
    for found, text in ((rows, "0"), (damaged, "1"), (rows, "2")):
        nearness.add(found, rows, text)
    assert not nearness.good
    assert np.isnan(nearness.cosine)
    assert np.isnan(nearness.norm_ratio)
    assert nearness.text == "1"


@pytest.mark.parametrize(
    ("scale", "turn", "good"),
    [
        (1.0, 0.0, True),
        (1.02, 0.0, True),
        (1.03, 0.0, False),
        (0.97, 0.0, False),
        (1.0, 0.02, True),
        (1.0, 0.03, False),
        (1.0, -0.03, False),
    ],
)
def test_rows_may_differ_a_little_in_length_and_direction(
    scale: float, turn: float, good: bool
) -> None:
    wanted = np.array([[1.0, 0.0], [3.0, 0.0]], dtype=np.float32)
    found = np.array([[1.0, 0.0], [3.0 * scale, 3.0 * turn]], dtype=np.float32)
    nearness = Nearness.of_stage(1)
    nearness.add(found, wanted, "0")
    assert nearness.good is good


def test_vectors_of_unit_length_must_stay_so() -> None:
    unit, long = np.array([[0.6, 0.8], [6.0, 8.0]], dtype=np.float32)
    for reference, good in ((unit, False), (long, True)):
        nearness = Nearness.of_embeddings([reference])
        nearness.add((reference * np.float32(1.001))[None], reference[None], "0")
        assert nearness.good is good
