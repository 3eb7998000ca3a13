"""Reaching a Ray cluster, where there is none."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import commandline
import pytest

from npu_embed import Embedder, InputError
from npu_embed.integrations.ray import connect, on_cluster, run_on_actors


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:{port}", r"ray address '127\.0\.0\.1:\d+': .*refused; start a cluster with"),
        ("ray://127.0.0.1:{port}", r"ray address 'ray://127\.0\.0\.1:\d+': .*refused"),
        ("rows.jsonl", r"ray address 'rows\.jsonl': wanted HOST:PORT"),
        (":6379", r"ray address ':6379': wanted HOST:PORT"),
    ],
)
@pytest.mark.parametrize("way", ["argument", "variable"])
def test_an_address_without_a_cluster_is_refused_at_once(
    address: str, words: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        place = address.format(port=taken.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", place if way == "variable" else "never:1")
        with pytest.raises(InputError, match=words):
            connect(place if way == "argument" else None)


def test_actors_without_a_cluster_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.txt"
    source.write_text("a\n", encoding="utf-8")
    done = commandline.run(
        "batch", str(source), "-o", str(tmp_path / "all.npy"), "--ray-actors", "2"
    )
    assert done.code != 0
    assert "--ray-actors 2: no cluster, wanted one; pass --ray as well" in done.err


def test_without_ray_the_command_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "rows.txt"
    source.write_text("a\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "npu_embed.integrations.ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    done = commandline.run("batch", str(source), "-o", str(tmp_path / "all.npy"), "--ray")
    assert done.code != 0
    assert "pip install 'npu-embed[ray]'" in done.err
    assert "Traceback" not in done.err


def test_without_a_cluster_nothing_runs_on_actors() -> None:
    with pytest.raises(InputError, match=r"ray: not initialized, .*call connect\(\) first"):
        list(run_on_actors(len, ["a"]))  # type: ignore[arg-type]


def test_an_engine_that_actors_would_not_open_is_refused(tiny_bundle: Path) -> None:
    with (
        Embedder(tiny_bundle, "emulated", plain_specials=True) as embedder,
        pytest.raises(InputError, match="plain_specials=True, wanted one as the actors open it"),
    ):
        on_cluster(embedder)
