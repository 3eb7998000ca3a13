"""What the README tells a reader to type works."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commandline import Result, run
from references import TINY

from npu_embed import api, fetch
from npu_embed.exporters import Progress

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = sorted({line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()})
LINKS = sorted(set(re.findall(r"\]\(([^)#:]+)\)", README)))
EXTRAS = set(re.findall(r"'\.\[([\w,-]+)\]'", README))
NOT_RUN = (
    "npu-embed serve",
    "npu-embed doctor",
)  # it serves until a signal; it looks at the machine
IMAGES_BUNDLE = "embeddinggemma-2-bundle"


def words(command: str) -> list[str]:
    """The words of a command line, its comment left out."""
    return shlex.split(command, comments=True)


def typed(command: str) -> Result:
    """What a command of the README gives, with what it reads with `<` on stdin."""
    name, *rest = words(command)
    assert name == "npu-embed"
    rest = rest[: rest.index(">")] if ">" in rest else rest
    stdin = b""
    if "<" in rest:
        stdin = Path(rest[rest.index("<") + 1]).read_bytes()
        rest = rest[: rest.index("<")]
    return run(*rest, stdin=stdin)


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engines that examples share with the process hold contexts no longer than a test."""
    monkeypatch.setattr(api, "_shared", {})
    yield
    for embedder in api._shared.values():
        embedder.close()


@pytest.fixture
def _reader(
    tiny_copy: Path,
    eg2_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder with the files that the README speaks of; small bundles stand for those it names."""
    from PIL import Image

    def get(name: str = "minilm", *, progress: Progress | None = None, **options: object) -> Path:
        assert name == "minilm"
        return tiny_copy

    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(fetch, "get", get)
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")
    Path(IMAGES_BUNDLE).symlink_to(eg2_bundle)
    Path("CHECKPOINT").symlink_to(TINY)
    Path("lines.txt").write_text("two cats\na red car\n" * 100)
    Path("reviews.jsonl").write_text(json.dumps({"body": "a text"}) + "\n")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save("cats.jpg")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("npu-embed ")])
def test_every_command_of_the_readme_is_one(command: str) -> None:
    name, *rest = words(command)[1:]
    done = run(name, "--help")
    assert done.code == 0
    for option in (word for word in rest if word.startswith("--") and len(word) > 2):
        assert option in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c.startswith("npu-embed ") and not c.startswith(NOT_RUN)],
)
def test_every_command_of_the_readme_runs(command: str) -> None:
    done = typed(command)
    assert done.code == 0, done.err


@pytest.mark.parametrize("target", [words(c)[1] for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_of_the_readme_is_one(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_extra_of_the_readme_is_one() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[project.")[0]
    known = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    assert known > {"fast", "plot"}
    assert EXTRAS >= known - {"dev", "bench", "llama-index", "chroma", "haystack", "ray", "mteb"}
    assert EXTRAS <= known


def test_the_first_example_runs(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(tiny_bundle))
    names: dict[str, object] = {}
    exec(PYTHON[0], names)
    assert getattr(names["vectors"], "shape", None) == (2, 64)


@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_every_example_runs_by_itself(number: int) -> None:
    names: dict[str, object] = {}
    exec(compile(PYTHON[number], f"README.md, example {number}", "exec"), names)
    if store := names.get("store"):
        (found,) = store.similarity_search("two cats sleeping on a sofa", k=1)  # type: ignore[attr-defined]
        assert found.page_content == "two cats sleeping on a sofa"


@pytest.mark.parametrize("link", LINKS)
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).is_file()
