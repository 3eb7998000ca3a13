"""The examples of docs/integrations.md run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
EXAMPLES = {
    title: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for title, text in SECTIONS
}
TEXTS = {"two cats sleeping on a sofa", "a red car parked outside"}


@pytest.fixture(autouse=True)
def _settings(prompted_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(prompted_bundle))
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")


def run(title: str, **given: object) -> dict[str, object]:
    """The names that a section's examples leave."""
    names = dict(given)
    for example in EXAMPLES[title]:
        exec(compile(example, f"docs/integrations.md, {title}", "exec"), names)
    return names


@pytest.mark.parametrize("title", ["LangChain", "LlamaIndex", "Chroma", "Haystack"])
def test_an_example_finds_a_text(title: str) -> None:
    assert run(title)["best"] in TEXTS


def test_the_options_are_those_of_every_adapter() -> None:
    assert "embeddings" in run("What all of them take")


@pytest.fixture
def _no_cluster_stays() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


@pytest.mark.alone
@pytest.mark.usefixtures("_no_cluster_stays")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_of_ray_runs(
    prompted_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the actors
    names = run("Ray", folder=prompted_bundle)
    assert names["best"] in TEXTS
    assert names["options"]["bundle"].unpack().is_relative_to(tmp_path)  # type: ignore[index]


def test_every_adapter_has_an_example() -> None:
    modules = {path.stem for path in (ROOT / "npu_embed" / "integrations").glob("*.py")}
    shown = set(re.findall(r"from npu_embed\.integrations\.(\w+) import", GUIDE))
    assert shown == modules - {"__init__", "engine", "extras", "shipped"}
