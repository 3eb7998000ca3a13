"""The benchmarks: their corpus, their sums, and that they run; never how fast anything is."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import corpus  # noqa: E402
import host_floor  # noqa: E402
import report  # noqa: E402
import throughput  # noqa: E402
from report import Spread  # noqa: E402

PARAGRAPH = "A paragraph of prose with several words in it, long enough to count as one."
TEXTS = ["two cats sleeping", "a red car parked outside", "the quick brown fox jumps", "hello"]


class Installed:
    """A distribution as importlib.metadata gives it, of files in a folder."""

    def __init__(self, folder: Path, name: str, files: dict[str, str]) -> None:
        self.metadata = {"Name": name}
        self.folder = folder / name
        self.folder.mkdir()
        for path, content in files.items():
            (self.folder / path).write_text(content, encoding="utf-8")
        self.names = list(files)

    def read_text(self, name: str) -> str:
        assert name == "METADATA"
        return f"Name: {self.metadata['Name']}\n\n{self.metadata['Name']} is what {PARAGRAPH}\n"

    @property
    def files(self) -> list[metadata.PackagePath]:
        paths = [metadata.PackagePath(name) for name in self.names]
        for path in paths:
            path.dist = self  # type: ignore[assignment]
        return paths

    def locate_file(self, path: metadata.PackagePath) -> Path:
        return self.folder / path


SOURCE = '''"""The module's docstring says what the module is for, in a whole sentence of words."""
raise SystemExit("read, never run")

def f():
    """Return what the function returns, which is told here at the length of a sentence."""

def g():
    "short"
'''


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Installed]:
    found = [
        Installed(tmp_path, "zebra", {"m.py": SOURCE, "broken.py": "def (", "data.bin": "x"}),
        Installed(
            tmp_path, "Apple", {"LICENSE": f"Permission is granted.\n\n{PARAGRAPH} Licence."}
        ),
        Installed(tmp_path, "npu-embed", {"m.py": SOURCE}),
    ]
    monkeypatch.setattr(metadata, "distributions", lambda: iter(found))
    monkeypatch.setattr(corpus, "CLOSE_CHARS", (0,))
    return found


def test_the_corpus_is_docstrings_descriptions_and_licences(packages: list[Installed]) -> None:
    texts = corpus.make()
    assert any("the module is for" in t for t in texts)
    assert any("which is told here" in t for t in texts)
    assert any("zebra is what" in t for t in texts)
    assert any("Permission is" in t for t in texts)
    assert not any("npu-embed" in t for t in texts)


def test_the_corpus_does_not_depend_on_the_order_packages_are_found_in(
    packages: list[Installed],
) -> None:
    first = corpus.make()
    packages.reverse()
    assert corpus.make() == first


def test_a_larger_corpus_begins_with_a_smaller_one() -> None:
    found = [f"text {i}" for i in range(50)]
    ten = corpus.select(iter(found), 10)
    assert corpus.select(iter([*reversed(found), *found]), 20)[:10] == ten
    assert ten != sorted(found)[:10]  # that would be the corpus of one package
    assert len(corpus.select(iter(found), 1000)) == 50


@pytest.mark.parametrize(
    "block",
    [
        ">>> f(1)\n1",
        "```\nmake all of the things\n```",
        "---- ---- ----\n name value more",
        "x = f(a[0], b[1]) + {1: 2, 3: 4} # ((()))",
        "too short",
        "",
    ],
)
def test_code_and_tables_are_no_prose(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CLOSE_CHARS", (0,))
    assert list(corpus.fragments(f"{block}\n\n{PARAGRAPH}")) == [PARAGRAPH]


def test_a_fragment_is_one_line_of_whole_paragraphs() -> None:
    document = "\n\n".join(f"Paragraph {name} has\n  some words in it." for name in ("a", "b") * 20)
    found = list(corpus.fragments(document))
    assert len(found) > 2
    for text in found:
        assert corpus.MIN_CHARS <= len(text) <= corpus.MAX_CHARS
        assert "\n" not in text
        assert text.startswith("Paragraph")
        assert text.endswith("in it.")
    assert len({len(text) for text in found}) > 1


@pytest.mark.parametrize("name", ["c.txt", "c.jsonl"])
def test_a_written_corpus_is_read_back(tmp_path: Path, name: str) -> None:
    texts = ["plain", "Kantō 🙂", 'a "quoted" \\ text', "a\u2028separator\u0085that is no line end"]
    corpus.write(texts, tmp_path / name)
    assert corpus.read(tmp_path / name) == texts


def test_a_plain_file_holds_a_text_a_line(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"one\r\n\r\n  two \n\nthree")
    assert corpus.read(tmp_path / "c.txt") == ["one", "  two ", "three"]


def test_a_jsonl_file_holds_strings_or_objects(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('"one\\ntwo"\n{"text": "three", "id": 3}\n')
    assert corpus.read(tmp_path / "c.jsonl") == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.txt", "\n \n", "no text, wanted one a line"),
        ("c.jsonl", '"a"\nnot json\n', r"c\.jsonl:2: no JSON"),
        ("c.jsonl", "[1]\n", r"c\.jsonl:1: \[1\], wanted a JSON string"),
        ("c.jsonl", '{"title": "a"}\n', "wanted a JSON string"),
    ],
)
def test_a_corpus_file_that_cannot_be_read_says_why(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        corpus.read(tmp_path / name)


@pytest.mark.parametrize("text", ["a\nb", " ", "a\rb"])
def test_a_text_that_is_no_line_is_not_written_as_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="write a"):
        corpus.write([text], tmp_path / "c.txt")


def test_a_description_counts_tokens() -> None:
    found = corpus.describe(["a"] * 10, [5, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    assert (found.texts, found.tokens, found.min, found.max) == (10, 55, 1, 10)
    assert (found.median, found.mean, found.p90) == (5.5, 5.5, 10)
    assert (
        corpus.describe(["ab", "c"], [1, 1]).sha256 != corpus.describe(["a", "bc"], [1, 1]).sha256
    )


def test_the_corpus_options_choose_texts(
    tmp_path: Path, packages: list[Installed], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.txt").write_text("a\nb\nc\n")
    parser = argparse.ArgumentParser()
    corpus.add_arguments(parser)

    def chosen(*argv: str) -> list[str]:
        return corpus.chosen(parser.parse_args(argv))

    assert chosen("--corpus", str(tmp_path / "c.txt"), "--texts", "2") == ["a", "b"]
    assert len(chosen("--texts", "1")) == 1
    assert capsys.readouterr().err == ""
    assert chosen("--corpus", str(tmp_path / "c.txt"), "--texts", "9") == ["a", "b", "c"]
    assert "3 texts, fewer than the 9" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="gone"):
        chosen("--corpus", "gone.txt")
    with pytest.raises(SystemExit):
        chosen("--texts", "0")


def test_a_spread_is_the_median_and_the_range() -> None:
    assert Spread.of([3.0, 1.0, 2.5]) == Spread(2.5, 1.0, 3.0)
    assert Spread.of([1.00004, 2.0], digits=2) == Spread(1.5, 1.0, 2.0)


def test_the_stages_add_up_to_the_seconds() -> None:
    engine = {"gemm": 5.0, "mha": 3.0, "host": 1.0, "tokenize": 0.5}
    parts = host_floor.split(10.0, engine, {"gemm": 4.5, "mha": 2.0})
    assert parts == {
        "gemm": 4.5,
        "mha": 2.0,
        "dispatch": 1.5,
        "host": 1.0,
        "tokenize": 0.5,
        "other": 0.5,
    }
    on_hardware = host_floor.split(10.0, engine, None)
    assert "dispatch" not in on_hardware
    assert on_hardware["gemm"] == 5.0


def test_blas_overrides_reach_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    assert not set(report.BLAS_OVERRIDES) & set(report.plain_environment())


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    corpus.write(TEXTS, path)
    return path


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_throughput_measures_every_pack_size_in_turn(
    tiny_bundle: Path, texts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    throughput.main(
        [
            *("--bundle", str(tiny_bundle), "--device", "emulated", "--corpus", str(texts_file)),
            *("--repeat", "2", "--json", "--pack-rows", "128", "256"),
        ]
    )
    *rounds, small, large = lines_of(capsys)
    assert [(r["round"], r["pack_rows"]) for r in rounds] == [
        (1, 128),
        (1, 256),
        (2, 128),
        (2, 256),
    ]
    for found in (small, large):
        assert found["texts"] == len(TEXTS)
        assert found["tokens"] == found["corpus"]["tokens"] > len(TEXTS)
        assert found["device"] == "emulated"
        assert list(found["stages"]) == list(host_floor.STAGES)
        assert all(part["median"] >= 0 for part in found["stages"].values())
        assert all(found["stages"][stage]["median"] > 0 for stage in host_floor.DEVICE_STAGES)
        assert found["host"]["times_floor"]["median"] > 0
        assert found["counts"]["runs"] > 0
        assert found["counts"]["bytes_to_device"] > 0
        assert found["counts"]["swaps"] == 0
    for told in rounds:
        assert sum(told["stages"].values()) == pytest.approx(told["seconds"])


@pytest.mark.slow
def test_throughput_prints_json_lines_only_on_stdout(
    tiny_bundle: Path, texts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    throughput.main(["--bundle", str(tiny_bundle), "--corpus", str(texts_file), "--repeat", "1"])
    told = capsys.readouterr()
    assert len([json.loads(line) for line in told.out.splitlines()]) == 2
    assert "dispatch" in told.err
    assert "host/floor" in told.err


def test_throughput_names_a_bundle_that_is_not_there(texts_file: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        throughput.main(["--bundle", str(tmp_path / "none"), "--corpus", str(texts_file)])
