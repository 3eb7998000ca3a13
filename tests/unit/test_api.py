"""embed() and export(): the functions of the package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from references import TINY

import npu_embed
from npu_embed import api
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import InputError, InputTypeError, SettingError


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(api, "_shared", {})
    yield
    for embedder in api._shared.values():
        embedder.close()


def test_embed_is_an_embedders_embed(tiny_bundle: Path) -> None:
    texts = ["two cats", "a red car"]
    with npu_embed.Embedder(tiny_bundle, "emulated") as embedder:
        wanted = embedder.embed(texts, dim=10)
    found = npu_embed.embed(texts, bundle=tiny_bundle, device="emulated", dim=10)
    np.testing.assert_array_equal(found, wanted)
    assert npu_embed.embed("two cats", bundle=tiny_bundle, device="emulated").shape == (64,)


def test_the_same_bundle_and_device_are_opened_once(
    tiny_bundle: Path, tiny_cls_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bundle in (tiny_bundle, str(tiny_bundle), tiny_cls_bundle, tiny_bundle):
        npu_embed.embed("a", bundle=bundle, device="emulated")
    assert len(api._shared) == 2
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(tiny_bundle))
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")
    npu_embed.embed("a")
    assert len(api._shared) == 2


def test_a_relative_bundle_is_the_same_one(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_bundle.parent)
    npu_embed.embed("a", bundle=tiny_bundle.name, device="emulated")
    npu_embed.embed("a", bundle=tiny_bundle, device="emulated")
    assert len(api._shared) == 1


def test_threads_at_once_open_one(tiny_bundle: Path) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        npu_embed.embed("a", bundle=tiny_bundle, device="emulated")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(api._shared) == 1


def test_a_failed_open_is_tried_again(tiny_bundle: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    with pytest.raises(npu_embed.BundleError, match=r"no such folder"):
        npu_embed.embed("a", bundle=later, device="emulated")
    later.symlink_to(tiny_bundle)
    assert npu_embed.embed("a", bundle=later, device="emulated").shape == (64,)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own(tiny_bundle: Path) -> None:
    wanted = npu_embed.embed("a", bundle=tiny_bundle, device="emulated")
    with api._lock:  # held at the fork by a thread the child does not have
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(20)  # rather than wait for ever
            try:
                found = npu_embed.embed("a", bundle=tiny_bundle, device="emulated")
                code = 0 if np.array_equal(found, wanted) and len(api._shared) == 2 else 2
            finally:
                os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_export_makes_a_bundle_and_refuses_one_that_is_there(tmp_path: Path) -> None:
    out = npu_embed.export(TINY, tmp_path / "bundle", name="mine")
    assert npu_embed.Embedder(out, "emulated").bundle.name == "mine"
    with pytest.raises(InputError, match=r"exists.*force=True"):
        npu_embed.export(TINY, out)
    assert npu_embed.export(TINY, out, force=True) == out


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"device": []}, SettingError, r"device=\[\]: unknown device, wanted"),
        ({"device": "gpu"}, SettingError, "device='gpu': unknown device, wanted"),
        ({"bundle": 3}, InputTypeError, "bundle=3: int, wanted a path as str"),
        ({"bundle": "a\0b"}, InputError, "a NUL in a path"),
    ],
)
def test_what_names_no_embedder_is_refused(
    arguments: dict[str, Anything], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        npu_embed.embed("a", **{"device": "emulated", **arguments})
    assert not api._shared


@pytest.mark.parametrize(
    ("checkpoint", "out", "options", "error", "words"),
    [
        (3, "out", {}, InputTypeError, "checkpoint=3: int, wanted a path as str"),
        ("x" * 5000, "out", {}, InputError, "x: no such folder, wanted a checkpoint"),
        (TINY, None, {}, InputTypeError, "out=None: NoneType, wanted a path as str"),
        (TINY, "a\0b", {}, InputError, "a NUL in a path"),
        (TINY, "x" * 5000, {}, InputError, "x: File name too long, wanted to write the bundle"),
        (TINY, "out", {"target": []}, InputError, r"target=\[\]: unknown NPU"),
    ],
)
def test_export_refuses_what_is_no_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Anything,
    out: Anything,
    options: dict[str, Anything],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        npu_embed.export(checkpoint, out, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_export_is_a_function_whatever_was_imported_before(tmp_path: Path) -> None:
    fresh = (
        "import npu_embed; first = npu_embed.export; import npu_embed.exporters.pack; "
        f"first({str(TINY)!r}, {str(tmp_path / 'a')!r}); "
        f"npu_embed.export({str(TINY)!r}, {str(tmp_path / 'b')!r}, name='tiny-bert')"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", fresh], check=True, cwd=root)
    assert (tmp_path / "a/manifest.txt").read_bytes() == (tmp_path / "b/manifest.txt").read_bytes()
