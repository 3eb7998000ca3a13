"""What the README tells a reader to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commandline import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = sorted({line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()})
LINKS = sorted(set(re.findall(r"\]\(([^)#:]+)\)", README)))


def words(command: str) -> list[str]:
    """The words of a command line, its comment left out."""
    return shlex.split(command, comments=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("npu-embed ")])
def test_every_command_of_the_readme_is_one(command: str) -> None:
    name, *rest = words(command)[1:]
    done = run(name, "--help")
    assert done.code == 0
    for option in (word for word in rest if word.startswith("--") and len(word) > 2):
        assert option in done.out


@pytest.mark.parametrize("target", [words(c)[1] for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_of_the_readme_is_one(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_first_example_runs(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(tiny_bundle))
    kind, example = BLOCKS[0]
    assert kind == "python"
    names: dict[str, object] = {}
    exec(example, names)
    assert getattr(names["vectors"], "shape", None) == (2, 64)


@pytest.mark.parametrize("link", LINKS)
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).is_file()
