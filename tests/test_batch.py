"""npu-embed batch as a user runs it: every format, every refusal, and ends that come too early."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from commandline import Result, run
from numpy.typing import NDArray
from safetensors import safe_open

from npu_embed import DeviceError, Embedder, InputError
from npu_embed.batch import Job
from npu_embed.batch import run as run_job
from npu_embed.batch.columns import MAX_COLUMNS
from npu_embed.batch.folder import WorkFolder
from npu_embed.batch.lines import MAX_DEPTH
from npu_embed.batch.shards import SHARD_ROWS
from npu_embed.quantization import RANGES_FILE, Int8Ranges, quantize

ROOT = Path(__file__).parent.parent
TEXTS = ["two cats", "a\nred car", "", "Kantō 🙂", "plants", 'a "sofa", red', "the end"]
IDS = [10, 11, 12, 13, 14, 15, 16]
INPUTS = ("txt", "jsonl", "csv", "tsv", "parquet", "arrow")
OUTPUTS = ("npy", "safetensors", "parquet", "arrow", "feather", "jsonl")
ROWS = 3  # of a shard

Batch = Callable[..., Result]
Anything = Any


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, so that names are short."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def batch(tiny_bundle: Path) -> Batch:
    """Runs the command with the tiny bundle and shards of three rows."""

    def command(*args: object, bundle: Path = tiny_bundle, stdin: bytes = b"") -> Result:
        options = ("--shard-rows", ROWS, "--bundle", bundle, "--device", "emulated")
        return run("batch", *options, *args, stdin=stdin)

    return command


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as opened:
        yield opened


def vectors_of(engine: Embedder, texts: list[str], **how: Anything) -> NDArray[np.float32]:
    """What the command should give: each shard embedded by itself."""
    shards = [texts[i : i + ROWS] for i in range(0, len(texts), ROWS)]
    return np.concatenate([engine.embed(shard, **how) for shard in shards])


def write_input(path: Path, texts: list[str] = TEXTS) -> Path:
    """A file of the texts, with ids and a column more where the format has columns."""
    rows = [{"id": i, "text": t, "n": n} for n, (i, t) in enumerate(zip(IDS, texts, strict=False))]
    table = pa.table({key: [r[key] for r in rows] for key in ("id", "text", "n")})
    if path.suffix == ".txt":
        path.write_text("".join(f"{t}\n" for t in texts), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix in (".arrow", ".feather"):
        pyarrow.feather.write_feather(table, path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            delimiter = "," if path.suffix == ".csv" else "\t"
            writer = csv.DictWriter(file, ["id", "text", "n"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def read_vectors(path: Path) -> NDArray[Any]:
    """The vectors of an output."""
    found: NDArray[Any]
    if path.suffix == ".npy":
        found = np.load(path)
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as file:
            found = file.get_tensor("embedding")
    else:
        found = np.array(read_columns(path)["embedding"])
    return found


def read_columns(path: Path) -> dict[str, list[Any]]:
    """The columns of an output that has them."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {key: [row[key] for row in rows] for key in (rows[0] if rows else ["embedding"])}
    table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.feather.read_table(path)
    columns: dict[str, list[Any]] = table.to_pydict()
    return columns


def metadata(path: Path) -> dict[str, str]:
    """What an output says of itself."""
    if path.suffix in (".npy", ".jsonl"):
        found: dict[str, str] = json.loads(Path(f"{path}.meta.json").read_bytes())
        return found
    if path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata())
    schema = pq.read_schema(path) if path.suffix == ".parquet" else ipc.open_file(path).schema
    return {k.decode().removeprefix("npu_embed."): v.decode() for k, v in schema.metadata.items()}


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("source", INPUTS)
def test_every_format_becomes_every_other(
    batch: Batch, engine: Embedder, source: str, output: str
) -> None:
    texts = [t.replace("\n", " ") for t in TEXTS] if source == "txt" else TEXTS
    write_input(Path(f"in.{source}"), texts)
    out = Path(f"out.{output}")
    done = batch(f"in.{source}", "-o", out)
    assert (done.code, done.out) == (0, f"{out}\n")
    np.testing.assert_array_equal(
        read_vectors(out).astype(np.float32), vectors_of(engine, texts), strict=True
    )
    assert metadata(out)["rows"] == "7"
    if output in ("parquet", "arrow", "feather", "jsonl"):
        columns = read_columns(out)
        assert columns["text"] == texts
        if source != "txt":
            as_read = [str(i) for i in IDS] if source in ("csv", "tsv") else IDS
            assert list(columns) == ["id", "text", "n", "embedding"]
            assert columns["id"] == as_read
    left = {p.name for p in Path().iterdir()} - {f"in.{source}", out.name, f"{out}.meta.json"}
    assert not left


def test_the_embedding_is_a_fixed_size_list(batch: Batch) -> None:
    write_input(Path("in.jsonl"))
    batch("in.jsonl", "-o", "out.parquet")
    assert pq.read_schema("out.parquet").field("embedding").type == pa.list_(pa.float32(), 64)


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_rows_are_an_output_too(batch: Batch, output: str) -> None:
    Path("in.jsonl").write_text("\n")
    out = Path(f"out.{output}")
    done = batch("in.jsonl", "-o", out)
    assert done.code == 0, done.err
    assert len(read_vectors(out)) == 0
    assert metadata(out)["rows"] == "0"


@pytest.mark.slow
def test_several_inputs_are_read_one_after_another(batch: Batch, engine: Embedder) -> None:
    for name, some in (("b.txt", TEXTS[4:5]), ("a.txt", TEXTS[3:4])):
        write_input(Path(name), some)
    write_input(Path("c.parquet"), TEXTS)
    assert batch("*.txt", "c.parquet", "-o", "out.jsonl").code == 0
    wanted = [TEXTS[3], TEXTS[4], *TEXTS]
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in found] == wanted
    vectors = np.array([row["embedding"] for row in found], np.float32)
    np.testing.assert_array_equal(vectors, vectors_of(engine, wanted))


@pytest.mark.parametrize("output", ["safetensors", "parquet", "jsonl"])
def test_ids_are_kept(batch: Batch, output: str) -> None:
    write_input(Path("in.parquet"))
    out = Path(f"out.{output}")
    assert batch("in.parquet", "-o", out, "--id-column", "id").code == 0
    if output != "safetensors":
        assert read_columns(out)["id"] == IDS
        return
    with safe_open(out, framework="numpy") as file:
        assert file.get_tensor("id").tolist() == IDS
        assert file.get_tensor("row").tolist() == list(range(7))


def test_another_column_is_embedded(batch: Batch, engine: Embedder) -> None:
    Path("in.jsonl").write_text('{"body": "cats", "text": 3}\n')
    assert batch("in.jsonl", "-o", "out.npy", "--column", "body").code == 0
    np.testing.assert_array_equal(np.load("out.npy"), engine.embed(["cats"]))


@pytest.mark.slow
def test_the_metadata_says_what_it_is(batch: Batch, tiny_bundle: Path) -> None:
    write_input(Path("in.txt"), TEXTS[3:5])
    for output in OUTPUTS:
        batch("in.txt", "-o", f"out.{output}", "--dim", 32, "--dtype", "float16")
        found = metadata(Path(f"out.{output}"))
        wanted = {"model": "tiny-bert", "dim": "32", "dtype": "float16", "prompt": ""}
        assert wanted.items() <= found.items()
        assert len(found["bundle_sha256"]) == 64
        assert found["version"]


def test_the_summary_is_a_json_line(batch: Batch) -> None:
    write_input(Path("in.jsonl"))
    (found,) = batch("in.jsonl", "-o", "out.npy", "--json").json_lines
    assert found["output"] == "out.npy"
    assert (found["rows"], found["skipped"], found["computed"], found["kept"]) == (7, 0, 7, 0)
    assert found["tokens"] == found["stats"]["tokens"] > 7
    assert found["seconds"] > 0


# --- fewer bytes --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", ["float16", "int8", "binary"])
def test_a_dtype_is_the_quantized_vector(
    batch: Batch, engine: Embedder, dtype: str, output: str
) -> None:
    write_input(Path("in.jsonl"))
    sample = np.random.default_rng(0).standard_normal((100, 32), dtype=np.float32)
    sample *= np.float32(1 / 8)
    np.save("sample.npy", sample)
    calibrate = ("--calibrate", "sample.npy") if dtype == "int8" else ()
    out = Path(f"out.{output}")
    done = batch("in.jsonl", "-o", out, "--dim", 32, "--dtype", dtype, *calibrate)
    assert done.code == 0, done.err
    ranges = Int8Ranges.of(sample)
    wanted = quantize(vectors_of(engine, TEXTS, dim=32), dtype, ranges)
    found = read_vectors(out)
    np.testing.assert_array_equal(found.astype(wanted.dtype), wanted, strict=True)
    if output in ("npy", "safetensors"):
        assert found.dtype == wanted.dtype
    if dtype == "int8":
        stored = np.array(json.loads(metadata(out)["int8_ranges"]), np.float32)
        np.testing.assert_array_equal(stored, ranges.as_array())


def test_ranges_come_from_texts_or_from_the_bundle(batch: Batch, tiny_copy: Path) -> None:
    write_input(Path("in.jsonl"))
    write_input(Path("sample.csv"))
    shape = ("--dtype", "int8")
    assert batch("in.jsonl", "-o", "a.npy", *shape, "--calibrate", "sample.csv").code == 0
    stored = run("calibrate", tiny_copy, "sample.csv", "--device", "emulated")
    assert (stored.code, stored.out) == (0, f"{tiny_copy / RANGES_FILE}\n")
    assert stored.err.startswith("warning: calibration with sample.csv: 7 texts, wanted 200 at le")
    assert batch("in.jsonl", "-o", "b.npy", *shape, bundle=tiny_copy).code == 0
    np.testing.assert_array_equal(np.load("a.npy"), np.load("b.npy"))
    hashes = [metadata(Path(name))["bundle_sha256"] for name in ("a.npy", "b.npy")]
    assert hashes[0] == hashes[1]  # ranges do not make another model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "binary", "--dim", 20), "20 dimensions, wanted a multiple of 8"),
        (("--dtype", "int8"), "dtype int8: no ranges"),
        (("--dtype", "int8", "--calibrate", "none.npy"), "none.npy: no such file"),
        (("--dtype", "int8", "--calibrate", "in.jsonl", "--dim", 65), "dim=65"),
        (("--dtype", "int8", "--calibrate", "wide.npy"), "vectors of shape [2, 3], wanted [rows,"),
        (("--dtype", "int8", "--calibrate", "bad.npy"), "wanted an npy file"),
        (("--dtype", "int8", "--calibrate", "bad.jsonl"), "bad.jsonl:1: broken JSON"),
        (("--calibrate", "wide.npy"), "dtype float32 has no ranges"),
        (("--dim", 0), "dim=0"),
        (("--prompt", "query"), "unknown prompt"),
        (
            ("--column", "body"),
            "in.jsonl:1: no column 'body', it has id, text, n; pass --column NAME, correct it, or",
        ),
        (("--id-column", "id"), "npy holds no ids"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    batch: Batch, options: tuple[object, ...], words: str
) -> None:
    write_input(Path("in.jsonl"))
    np.save("wide.npy", np.eye(2, 3, dtype=np.float32))
    Path("bad.npy").write_bytes(b"nonsense")
    Path("bad.jsonl").write_text("{")
    before = {p.name for p in Path().iterdir()}
    done = batch("in.jsonl", "-o", "out.npy", *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert {p.name for p in Path().iterdir()} == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("none.txt", "-o", "out.npy"), "none.txt: no such file"),
        (("in.jsonl", "-o", "out.md"), "ending .md, wanted"),
        (("in.jsonl", "-o", "in.jsonl"), "in.jsonl: is the output too"),
        (("in.jsonl", "-o", "none/out.npy"), "none: no such folder"),
        (("in.jsonl", "-o", "."), ".: a folder"),
        (("in.jsonl", "in.md", "-o", "out.npy"), "in.md: ending .md"),
        (("in.jsonl", "-o", "out.safetensors", "--id-column", "text"), "wanted a 64-bit integer"),
        (("old.jsonl", "-o", "out.parquet"), "a column 'embedding', wanted that name"),
        (("old.jsonl", "-o", "out.jsonl"), "a column 'embedding', wanted that name"),
        (("in.jsonl", "n.parquet", "-o", "out.parquet"), "column 'n' holds string, wanted int64"),
    ],
)
def test_inputs_and_outputs_that_do_not_fit_are_refused(
    batch: Batch, args: tuple[str, ...], words: str
) -> None:
    write_input(Path("in.jsonl"))
    Path("in.md").write_text("")
    Path("old.jsonl").write_text('{"text": "a", "embedding": [1]}\n')
    pq.write_table(pa.table({"text": ["a"], "n": ["x"]}), "n.parquet")
    done = batch(*args)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


# --- rows that cannot be embedded ---------------------------------------------------------------

BAD = """{"id": 1, "text": "good"}
{"id": 2, "text": null}
{"id": 3, "text": NaN}
{"id": 4, "text": 3}
{"id": 5, "text": "ok\\ud800bad"}
{"id": 6, "body": "b"}
{"id": 7, "text": "cut
{"id": 8, "text": "%s"}
{"id": 9, "text": "good too"}
""" % ("word " * 300)


@pytest.mark.parametrize("output", OUTPUTS)
def test_bad_rows_are_skipped_and_listed(batch: Batch, engine: Embedder, output: str) -> None:
    Path("in.jsonl").write_text(BAD)
    out = Path(f"out.{output}")
    done = batch("in.jsonl", "-o", out, "--on-error", "skip", "--no-truncate", "--json")
    assert done.code == 0, done.err
    assert (done.json_lines[0]["rows"], done.json_lines[0]["skipped"]) == (2, 7)
    skipped = [json.loads(line) for line in Path(f"{out}.skipped.jsonl").read_text().splitlines()]
    assert [s["row"] for s in skipped] == [1, 2, 3, 4, 5, 6, 7]
    assert [s["where"] for s in skipped] == [f"in.jsonl:{n}" for n in range(2, 9)]
    reasons = [
        "null",
        "float",
        "int",
        "U+D800 at character 2",
        "no column 'text'",
        "broken JSON",
        "602 tokens",
    ]
    assert all(word in s["reason"] for word, s in zip(reasons, skipped, strict=True))
    found = read_vectors(out).astype(np.float32)
    wanted = np.stack([engine.embed("good"), engine.embed("good too")])
    np.testing.assert_array_equal(found, wanted)
    assert metadata(out)["skipped"] == "7"


def test_a_column_that_no_row_has_is_an_error_even_where_bad_rows_are_skipped(
    batch: Batch,
) -> None:
    write_input(Path("in.jsonl"))
    done = batch("in.jsonl", "-o", "out.npy", "--column", "body", "--on-error", "skip")
    assert done.code == 1
    words = "in.jsonl:1: no column 'body', it has id, text, n, nor has any row; pass --column NAME."
    assert done.err == f"error: {words}\n"
    assert not list(Path().glob("out.*"))
    with Path("in.jsonl").open("a") as file:
        file.write('{"body": "a"}\n')
    assert batch("in.jsonl", "-o", "out.npy", "--column", "body", "--on-error", "skip").code == 0


def test_skipped_rows_leave_gaps_in_the_rows_of_safetensors(batch: Batch) -> None:
    Path("in.jsonl").write_text(BAD)
    batch("in.jsonl", "-o", "out.safetensors", "--on-error", "skip", "--id-column", "id")
    with safe_open("out.safetensors", framework="numpy") as file:
        assert file.get_tensor("row").tolist() == [0, 7, 8]
        assert file.get_tensor("id").tolist() == [1, 8, 9]
    first = json.loads(Path("out.safetensors.skipped.jsonl").read_text().splitlines()[0])
    assert first["id"] == 2


@pytest.mark.parametrize(("bad", "number"), [("null", 2), ("NaN", 3), ("3", 4), ("U+D800", 5)])
def test_a_bad_row_stops_before_anything_is_computed(batch: Batch, bad: str, number: int) -> None:
    lines = BAD.splitlines(keepends=True)
    Path("in.jsonl").write_text("".join([lines[0]] * (number - 1)) + lines[number - 1])
    done = batch("in.jsonl", "-o", "out.npy")
    assert done.code == 1
    assert f"in.jsonl:{number}: " in done.err
    assert "pass --on-error skip" in done.err
    assert not Path("out.npy.partial").exists()


def test_a_text_too_long_stops_where_it_is_reached_and_can_then_be_skipped(batch: Batch) -> None:
    Path("in.txt").write_text("a\nb\nc\nd\n" + "word " * 300 + "\n")
    stopped = batch("in.txt", "-o", "out.npy", "--no-truncate")
    assert stopped.code == 1
    assert "in.txt:5: 602 tokens, this bundle runs at most 128" in stopped.err
    assert "3 of 5 rows are done and kept" in stopped.err
    done = batch("in.txt", "-o", "out.npy", "--no-truncate", "--on-error", "skip", "--json")
    assert (done.json_lines[0]["kept"], done.json_lines[0]["computed"]) == (3, 2)
    again = batch("in.txt", "-o", "out.npy", "--no-truncate")
    assert again.code == 1
    assert "out.npy: exists, with 1 rows skipped (wanted none)" in again.err
    assert batch("in.txt", "-o", "cut.npy", "--json").json_lines[0]["truncated"] == 1


@pytest.mark.parametrize(
    ("key", "value"), [("skipped", None), ("skipped", "many"), ("rows", None), ("tokens", "")]
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_an_output_whose_counts_are_damaged_is_not_taken_for_done(
    batch: Batch, key: str, value: str | None, on_error: str
) -> None:
    Path("in.txt").write_text("a\n")
    command = ("in.txt", "-o", "out.npy", "--on-error", on_error)
    assert batch(*command).code == 0
    sidecar = Path("out.npy.meta.json")
    stored = metadata(Path("out.npy"))
    del stored[key]
    sidecar.write_text(json.dumps(stored if value is None else {**stored, key: value}))
    again = batch(*command)
    assert (again.code, again.out) == (1, "")
    assert "out.npy: exists, with damaged counts, wanted a new file; name another, or" in again.err
    assert batch(*command, "--restart").code == 0
    assert metadata(Path("out.npy"))["rows"] == "1"


# --- ends that come too early -------------------------------------------------------------------


class Lost:
    """A device that is lost at the n-th call of embed, and is there again when it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls: list[list[str]] = []
        self.at: int | None = at
        real = Embedder.embed

        def embed(e: Embedder, texts: list[str], *args: Anything, **options: Anything) -> Anything:
            self.calls.append(list(texts))
            if self.at is not None and len(self.calls) >= self.at:
                raise DeviceError("the NPU is gone, wanted it; plug it in.")
            return real(e, texts, *args, **options)

        monkeypatch.setattr(Embedder, "embed", embed)


@pytest.fixture
def broken_off(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Lost:
    """A run of in.jsonl -> out.parquet whose device was lost in the second shard of three."""
    write_input(Path("in.jsonl"))
    device = Lost(monkeypatch, at=2)
    done = batch("in.jsonl", "-o", "out.parquet")
    assert done.code == 1
    assert "the NPU is gone" in done.err
    assert "3 of 7 rows are done and kept" in done.err
    assert not Path("out.parquet").exists()
    device.at = None
    device.calls.clear()
    return device


def test_after_a_lost_device_only_missing_rows_are_computed(batch: Batch, broken_off: Lost) -> None:
    done = batch("in.jsonl", "-o", "out.parquet", "--json")
    assert (done.json_lines[0]["computed"], done.json_lines[0]["kept"]) == (4, 3)
    assert broken_off.calls == [TEXTS[3:6], TEXTS[6:]]
    assert batch("in.jsonl", "-o", "whole.parquet").code == 0
    assert Path("out.parquet").read_bytes() == Path("whole.parquet").read_bytes()
    assert not Path("out.parquet.partial").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dim", 32), "another dim 64 (wanted 32)"),
        (("--dtype", "float16"), "another dtype float32 (wanted float16)"),
        (("--no-truncate",), "another truncate yes (wanted no)"),
        (("--column", "id2"), "another column text (wanted id2), input (content hash)"),
        (("--id-column", "id"), "another id column none (wanted id)"),
        (("--shard-rows", 4), "another rows a shard 3 (wanted 4)"),
    ],
)
def test_another_job_does_not_go_on(
    batch: Batch, broken_off: Lost, options: tuple[object, ...], words: str
) -> None:
    if "--column" in options:
        text = Path("in.jsonl").read_text()
        Path("in.jsonl").write_text(text.replace('"id": ', '"id2": "x", "id": '))
    done = batch("in.jsonl", "-o", "out.parquet", *options)
    assert done.code == 1
    assert f"out.parquet.partial: an unfinished run with {words}" in done.err
    assert "--restart" in done.err
    assert broken_off.calls == []


def test_another_input_bundle_or_prompt_does_not_go_on(
    batch: Batch, broken_off: Lost, tiny_cls_bundle: Path, tiny_copy: Path
) -> None:
    def refused(words: str, *options: object, **how: Anything) -> None:
        done = batch("in.jsonl", "-o", "out.parquet", *options, **how)
        assert (done.code, broken_off.calls) == (1, [])
        assert words in done.err

    refused("bundle (hash)", bundle=tiny_cls_bundle)
    manifest = tiny_copy / "manifest.txt"
    manifest.write_text(manifest.read_text().replace("param stages ", "prompt q 61\nparam stages "))
    refused("prompt none (wanted q)", "--prompt", "q", bundle=tiny_copy)
    content = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(content.replace("plants", "planks"))
    refused("another input (content hash)")
    Path("in.jsonl").write_text(content)  # the same again, at another time
    assert batch("in.jsonl", "-o", "out.parquet").code == 0


def test_another_job_may_begin_where_nothing_is_finished(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(Path("in.jsonl"))
    device = Lost(monkeypatch, at=1)
    assert batch("in.jsonl", "-o", "out.npy").code == 1
    device.at = None
    assert batch("in.jsonl", "-o", "out.npy", "--dim", 32).code == 0
    assert np.load("out.npy").shape == (7, 32)


def test_restart_begins_anew(batch: Batch, broken_off: Lost) -> None:
    done = batch("in.jsonl", "-o", "out.parquet", "--dim", 32, "--restart", "--json")
    assert (done.json_lines[0]["computed"], done.json_lines[0]["kept"]) == (7, 0)
    assert read_vectors(Path("out.parquet")).shape == (7, 32)


@pytest.mark.slow
def test_a_complete_output_is_not_computed_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(Path("in.jsonl"))
    for output in OUTPUTS:
        assert batch("in.jsonl", "-o", f"out.{output}").code == 0
    device = Lost(monkeypatch, at=1)
    for output in OUTPUTS:
        done = batch("in.jsonl", "-o", f"out.{output}", "--json")
        assert done.code == 0
        assert (done.json_lines[0]["computed"], done.json_lines[0]["kept"]) == (0, 7)
    assert device.calls == []
    assert not list(Path().glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_of_another_job_is_refused_and_restart_replaces_it(
    batch: Batch, output: str
) -> None:
    write_input(Path("in.jsonl"))
    out = Path(f"out.{output}")
    batch("in.jsonl", "-o", out)
    before = out.read_bytes()
    done = batch("in.jsonl", "-o", out, "--dim", 32)
    assert done.code == 1
    assert f"{out}: exists, with another dim 64 (wanted 32), wanted a new file" in done.err
    assert out.read_bytes() == before
    assert batch("in.jsonl", "-o", out, "--dim", 32, "--restart").code == 0
    assert metadata(out)["dim"] == "32"


def test_a_file_that_is_none_of_ours_is_refused(batch: Batch) -> None:
    write_input(Path("in.jsonl"))
    Path("out.parquet").write_text("a thesis")
    done = batch("in.jsonl", "-o", "out.parquet")
    assert done.code == 1
    assert "out.parquet: exists, wanted a new file" in done.err
    assert Path("out.parquet").read_text() == "a thesis"


def test_two_at_once_on_one_output_are_refused(batch: Batch) -> None:
    write_input(Path("in.jsonl"))
    with WorkFolder.locked(Path("out.npy")):
        done = batch("in.jsonl", "-o", "out.npy")
        assert done.code == 1
        assert "out.npy: another process is writing it" in done.err
    assert batch("in.jsonl", "-o", "out.npy").code == 0


def test_an_input_that_changes_meanwhile_is_refused(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(Path("in.jsonl"))
    real = Embedder.embed

    def embed(*args: Anything, **options: Anything) -> Anything:
        with Path("in.jsonl").open("a") as file:
            file.write('{"text": "more"}\n')
        return real(*args, **options)

    monkeypatch.setattr(Embedder, "embed", embed)
    done = batch("in.jsonl", "-o", "out.npy")
    assert done.code == 1
    assert "in.jsonl: changed while it was read" in done.err
    assert not Path("out.npy").exists()


def test_vectors_of_an_input_that_was_changed_and_put_back_are_not_kept(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(Path("in.txt"), ["aa", "bb", "cc", "dd"])
    before, times = path.read_bytes(), path.stat()
    real = Embedder.embed

    def embed(*args: Anything, **options: Anything) -> Anything:
        path.write_bytes(before.replace(b"dd", b"xx"))  # as long, and with the same time
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return real(*args, **options)

    monkeypatch.setattr(Embedder, "embed", embed)
    done = batch("in.txt", "-o", "out.npy")
    assert "in.txt: changed while it was read" in done.err
    monkeypatch.setattr(Embedder, "embed", real)
    path.write_bytes(before)
    again = batch("in.txt", "-o", "out.npy", "--json")
    assert again.json_lines[0]["kept"] == 0


def test_shards_that_changed_places_are_computed_again(batch: Batch, broken_off: Lost) -> None:
    folder = Path("out.parquet.partial")
    (folder / "shard-00000000.safetensors").rename(folder / "shard-00000001.safetensors")
    assert batch("in.jsonl", "-o", "out.parquet", "--json").json_lines[0]["kept"] == 0
    assert batch("in.jsonl", "-o", "whole.parquet").code == 0
    assert Path("out.parquet").read_bytes() == Path("whole.parquet").read_bytes()


@pytest.mark.parametrize("note", [None, b"", b"[1]", b"{}x"])
def test_shards_without_a_note_of_their_job_are_computed_again(
    batch: Batch, broken_off: Lost, note: bytes | None
) -> None:
    path = Path("out.parquet.partial/job.json")
    path.unlink() if note is None else path.write_bytes(note)
    done = batch("in.jsonl", "-o", "out.parquet", "--json", "--dim", 32)
    assert done.json_lines[0]["kept"] == 0
    assert len(read_columns(Path("out.parquet"))["embedding"][0]) == 32


def test_a_restart_that_was_broken_off_does_not_let_a_third_job_replace_the_output(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(Path("in.txt"), ["cats"])
    assert batch("in.txt", "-o", "out.npy").code == 0
    whole = Path("out.npy").read_bytes()
    lost = Lost(monkeypatch, at=1)
    assert batch("in.txt", "-o", "out.npy", "--restart", "--dim", 32).code == 1
    lost.at = None
    third = batch("in.txt", "-o", "out.npy", "--dim", 16)
    assert "out.npy: exists, with another dim 64 (wanted 16)" in third.err
    assert Path("out.npy").read_bytes() == whole
    assert batch("in.txt", "-o", "out.npy", "--dim", 32).code == 0


def test_special_tokens_as_text_are_another_job(tiny_bundle: Path) -> None:
    write_input(Path("in.txt"), ["[SEP] cats"])
    job = Job(("in.txt",), Path("out.npy"))
    with Embedder(tiny_bundle, "emulated") as engine:
        run_job(engine, job)
    with (
        Embedder(tiny_bundle, "emulated", plain_specials=True) as engine,
        pytest.raises(InputError, match=r"another plain_specials no \(wanted yes\)"),
    ):
        run_job(engine, job)


# --- what is beside the output ------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["meta.json", "skipped.jsonl"])
def test_an_input_that_would_be_replaced_with_the_output_is_refused(
    batch: Batch, ending: str
) -> None:
    path = Path(f"out.npy.{ending}")
    path.write_text('{"text": "cats", "row": 1, "where": "", "reason": "", "bundle_sha256": ""}\n')
    before = path.read_bytes()
    done = batch(path, "-o", "out.npy", "--input-format", "jsonl", "--restart")
    assert f"{path}: is replaced with the output out.npy" in done.err
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["meta.json", "skipped.jsonl"])
@pytest.mark.parametrize("content", ["", "mine", "{}", "[1]"])
def test_a_file_beside_the_output_that_is_none_of_ours_stays(
    batch: Batch, ending: str, content: str
) -> None:
    write_input(Path("in.txt"), ["cats"])
    path = Path(f"out.npy.{ending}")
    path.write_text(content)
    done = batch("in.txt", "-o", "out.npy")
    assert f"{path}: exists and is of no batch job" in done.err
    assert path.read_text() == content
    assert batch("in.txt", "-o", "out.npy", "--restart").code == 0


def test_a_format_with_metadata_leaves_a_meta_json_alone(batch: Batch) -> None:
    write_input(Path("in.txt"), ["cats"])
    Path("out.parquet.meta.json").write_text("mine")
    assert batch("in.txt", "-o", "out.parquet").code == 0
    assert Path("out.parquet.meta.json").read_text() == "mine"


def test_a_name_too_long_for_what_goes_beside_it_is_refused_at_once(batch: Batch) -> None:
    write_input(Path("in.txt"), ["cats"])
    done = batch("in.txt", "-o", f"{'n' * 240}.npy")
    assert "File name too long, wanted a name for a file beside the output" in done.err
    assert sorted(p.name for p in Path().iterdir()) == ["in.txt"]


def test_a_work_folder_that_is_a_link_is_refused(batch: Batch) -> None:
    write_input(Path("in.txt"), ["cats"])
    Path("elsewhere").mkdir()
    for planted in ("elsewhere", "nowhere"):
        Path("out.npy.partial").symlink_to(planted)
        done = batch("in.txt", "-o", "out.npy")
        assert done.code == 1
        assert "out.npy.partial: a link, wanted none" in done.err
        Path("out.npy.partial").unlink()
    assert list(Path("elsewhere").iterdir()) == []
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    "name", ["shard.tmp", "job.json.tmp", "output", "output.meta.json", "lock", "spool-0.tmp"]
)
def test_a_link_planted_in_a_work_folder_is_refused_and_not_followed(
    batch: Batch, name: str
) -> None:
    Path("victim").write_text("a thesis")
    Path("out.npy.partial").mkdir()
    Path("out.npy.partial", name).symlink_to(Path("victim").absolute())
    done = batch("-", "-o", "out.npy", stdin=b"cats\n")
    assert (done.code, Path("victim").read_text()) == (1, "a thesis")
    assert f"out.npy.partial/{name}: a link, wanted none" in done.err
    assert [p.name for p in Path("out.npy.partial").iterdir()] == [name]
    Path("out.npy.partial", name).unlink()
    assert batch("-", "-o", "out.npy", stdin=b"cats\n").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("output", ["npy", "jsonl"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda old: old[:-1], "bytes, "),
        (lambda old: old[:-2] + b"x" + old[-1:], "with other bytes than when it was finished"),
    ],
    ids=["cut", "changed"],
)
def test_an_output_that_was_changed_is_not_complete(
    batch: Batch, output: str, change: Callable[[bytes], bytes], words: str
) -> None:
    write_input(Path("in.jsonl"))
    out = Path(f"out.{output}")
    assert batch("in.jsonl", "-o", out).code == 0
    whole = out.read_bytes()
    out.write_bytes(change(whole))
    done = batch("in.jsonl", "-o", out)
    assert done.code == 1
    assert f"{out}: exists, with " in done.err
    assert words in done.err
    assert "pass --restart to replace it" in done.err
    assert out.read_bytes() == change(whole)
    assert batch("in.jsonl", "-o", out, "--restart").code == 0
    assert out.read_bytes() == whole


# --- rows of every kind -------------------------------------------------------------------------


@pytest.mark.slow
def test_jsonl_with_a_thousand_keys_is_kept_as_jsonl(batch: Batch) -> None:
    rows = [{"text": "cats", f"k{i}": i} for i in range(MAX_COLUMNS + 1)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert batch("in.jsonl", "-o", "out.jsonl", "--shard-rows", 2000).code == 0
    assert json.loads(Path("out.jsonl").read_text().splitlines()[-1])[f"k{MAX_COLUMNS}"] == 1000
    assert "wanted at most 1000" in batch("in.jsonl", "-o", "out.parquet").err


def test_json_nested_deeply_is_a_bad_row_and_less_deeply_a_column(batch: Batch) -> None:
    nested = ["[" * depth + "NaN" + "]" * depth for depth in (MAX_DEPTH - 1, MAX_DEPTH, 900)]
    Path("in.jsonl").write_text("".join(f'{{"text": "a", "x": {one}}}\n' for one in nested))
    for output in ("out.jsonl", "out.parquet"):
        done = batch("in.jsonl", "-o", output, "--on-error", "skip", "--json").json_lines[0]
        assert (done["rows"], done["skipped"]) == (1, 2)


@pytest.mark.parametrize("output", ["parquet", "arrow", "jsonl"])
def test_views_as_polars_writes_them_are_strings(batch: Batch, output: str) -> None:
    view = pa.string_view()
    table = pa.table({"text": pa.array(["a", "b"], view), "c": pa.array(["x", None], view)})
    pyarrow.feather.write_feather(table, "in.arrow", compression="uncompressed")
    assert batch("in.arrow", "-o", f"out.{output}").code == 0
    assert read_columns(Path(f"out.{output}"))["c"] == ["x", None]


@pytest.mark.parametrize(
    ("column", "output", "words"),
    [
        (
            pa.RunEndEncodedArray.from_arrays([1], [5]),
            "jsonl",
            "in.arrow: column 'c' holds run_end_encoded",
        ),
        (pa.array([{}], pa.struct([])), "parquet", "column 'c': holds struct<>, which parquet"),
    ],
)
def test_columns_that_an_output_cannot_hold_are_named(
    batch: Batch, column: pa.Array, output: str, words: str
) -> None:
    table = pa.table({"text": ["a"], "c": column})
    with ipc.new_file("in.arrow", table.schema) as writer:
        writer.write_table(table)
    done = batch("in.arrow", "-o", f"out.{output}")
    assert done.code == 1
    assert words in done.err
    assert batch("in.arrow", "-o", "out.npy").code == 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_parquet_cannot_hold_is_named_before_anything_is_computed(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    kind = pa.list_(pa.timestamp("s")) if nested else pa.timestamp("s")
    values: list[Anything] = [[n] if nested else n for n in (0, 1, 2, 2**62, 2**62)]
    texts = [None, *"bcde"]
    table = pa.table({"text": pa.array(texts, pa.string()), "when": pa.array(values, kind)})
    with ipc.new_file("in.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    device = Lost(monkeypatch, at=1)
    done = batch("in.arrow", "-o", "out.parquet", "--on-error", "skip")
    assert done.code == 1
    assert "in.arrow[3]: column 'when' holds what parquet cannot (" in done.err
    assert "write .arrow or .jsonl" in done.err
    assert device.calls == []
    assert not list(Path().glob("out.*"))


def test_a_value_that_parquet_cannot_hold_may_stand_in_a_row_that_is_skipped(batch: Batch) -> None:
    when = pa.array([2**62, 1], pa.timestamp("s"))
    table = pa.table({"text": pa.array([None, "b"], pa.string()), "when": when})
    with ipc.new_file("in.arrow", table.schema) as writer:
        writer.write_table(table)
    assert batch("in.arrow", "-o", "out.parquet", "--on-error", "skip").code == 0
    assert len(read_columns(Path("out.parquet"))["when"]) == 1


@pytest.mark.parametrize(
    "header", ["{" * 117, "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 64)}"]
)
def test_an_npy_with_a_broken_header_is_named(batch: Batch, header: str) -> None:
    write_input(Path("in.txt"), ["cats"])
    Path("c.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + f"{header:<117}\n".encode())
    done = batch("in.txt", "-o", "out.npy", "--dtype", "int8", "--calibrate", "c.npy")
    assert "--calibrate c.npy: " in done.err
    assert "wanted an npy file of vectors" in done.err


@pytest.mark.parametrize(("rows", "warned"), [(199, True), (200, False)])
def test_ranges_of_few_vectors_are_warned_of(batch: Batch, rows: int, warned: bool) -> None:
    write_input(Path("in.txt"), ["cats"])
    vectors = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    np.save("c.npy", vectors)
    done = batch("in.txt", "-o", "out.npy", "--dtype", "int8", "--calibrate", "c.npy")
    assert done.code == 0
    assert (f"c.npy: {rows} vectors, wanted 200 at least" in done.err) == warned


def test_calibrating_from_stdin_is_refused(tiny_copy: Path) -> None:
    assert "-: stdin, wanted files of texts" in run("calibrate", tiny_copy, "-").err


# --- stdin --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stdin_is_lines_of_text_unless_said_otherwise(batch: Batch, engine: Embedder) -> None:
    assert batch("-", "-o", "a.npy", stdin=b"cats\n\n").code == 0
    np.testing.assert_array_equal(np.load("a.npy"), engine.embed(["cats", ""]))
    lines = b'{"text": "cats"}\n'
    assert batch("-", "-o", "b.npy", "--input-format", "jsonl", stdin=lines).code == 0
    np.testing.assert_array_equal(np.load("b.npy"), engine.embed(["cats"]))


@pytest.mark.parametrize("again", [b"", b"a\nb\nc\nd\n"])
def test_stdin_is_kept_and_need_not_come_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, again: bytes
) -> None:
    device = Lost(monkeypatch, at=2)
    assert batch("-", "-o", "out.npy", stdin=b"a\nb\nc\nd\n").code == 1
    device.at = None
    other = batch("-", "-o", "out.npy", stdin=b"a\nb\nc\nx\n")
    assert other.code == 1
    assert "stdin: gives something else than in the unfinished run" in other.err
    done = batch("-", "-o", "out.npy", "--json", stdin=again)
    assert done.code == 0, done.err
    assert (done.json_lines[0]["computed"], done.json_lines[0]["kept"]) == (1, 3)
    assert not Path("out.npy.partial").exists()


# --- killed between any two steps ---------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_killed_before_any_change_of_a_name_it_goes_on(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, output: str, replaces: bool
) -> None:
    """Every rename and removal of a run is once the last thing that does not happen."""
    Path("in.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n{"text": "c"}\n')
    skip = ("--on-error", "skip")
    whole, out = Path(f"whole.{output}"), Path(f"out.{output}")
    batch("in.jsonl", "-o", whole, *skip)
    steps = 0
    while True:
        for left in Path().glob("out.*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if replaces:
            batch("in.jsonl", "-o", out, *skip, "--dim", 32)
        done = killed_at(monkeypatch, steps, batch, "in.jsonl", "-o", out, *skip, "--restart")
        if not done:
            again = batch("in.jsonl", "-o", out, *skip)
            refused = replaces and "out" in again.err and "exists, with another dim" in again.err
            assert again.code == (1 if refused else 0), again.err
            if refused:  # killed before anything was begun: the old one is whole
                assert metadata(out)["dim"] == "32"
                steps += 1
                continue
        for name in ("", ".skipped.jsonl", ".meta.json"):
            wanted = Path(f"{whole}{name}")
            assert wanted.exists() == Path(f"{out}{name}").exists()
            if wanted.exists():
                assert wanted.read_bytes() == Path(f"{out}{name}").read_bytes()
        assert not Path(f"{out}.partial").exists()
        if done:
            break
        steps += 1
    assert steps > 6


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int, batch: Batch, *args: object) -> bool:
    """Run the command until its step-th rename or removal; whether it came to its end."""
    left = step

    def dying(real: Callable[..., Anything]) -> Callable[..., Anything]:
        def change(path: Path, *args: Anything, **options: Anything) -> Anything:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(path, *args, **options)

        return change

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying(Path.replace))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        try:
            assert batch(*args).code == 0
        except Killed:
            return False
    return True


# --- in processes of their own ------------------------------------------------------------------

COMMAND = """
import sys
from npu_embed.cli import main
{before}
try:
    main(sys.argv[1:], prog_name="npu-embed")
finally:
    # Not ru_maxrss, which a process inherits from its parent.
    status = open("/proc/self/status").read()
    print("peak", int(status.split("VmHWM:")[1].split()[0]), file=sys.stderr)
"""
MAX_MORE_KIB = 500 << 10  # what a job may take over what the model takes


def process(*args: object, before: str = "") -> subprocess.Popen[str]:
    """The command in a process of its own, which tells its peak of memory in KiB."""
    command = [sys.executable, "-c", COMMAND.format(before=before), *map(str, args)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def many_rows(path: Path, count: int) -> Path:
    """A jsonl file of short rows."""
    words = ["cats", "a red car", "plants on a sofa", "the password of a sofa, and of a car"]
    rows = ({"id": i, "text": f"{i} {words[i % 4]}", "tag": i % 3 or None} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("output", ["parquet", "jsonl"])
def test_killed_ten_times_it_ends_as_an_unbroken_run(tiny_bundle: Path, output: str) -> None:
    many_rows(Path("in.jsonl"), 3000)
    options = ("--bundle", tiny_bundle, "--device", "emulated", "--shard-rows", 128)
    done = run("batch", "in.jsonl", "-o", f"whole.{output}", *options)
    assert done.code == 0
    chance = random.Random(output)
    out, work = Path(f"out.{output}"), Path(f"out.{output}.partial")
    for _ in range(10):
        killed = process("batch", "in.jsonl", "-o", out, *options)
        # From when the job has begun, so that a busy machine does not make all kills the same.
        before = len(list(work.glob("shard-*")))
        while killed.poll() is None and len(list(work.glob("shard-*"))) <= before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        killed.kill()
        _, err = killed.communicate()
        assert killed.returncode in (-signal.SIGKILL, 0), err
    last = process("batch", "in.jsonl", "-o", out, *options)
    _, err = last.communicate()
    assert last.returncode == 0, err
    assert out.read_bytes() == Path(f"whole.{output}").read_bytes()
    assert not work.exists()


@pytest.mark.slow
def test_a_disk_that_is_full_loses_nothing_finished(tiny_bundle: Path) -> None:
    """A limit on the size of a file stands for the disk: the shards fit, the output does not."""
    many_rows(Path("in.jsonl"), 600)
    options = ("--bundle", tiny_bundle, "--device", "emulated", "--shard-rows", "100")
    args = ("batch", "in.jsonl", "-o", "out.npy", *options)
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (100_000, r.RLIM_INFINITY))"
    broken = process(*args, before=limit)
    _, err = broken.communicate()
    assert broken.returncode == 1
    assert "out.npy.partial/output: File too large, wanted to write it" in err
    assert "600 of 600 rows are done and kept" in err
    assert not Path("out.npy").exists()
    done = run(*args, "--json")
    assert (done.json_lines[0]["computed"], done.json_lines[0]["kept"]) == (0, 600)
    assert np.load("out.npy").shape == (600, 64)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tiny_bundle: Path) -> None:
    peaks = []
    for count in (1_000, 30_000):
        many_rows(Path("in.jsonl"), count)
        done = process(
            *("batch", "in.jsonl", "-o", f"out{count}.parquet"),
            *("--bundle", tiny_bundle, "--device", "emulated"),
        )
        _, err = done.communicate()
        assert done.returncode == 0, err
        peaks.append(int(err.rpartition("peak ")[2]))
    assert peaks[1] < peaks[0] + MAX_MORE_KIB / 4
    assert pq.read_metadata("out30000.parquet").num_rows == 30_000


@pytest.mark.slow
def test_the_benchmark_of_memory_prints_a_line_a_count(tiny_bundle: Path) -> None:
    script = ROOT / "benchmarks" / "batch_memory.py"
    command = [sys.executable, str(script), "--bundle", str(tiny_bundle), "--rows", "3", "5"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["rows"] for line in lines] == [3, 5]
    assert all(line["job_mib"] - line["model_mib"] < MAX_MORE_KIB >> 10 for line in lines)


def test_the_command_and_the_job_have_the_same_defaults() -> None:
    assert f"default: {SHARD_ROWS}" in " ".join(run("batch", "--help").out.split())
    assert Job((), Path("a.npy")).shard_rows == SHARD_ROWS
