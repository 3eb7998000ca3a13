"""Whole bundles with something in them changed: each embeds, or says what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fuzz.mutate import mutated
from fuzz.targets import EMBED_FILES, check_named
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import npu_embed
from npu_embed.errors import BundleError, NpuEmbedError

TEXT = "two cats"  # 4 tokens: the shortest streams are run


@pytest.fixture(scope="module")
def victim(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny bundle for all tests here, who leave it as it was."""
    return Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("victim") / "bundle"))


def outcome(bundle: Path) -> str:
    """ "vector", or the name of the error, which names a file; anything else is raised."""
    try:
        with npu_embed.Embedder(bundle, device="emulated") as embedder:
            vector = embedder.embed(TEXT)
    except NpuEmbedError as error:
        if isinstance(error, BundleError):
            check_named(bundle, error)
        return type(error).__name__
    assert np.isfinite(vector).all()
    return "vector"


@pytest.mark.parametrize("file", EMBED_FILES)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_a_bundle_with_a_changed_file_embeds_or_says_what_is_wrong(
    victim: Path, file: str, seed: int
) -> None:
    path = victim / file
    content = path.read_bytes()
    rng = random.Random(seed)
    # Of a long file its beginning, which is its header.
    head = mutated(rng, [content[:65536]])
    path.write_bytes(head + content[65536:])
    try:
        event(outcome(victim))
    finally:
        path.write_bytes(content)


# -- numbers that ask for more memory than there is, in a process that has little

LIMIT_BYTES = 3 << 30

CHILD = """
import json, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import npu_embed
for bundle in sys.argv[2:]:
    try:
        with npu_embed.Embedder(bundle, device="emulated") as embedder:
            embedder.embed("two cats")
        print(json.dumps(["vector", ""]))
    except npu_embed.NpuEmbedError as error:
        print(json.dumps([type(error).__name__, str(error)]))
# Not ru_maxrss, which a process inherits from its parent.
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0])
print(json.dumps(["peak", peak]))
"""
PEAK_KIB = 1 << 20  # 1 GiB, most of it what a bundle with the largest stream or manifest takes


def _noops(count: int) -> bytes:
    """A stream of operations of a word each, the most that a file's bytes can be."""
    header = np.array([0x06040100, 0x00000108, count, 16 + 4 * count], "<u4")
    return header.tobytes() + np.full(count, 5, "<u4").tobytes()


def _headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _hostile(bundle: Path, folder: Path) -> Iterator[tuple[Path, str, str]]:
    """(bundle, what its error names, what it says) of each kind of greed."""
    manifest = (bundle / "manifest.txt").read_text(encoding="utf-8")
    edits = {
        "rows": ("max_rows 2048", "max_rows 65536", "manifest.txt", "wanted max_rows 65536"),
        "hidden": ("hidden_size 64", "hidden_size 65536", "manifest.txt", "wanted at least"),
        "vocabulary": ("vocab_size 1000", "vocab_size 16777216", "tensors", "wanted [16777216"),
        "layers": ("num_hidden_layers 3", "num_hidden_layers 1024", "tensors", "encoder.layer.3"),
        "stride": ("K=64 N=192 lda=64 c_stride=192 a_elems=4096 c_elems=12288",
                   "K=64 N=192 lda=64 c_stride=2147483646 a_elems=4096 c_elems=4294967295",
                   "manifest.txt:", "c_elems is"),
        "chunk": ("M=64 K=64 N=192", "M=2147483647 K=64 N=192", "manifest.txt:", "a_elems is"),
        "bucket": ("\nmha 16 ", "\nmha 2147483644 ", "manifest.txt", "row buffers"),
        "window": ("no_window 4294967295", "no_window 99999999999", "manifest.txt:", "no_window"),
    }  # fmt: skip
    for name, (old, new, place, says) in edits.items():
        path = _copy(bundle, folder / name)
        assert old in manifest
        (path / "manifest.txt").write_text(manifest.replace(old, new), encoding="utf-8")
        yield path, place, says
    deep, wide = b"[" * (3 << 20), b"[" + b"[]," * (5 << 20) + b"0]"
    contents = (
        ("kernels/qkv_r16.insts.bin", _noops((16 << 20) // 4 - 4), "wanted at most 524288"),
        ("manifest.txt", b"version 1\n" + b"x y\n" * 4_000_000, "more than 200000 records"),
        ("tensors.safetensors", _headed(deep), "the header is not JSON"),
        ("tensors.safetensors", _headed(wide), "the header: 10485762 JSON values, wanted at most"),
        ("tokenizer.json", deep, "wanted a tokenizer"),
        ("tokenizer.json", b'{"model": ' + b"[]," * (16 << 20), "JSON values, wanted at most"),
        ("kernels/gemm.xclbin", b"xclbin2\0" + bytes(32 << 20), "no xclbin"),
    )
    for n, (file, content, says) in enumerate(contents):
        path = _copy(bundle, folder / f"{n}-{Path(file).name}")
        (path / file).write_bytes(content)
        yield path, Path(file).name, says
    for file, says in {
        "tensors.safetensors": "after the last tensor",
        "tokenizer.json": "wanted a file of at most",
        "kernels/mha.xclbin": "wanted at most",
        "kernels/up_r16.insts.bin": "wanted 32-bit words, at most",
        "manifest.txt": "bytes or more, wanted at most",
    }.items():
        path = _copy(bundle, folder / f"sparse-{Path(file).name}")
        os.truncate(path / file, 1 << 30 if file.startswith("tensors") else 1 << 40)
        yield path, Path(file).name, says


def _copy(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder))


@pytest.mark.slow
def test_greed_is_refused_with_its_place_and_little_memory(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    cases = list(_hostile(tiny_bundle, tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(LIMIT_BYTES), *(str(path) for path, _, _ in cases)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *found, (_, peak) = (json.loads(line) for line in done.stdout.splitlines())
    for (path, place, says), (kind, message) in zip(cases, found, strict=True):
        assert (kind, place in message, says in message) == ("BundleError", True, True), (
            f"{path.name}: {kind}: {message}"
        )
    assert peak < PEAK_KIB
