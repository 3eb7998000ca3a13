"""benchmarks/scale.py: stretched bundles, texts of a length, points and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_embed import Embedder
from npu_embed.bundle import Bundle
from npu_embed.manifest import Manifest, sha256_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import corpus  # noqa: E402
import scale  # noqa: E402
import scale_point  # noqa: E402
import scale_points  # noqa: E402
import scale_texts  # noqa: E402
import stretched  # noqa: E402
from report import Spread  # noqa: E402
from scale_points import Point, Result  # noqa: E402

TEXTS = ["two cats sleeping", "a red car parked outside", "the quick brown fox jumps", "hello"]


def result(seconds: float, tokens: int = 1000, peak_mib: int = 200) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "texts": 10,
        "tokens": tokens,
        "packs": 2,
        "host_seconds": seconds / 10,
        "ready_bytes": 100 << 20,
        "peak_bytes": peak_mib << 20,
        "vector_bytes": 1 << 20,
    }


# -- bundles ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stretched") / "bundle"
    return stretched.stretched(tiny_bundle, out, max_rows=4096, max_tokens=128)


@pytest.mark.slow
def test_a_stretched_bundle_gives_the_same_vectors_in_larger_packs(
    tiny_bundle: Path, large_bundle: Path
) -> None:
    texts = TEXTS * 250  # more tokens than a pack had before
    with Embedder(tiny_bundle, "emulated") as e:
        before, packs = e.embed(texts), e.stats.packs
    with Embedder(large_bundle, "emulated") as e:
        assert e.bundle.max_rows == 4096
        after = e.embed(texts)
        assert 0 < e.stats.packs < packs
    assert np.abs(before - after).max() < 2.0**-8


def test_a_stretched_bundle_has_buckets_for_longer_texts(tiny_bundle: Path, tmp_path: Path) -> None:
    shorter = tmp_path / "shorter"
    out = tmp_path / "longer"
    text = (tiny_bundle / "manifest.txt").read_text()
    kept = [
        line
        for line in text.replace("param max_tokens 128", "param max_tokens 64").splitlines()
        if not (line.startswith("mha ") and int(line.split()[1]) > 64)
    ]
    subprocess.run(["cp", "-r", str(tiny_bundle), str(shorter)], check=True)
    (shorter / "manifest.txt").write_text("\n".join(kept) + "\n")
    stretched.stretched(shorter, out, max_rows=0, max_tokens=128)
    long = ["word " * 200]
    with Embedder(tiny_bundle, "emulated") as e:
        wanted = e.embed(long)
    with Embedder(out, "emulated") as e:
        assert e.max_tokens == 128
        assert np.array_equal(e.embed(long), wanted)


def test_a_stretched_bundle_leaves_its_source_alone(tiny_copy: Path, tmp_path: Path) -> None:
    with (tiny_copy / "kernels" / "qkv_x1.insts.bin").open("ab") as stream:
        stream.write(bytes(4))  # as another version's exporter may have written it
    before = {p: sha256_file(p) for p in tiny_copy.rglob("*") if p.is_file()}
    out = stretched.stretched(tiny_copy, tmp_path / "out", max_rows=4096, max_tokens=128)
    assert {p: sha256_file(p) for p in tiny_copy.rglob("*") if p.is_file()} == before
    hashes = {r.fields[0]: r.fields[1] for r in Manifest.read(out).tagged("sha256")}
    assert set(hashes) == {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} - {
        "manifest.txt"
    }
    assert all(sha256_file(out / path) == found for path, found in hashes.items())


def test_neither_limit_is_lowered(tiny_bundle: Path, tmp_path: Path) -> None:
    out = stretched.stretched(tiny_bundle, tmp_path / "out", max_rows=64, max_tokens=8)
    assert scale.limits(out) == scale.limits(tiny_bundle)


@pytest.mark.parametrize(
    ("rows", "tokens", "words"),
    [
        (4096, 129, "texts of 129 tokens, the model has positions for 128"),
        (4160, 128, "packs of 4160 rows, a stream takes multiples of 64 up to 4096"),
        (4000, 128, "packs of 4000 rows"),
    ],
)
def test_a_bundle_cannot_be_stretched_past_its_model_or_its_streams(
    tiny_bundle: Path, tmp_path: Path, rows: int, tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        stretched.stretched(tiny_bundle, tmp_path / "out", max_rows=rows, max_tokens=tokens)
    assert not (tmp_path / "out").exists()


def test_a_bundle_of_another_family_keeps_its_size(
    gemma3_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.fitting(gemma3_bundle, (1 << 14,), (), tmp_path / "out") == gemma3_bundle
    assert "a bundle of gemma3_text, wanted one of bert" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bundle_that_is_large_enough_is_used_as_it_is(tiny_bundle: Path, tmp_path: Path) -> None:
    assert scale.fitting(tiny_bundle, (128, 256), (8,), tmp_path / "out") == tiny_bundle


def test_sizes_that_do_not_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.within("packs", (64, 128, 4096, 8192), 128, 4096) == [128, 4096]
    assert "packs of 64, 8192 tokens; this bundle: 128 to 4096" in capsys.readouterr().err
    assert scale.within("packs", (128,), 128, 4096) == [128]
    assert capsys.readouterr().err == ""


# -- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 8, 31, 128])
def test_texts_of_a_length_have_that_many_tokens(tiny_bundle: Path, tokens: int) -> None:
    bundle = Bundle.open(tiny_bundle)
    tokenizer = bundle.open_tokenizer()
    bundle.close()
    texts = scale_texts.Words(TEXTS, tokenizer).of_length(tokens, 20)
    assert {len(e.ids) for e in tokenizer.encode_batch(texts)} == {tokens}
    assert len(texts) == 20


def test_short_texts_are_as_many_as_asked_for_and_the_same_again(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    words = scale_texts.Words(TEXTS, bundle.open_tokenizer())
    bundle.close()
    texts = list(words.short(50))
    assert texts == list(words.short(50))
    counts = {len(text.split()) for text in texts}
    assert min(counts) >= scale_texts.FEWEST_WORDS
    assert max(counts) <= scale_texts.MOST_WORDS
    assert len(counts) > 3


def test_a_corpus_without_a_short_word_is_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    tokenizer = bundle.open_tokenizer()
    bundle.close()
    with pytest.raises(ValueError, match="no word of one token"):
        scale_texts.Words(["1 2 3", "--"], tokenizer)


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(1, ["a"]), (5, ["a", "b"]), (6, ["a", "b", "a"]), (0, [])]
)
def test_mixed_texts_go_on_until_there_are_tokens_enough(tokens: int, wanted: list[str]) -> None:
    assert scale_texts.mixed(["a", "b"], [2, 3], tokens) == wanted


# -- points -------------------------------------------------------------------------------------


def test_a_result_is_the_spread_of_its_rounds() -> None:
    point = Point("pack", "default", 512, Path("b"), Path("t"))
    found = Result.of(point, [result(1.0), result(4.0, peak_mib=300), result(2.0)])
    assert (found.axis, found.series, found.value) == ("pack", "default", 512)
    assert found.seconds == Spread(2.0, 1.0, 4.0)
    assert found.tokens_per_s == Spread(500.0, 250.0, 1000.0)
    assert found.host_us_per_token == Spread(200.0, 100.0, 400.0)
    assert found.peak_mib == Spread(200.0, 200.0, 300.0)
    assert (found.ready_mib, found.vectors_mib) == (100.0, 1.0)


def test_points_take_turns_and_every_second_round_goes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[int] = []

    def run(point: Point) -> dict[str, Any]:
        order.append(point.value)
        return result(point.value)

    monkeypatch.setattr(Point, "run", run)
    points = [Point("length", "default", n, Path("b"), Path("t")) for n in (1, 2, 3)]
    found = scale_points.measure(points, 3)
    assert order == [1, 2, 3, 3, 2, 1, 1, 2, 3]
    assert [r.seconds.median for r in found] == [1.0, 2.0, 3.0]  # each its own
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["round"], line["value"]) for line in lines][3:5] == [(2, 3), (2, 2)]


def test_threads_are_chosen_by_cpus_and_by_the_blas_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5}, raising=False)
    points = scale_points.thread_points((1, 2, 3), Path("b"), Path("t"))
    assert [(p.series, p.value, p.cores, p.threads) for p in points] == [
        ("default", 2, None, None),
        ("cores", 1, 1, None),
        ("BLAS threads", 1, None, 1),
        ("cores", 2, 2, None),
        ("BLAS threads", 2, None, 2),
        ("BLAS threads", 3, None, 3),
    ]


@pytest.mark.parametrize(
    ("axis", "threads", "wanted"),
    [("threads", 2, "2"), ("threads", None, None), ("pack", None, "1")],
)
def test_a_point_sets_its_own_threads_and_no_others(
    monkeypatch: pytest.MonkeyPatch, axis: str, threads: int | None, wanted: str | None
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    seen: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
        seen.update(options["env"], told=json.loads(command[-1]))
        return subprocess.CompletedProcess(command, 0, stdout='{"seconds": 1}')

    monkeypatch.setattr(subprocess, "run", run)
    point = Point(axis, "s", 1, Path("b"), Path("t.jsonl"), pack_rows=64, threads=threads)
    assert point.run() == {"seconds": 1}
    assert seen.get("OPENBLAS_NUM_THREADS") == wanted
    assert seen["told"] == {
        "bundle": "b",
        "texts": "t.jsonl",
        "pack_rows": 64,
        "call_texts": None,
        "cores": None,
    }


def test_a_process_takes_the_first_cpus_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 3, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, c: taken.append(c), raising=False)
    scale_point.take_cores(2)
    scale_point.take_cores(None)
    assert taken == [[3, 5]]


@pytest.mark.parametrize(("call_texts", "sizes"), [(None, [4]), (3, [3, 1]), (4, [4])])
def test_a_file_is_read_a_call_at_a_time(
    tmp_path: Path, call_texts: int | None, sizes: list[int]
) -> None:
    corpus.write(TEXTS, tmp_path / "t.jsonl")
    found = list(scale_point.calls(str(tmp_path / "t.jsonl"), call_texts))
    assert [len(some) for some in found] == sizes
    assert [text for some in found for text in some] == TEXTS


def test_the_peak_is_read_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("VmPeak:\t  9 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\n")
    monkeypatch.setattr(scale_point, "STATUS", tmp_path / "status")
    assert scale_point.peak_bytes() == 2 << 20
    monkeypatch.setattr(scale_point, "STATUS", tmp_path / "none")
    assert scale_point.peak_bytes() > 10 << 20  # ru_maxrss


@pytest.mark.slow
def test_a_point_is_measured_in_a_process_of_its_own(tiny_bundle: Path, tmp_path: Path) -> None:
    corpus.write(TEXTS, tmp_path / "t.jsonl")
    point = Point("corpus", "calls of 3", 4, tiny_bundle, tmp_path / "t.jsonl", call_texts=3)
    found = point.run()
    assert (found["texts"], found["packs"]) == (4, 2)
    assert found["vector_bytes"] == 3 * 64 * 4
    assert 0 < found["host_seconds"] < found["seconds"]
    assert 10 << 20 < found["ready_bytes"] <= found["peak_bytes"]


def test_a_point_that_cannot_run_names_itself(tmp_path: Path) -> None:
    corpus.write(TEXTS, tmp_path / "t.jsonl")
    point = Point("pack", "default", 64, tmp_path / "none", tmp_path / "t.jsonl")
    with pytest.raises(SystemExit, match=r"pack 64 \(default\): its process ended with code 1"):
        point.run()


def test_every_axis_is_planned_and_told(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held: dict[tuple[str, str, int], list[str]] = {}

    def run(point: Point) -> dict[str, Any]:
        held[point.axis, point.series, point.value] = corpus.read(point.texts)
        assert Path(point.bundle).is_dir()
        return result(1.0)

    monkeypatch.setattr(Point, "run", run)
    corpus.write(TEXTS, tmp_path / "c.jsonl")
    scale.main(
        [
            *("--bundle", str(tiny_bundle), "--corpus", str(tmp_path / "c.jsonl")),
            *("--tokens", "200", "--rounds", "1", "--pack-rows", "64", "128", "4096"),
            *("--lengths", "8", "100", "129", "--corpus-texts", "5", "30", "--call-texts", "10"),
            *("--threads", "1"),
        ]
    )
    told = capsys.readouterr()
    assert [key for key in held if key[0] != "threads"] == [
        ("pack", "default", 128),
        ("pack", "default", 4096),
        ("length", "default", 8),
        ("length", "default", 100),
        ("corpus", "one call", 5),
        ("corpus", "one call", 30),
        ("corpus", "calls of 10", 30),
    ]
    assert len(held["length", "default", 8]) == 25
    assert len(held["length", "default", 100]) == 2
    assert len(held["corpus", "calls of 10", 30]) == 30
    assert held["pack", "default", 128] == held["threads", "BLAS threads", 1]
    assert "left out: packs of 64 tokens" in told.err
    assert "left out: texts of 129 tokens" in told.err
    assert "tokens of a pack at most" in told.err
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert sum("summary" in line for line in lines) == len(held)
    assert lines[-1]["machine"]["cpus"] >= 1


def test_full_sizes_are_larger_and_options_go_before_them() -> None:
    args = scale._parser().parse_args(["--full", "--lengths", "16"])
    assert scale.sizes_of(args).lengths == (16,)
    assert scale.sizes_of(args).corpus_texts[-1] == 100_000
    assert scale.sizes_of(scale._parser().parse_args([])) == scale.QUICK
