"""The peers' environment and models: made once, and a reason where they cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import contenders  # noqa: E402
import corpus  # noqa: E402
import make_full_checkpoint as full  # noqa: E402
import peers  # noqa: E402
import targets  # noqa: E402
from processes import OURS  # noqa: E402

from npu_embed import Embedder, export  # noqa: E402
from npu_embed.bundle import Bundle  # noqa: E402

SMALL = full.Sizes(
    vocab_size=1408,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=2,
    sliding_heads=(1, 32),
    full_heads=(1, 64),
    hidden_size_per_layer_input=32,
    embedding_dim=96,
    sliding_window=16,
)


class Pip:
    """Stands for venv.create and pip: groups named in `fails` cannot be installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[str]] = []
        self.fails: set[str] = set()
        monkeypatch.setattr(venv, "create", self.create)
        monkeypatch.setattr(subprocess, "run", self.run)

    def create(self, folder: Path, with_pip: bool, symlinks: bool) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        packages = command[command.index("--disable-pip-version-check") + 1 :]
        self.asked.append(packages)
        return subprocess.CompletedProcess(command, int(bool(self.fails & set(packages))))


def test_peers_are_installed_once_and_again_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(monkeypatch)
    groups = {"a": ("a1==1", "a2==1"), "b": ("b1==2",), "c": ("c1==3",)}
    pip.fails = {"b1==2"}
    python = peers.peer_python(tmp_path / "venv", groups)
    assert python.exists()
    assert pip.asked == [["a1==1", "a2==1"], ["b1==2"], ["c1==3"]]
    assert "pip could not install b1==2" in capsys.readouterr().err
    pip.fails = set()
    peers.peer_python(tmp_path / "venv", groups)
    assert pip.asked[3:] == [["b1==2"]]
    peers.peer_python(tmp_path / "venv", groups)
    assert len(pip.asked) == 4


def test_another_version_is_installed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    peers.peer_python(tmp_path / "venv", {"a": ("a==1", "b==1")})
    peers.peer_python(tmp_path / "venv", {"a": ("a==1", "b==2")})
    assert pip.asked == [["a==1", "b==1"], ["a==1", "b==2"]]


def test_every_peer_is_pinned() -> None:
    assert all("==" in package for group in peers.PACKAGES.values() for package in group)
    assert "torch==2.13.0" in peers.PACKAGES["sentence-transformers"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def exporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    script = tmp_path / "export.py"
    script.write_text(source)
    monkeypatch.setattr(peers, "EXPORT_ONNX", script)


def test_graphs_are_made_once_a_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter(monkeypatch, tmp_path, "import os, sys; os.mkdir(sys.argv[2])")
    first = peers.onnx_graphs(checkpoint, Path(sys.executable), tmp_path)
    exporter(monkeypatch, tmp_path, "raise SystemExit('made again')")
    assert peers.onnx_graphs(checkpoint, Path(sys.executable), tmp_path) == first
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(peers.Unavailable, match="made again"):
        peers.onnx_graphs(checkpoint, Path(sys.executable), tmp_path)


def test_graphs_of_no_weights_are_a_reason(tmp_path: Path) -> None:
    with pytest.raises(peers.Unavailable, match=r"model\.safetensors: no such file"):
        peers.onnx_graphs(tmp_path, Path(sys.executable), tmp_path)


def test_an_engine_whose_graphs_cannot_be_made_is_missing(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    found = contenders.minilm(["a text"], sys.executable, str(tiny_bundle), str(tmp_path))
    found.bundle.close()
    engines, missing = found.part(*contenders.ENGINES_OF["mixed"])
    assert [e.name for e in engines] == [targets.ST, targets.ST_BEST, OURS]
    assert list(missing) == [targets.ORT, targets.ORT_INT8]
    assert found.lengths == [found.lengths[0]]


def test_pack_sizes_are_those_the_bundle_takes(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    default, *smaller = contenders.pack_settings(bundle)
    assert default is None
    assert smaller
    assert all(rows and bundle.max_tokens <= rows < bundle.max_rows for rows in smaller)
    bundle.close()


def test_a_corpus_is_kept_for_the_same_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make(texts: int) -> list[str]:
        made.append(texts)
        return [f"text {i}" for i in range(texts)]

    monkeypatch.setattr(corpus, "make", make)
    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    assert corpus.kept(3, tmp_path / "new") == corpus.kept(3, tmp_path / "new")
    assert made == [3]
    assert len(corpus.kept(5, tmp_path / "new")) == 5
    assert len(list((tmp_path / "new").iterdir())) == 2


# -- the full-size checkpoint, small ----------------------------------------------------------


def test_the_checkpoint_of_a_seed_is_always_the_same(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        full.make(tmp_path / name, SMALL, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert len(a) == len(c)
    assert a != c


@pytest.mark.slow
def test_the_checkpoint_is_exported_and_embeds(tmp_path: Path) -> None:
    full.make(tmp_path / "checkpoint", SMALL)
    bundle = export(tmp_path / "checkpoint", tmp_path / "bundle")
    with Embedder(bundle, "emulated") as embedder:
        vectors = embedder.embed(["two cats sleeping on a sofa", "a red car", "a blue car"])
    assert vectors.shape == (3, 96)
    assert np.isfinite(vectors).all()
    alike = vectors @ vectors.T
    assert np.abs(alike - np.eye(3)).max() < 0.9  # texts are told apart


def test_the_default_sizes_are_those_of_embedding_gemma_2() -> None:
    sizes = full.Sizes()
    drawn = {t.name: t.shape for t in full.tensors(sizes)}
    assert drawn["language_model.embed_tokens.weight"] == (262_144, 512)
    assert drawn["language_model.layers.5.self_attn.q_proj.weight"] == (2048, 512)
    assert drawn["language_model.layers.4.self_attn.k_proj.weight"] == (512, 512)
    found: dict[str, Any] = full.config(sizes)["text_config"]
    assert list(found["per_layer_config"]) == ["5", "11", "17", "23"]
    assert found["layer_types"].count("full_attention") == 4
    assert json.dumps(full.config(sizes))


def test_a_folder_that_is_there_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exists, wanted a new folder"):
        full.main([str(tmp_path)])
