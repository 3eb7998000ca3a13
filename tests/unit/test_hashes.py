"""Files compared with their sha256 records, on demand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import run

import npu_embed
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.errors import BundleError

FILES = (
    "tensors.safetensors",
    "tokenizer.json",
    "kernels/gemm.xclbin",
    "kernels/up_x2.insts.bin",
    "kernels/mha_16.insts.bin",
)


def change_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["tiny_bundle", "published_bundle"])
def test_a_bundle_as_it_was_written_has_its_hashes(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    Bundle.open(request.getfixturevalue(bundle), check_hashes=True).close()


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_named(tiny_copy: Path, file: str) -> None:
    change_last_byte(tiny_copy / file)
    with pytest.raises(BundleError, match=f"^{file}: sha256 [0-9a-f]{{64}}, wanted [0-9a-f]{{64}}"):
        Bundle.open(tiny_copy, check_hashes=True)


@pytest.mark.parametrize("file", FILES)
def test_a_file_without_a_record_is_named(tiny_copy: Path, file: str) -> None:
    manifest = tiny_copy / "manifest.txt"
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    left = [line for line in lines if not line.startswith(f"sha256 {file} ")]
    assert len(left) == len(lines) - 1
    manifest.write_text("".join(left), encoding="utf-8")
    with pytest.raises(BundleError, match=f"^manifest.txt: no sha256 record of '{file}'"):
        Bundle.open(tiny_copy, check_hashes=True)
    Bundle.open(tiny_copy).close()


def test_hashes_are_read_before_anything_else_of_a_file(tiny_copy: Path) -> None:
    (tiny_copy / "tensors.safetensors").write_bytes(b"no tensors")
    with pytest.raises(BundleError, match=r"^tensors.safetensors: sha256"):
        Bundle.open(tiny_copy, check_hashes=True)
    with pytest.raises(BundleError, match="header"):
        Bundle.open(tiny_copy)


def test_nothing_is_read_for_its_hash_unless_it_is_asked_for(tiny_copy: Path) -> None:
    change_last_byte(tiny_copy / "tensors.safetensors")
    Bundle.open(tiny_copy).close()


def test_a_record_of_the_same_file_by_another_spelling_is_its_record(tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace("sha256 kernels/", "sha256 ./kernels//"), encoding="utf-8")
    Bundle.open(tiny_copy, check_hashes=True).close()


def test_an_embedder_checks_them_where_it_is_told(tiny_copy: Path) -> None:
    with npu_embed.Embedder(tiny_copy, "emulated", check_hashes=True) as embedder:
        assert embedder.embed("a").shape == (64,)
    change_last_byte(tiny_copy / "kernels/up_x2.insts.bin")  # of no text as short as this one
    with npu_embed.Embedder(tiny_copy, "emulated") as embedder:
        embedder.embed("a")
    with pytest.raises(BundleError, match=r"kernels/up_x2.insts.bin: sha256"):
        npu_embed.Embedder(tiny_copy, "emulated", check_hashes=True)


def test_check_verify_compares_hashes_alone(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*_: object, **__: object) -> None:
        raise AssertionError("the device was opened")

    monkeypatch.setattr(Session, "open", no_device)
    result = run("check", "--verify", tiny_copy)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    for file in FILES[:2]:
        change_last_byte(tiny_copy / file)
    result = run("check", "--verify", "--json", tiny_copy)
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 1
    assert [line["figures"]["file"] for line in lines[:-1]] == list(FILES[:2])
    assert lines[-1]["failed"] == 2


def test_check_verify_fails_where_there_are_no_hashes(tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    manifest.write_text("".join(x for x in lines if not x.startswith("sha256")), encoding="utf-8")
    result = run("check", "--verify", tiny_copy)
    assert result.code == 1
    assert "no sha256 record of 'kernels/gemm.xclbin'" in result.out
