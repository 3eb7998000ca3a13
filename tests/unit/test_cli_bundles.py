"""Which bundle a command is about, said in one way and refused in one way by all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commandline import run

from npu_embed import api, embedder, fetch
from npu_embed.cli import main
from npu_embed.exporters import Progress

# How each command is asked for a bundle; {} is its name.
NAMED = {
    "embed": ("embed", "a", "--bundle", "{}"),
    "batch": ("batch", "in.txt", "-o", "out.npy", "--bundle", "{}"),
    "calibrate": ("calibrate", "{}", "in.txt"),
    "serve": ("serve", "--bundle", "{}"),
    "check": ("check", "{}"),
    "verify": ("check", "--verify", "{}"),
    "profile": ("profile", "{}"),
    "lint": ("inspect", "--lint", "{}"),
    "inspect": ("inspect", "{}"),
}
VERBS = {"Embed", "Serve", "Make", "Find", "Store", "Show", "Compare"}


def args(name: str, bundle: object) -> list[str]:
    return [word.format(bundle) for word in NAMED[name]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")
    Path("in.txt").write_text("a\nb\nc\n")


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_shared", {})


@pytest.fixture
def asked(tiny_copy: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes that were asked for; the tiny bundle is what each makes."""
    names: list[str] = []

    def get(name: str = "minilm", *, progress: Progress | None = None) -> Path:
        names.append(name)
        return tiny_copy

    monkeypatch.setattr(fetch, "get", get)
    return names


@pytest.mark.parametrize("name", [name for name in NAMED if name != "serve"])
def test_a_bundle_may_be_named_as_a_recipe(name: str, asked: list[str]) -> None:
    done = run(*args(name, "minilm"))
    assert (done.code, asked) == (0, ["minilm"]), done.err


@pytest.mark.parametrize("command", ["check", "profile", "inspect"])
@pytest.mark.parametrize("variable", [True, False])
def test_where_none_is_named_it_is_the_one_that_embed_takes(
    command: str,
    variable: bool,
    asked: list[str],
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("NPU_EMBED_BUNDLE", str(tiny_bundle))
    done = run(command, "--json")
    assert (done.code, asked) == (0, [] if variable else ["minilm"]), done.err


@pytest.mark.parametrize("command", ["embed", "check", "inspect"])
def test_the_variable_may_name_a_recipe(
    command: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "minilm")
    done = run(command, *(["a"] if command == "embed" else []))
    assert (done.code, asked) == (0, ["minilm"]), done.err


def test_a_program_may_name_a_recipe(asked: list[str], tiny_copy: Path) -> None:
    with api.shared("minilm") as made:  # as embed(..., bundle="minilm") has it
        assert made.bundle.path == tiny_copy
    assert asked == ["minilm"]
    Path("minilm").symlink_to(tiny_copy)  # a folder goes before it
    with embedder.Embedder("minilm") as made:
        assert made.bundle.path == Path("minilm")
    assert asked == ["minilm"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMED if name != "serve"])
def test_a_folder_goes_before_a_recipe_of_its_name(
    name: str, asked: list[str], tiny_copy: Path
) -> None:
    Path("minilm").symlink_to(tiny_copy)
    assert run(*args(name, "minilm")).code == 0
    assert asked == []


@pytest.mark.parametrize("name", NAMED)
def test_a_bundle_that_is_not_there_is_refused_in_the_same_words(
    name: str, asked: list[str]
) -> None:
    done = run(*args(name, "nowhere"))
    assert (done.code, done.out, asked) == (1, "", [])
    wanted = "a bundle, an xclbin or an instruction stream" if name == "inspect" else "a bundle"
    assert re.fullmatch(
        rf"error: nowhere: no such folder( or file)?, wanted {wanted}; make one with `npu-embed "
        r"export CHECKPOINT OUT`, or the default one with `npu-embed get minilm`\.\n",
        done.err,
    )


@pytest.mark.parametrize("name", NAMED)
def test_an_empty_name_is_not_the_current_folder(
    name: str, asked: list[str], tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("in.txt").rename(tiny_copy / "in.txt")
    monkeypatch.chdir(tiny_copy)
    done = run(*args(name, ""))
    assert (done.code, done.out, asked) == (1, "", [])
    assert done.err == (
        "error: bundle '': empty, wanted a folder or the name of a recipe; leave it out for the "
        "default one.\n"
    )


@pytest.mark.parametrize("command", ["check", "profile"])
def test_a_variable_that_names_no_bundle_is_refused_in_those_words_too(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "nowhere")
    assert "nowhere: no such folder, wanted a bundle; make one" in run(command).err


def test_the_doctor_takes_the_name_of_a_recipe_and_makes_nothing(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path))
    findings = {one.get("check"): one for one in run("doctor", "--json", "minilm").json_lines}
    assert (findings["bundle"]["status"], asked) == ("WARN", [])
    assert "is not made yet" in str(findings["bundle"])


@pytest.mark.parametrize("command", sorted(main.commands))
def test_what_a_command_does_is_said_with_a_verb(command: str) -> None:
    said = main.commands[command].short_help or ""
    assert said.split()[0] in VERBS
    assert said.endswith(".")


@pytest.mark.parametrize("command", sorted(main.commands))
def test_an_example_names_no_bundle_that_a_reader_of_the_readme_does_not_have(
    command: str,
) -> None:
    epilog = main.commands[command].epilog or ""
    named = set(re.findall(r"\b[\w-]+-bundle\b", epilog)) - {"embeddinggemma-2-bundle"}
    assert named <= ({"minilm-bundle"} if command == "export" else set())  # which makes it


@pytest.mark.parametrize("name", ["embed", "batch", "serve"])
def test_the_help_names_the_variable(name: str) -> None:
    assert "NPU_EMBED_BUNDLE, else minilm" in " ".join(run(name, "--help").out.split())


@pytest.mark.parametrize("command", sorted(main.commands))
def test_an_example_asks_for_no_prompt_that_the_default_bundle_does_not_have(command: str) -> None:
    assert "--prompt" not in (main.commands[command].epilog or "")


def test_the_default_bundle_is_the_recipe_of_get(asked: list[str]) -> None:
    embedder.default_bundle()
    assert asked == ["minilm"]
