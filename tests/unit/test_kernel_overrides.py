"""NPU_EMBED_KERNELS: a folder's xclbins and streams go before the bundle's of their names."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from rigs import MakeRig

from npu_embed.bundle import Bundle
from npu_embed.emulator import txn
from npu_embed.errors import BundleError, RunFailed

QKV = "qkv_r16.insts.bin"  # of the few rows of a rig's plain run


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, empty."""
    folder = tmp_path / "overrides"
    folder.mkdir()
    monkeypatch.setenv("NPU_EMBED_KERNELS", str(folder))
    return folder


def test_what_the_folder_has_is_used_and_said_once(
    make: MakeRig, tiny_bundle: Path, overrides: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = (tiny_bundle / "kernels" / QKV).read_bytes()
    stream = txn.decode(original)
    last_wait = max(i for i, op in enumerate(stream.ops) if isinstance(op, txn.Sync))
    ops = [*stream.ops[: last_wait + 1], stream.ops[last_wait], *stream.ops[last_wait + 1 :]]
    header = stream.header
    hanging = txn.assemble(ops, dev_gen=header.dev_gen, num_cols=header.num_cols).encode()
    (overrides / QKV).write_bytes(hanging)
    shutil.copy(tiny_bundle / "kernels/mha.xclbin", overrides)
    rig = make(tiny_bundle)
    assert rig.bundle.xclbin("mha") == overrides / "mha.xclbin"
    assert rig.bundle.xclbin("gemm") == tiny_bundle / "kernels/gemm.xclbin"
    for _ in range(2):
        with pytest.raises(RunFailed, match="qkv_r16: the run ended in TIMEOUT"):
            rig.gemm()
    rig.gemm(rows=65)
    said = [r.getMessage() for r in caplog.records if r.name == "npu_embed"]
    assert sorted(said) == [
        f"kernels/mha.xclbin: replaced by {overrides}/mha.xclbin (NPU_EMBED_KERNELS)",
        f"kernels/{QKV}: replaced by {overrides}/{QKV} (NPU_EMBED_KERNELS)",
    ]


def test_what_the_folder_lacks_is_the_bundles_and_that_is_logged(
    make: MakeRig, tiny_bundle: Path, overrides: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (overrides / "mha.xclbin").mkdir()  # no file
    with caplog.at_level(logging.INFO, logger="npu_embed"):
        found = make(tiny_bundle).gemm()
    messages = [record.getMessage() for record in caplog.records]
    assert f"kernels/{QKV}: the bundle's, there is no {overrides}/{QKV}" in messages
    assert f"kernels/mha.xclbin: the bundle's, there is no {overrides}/mha.xclbin" in messages
    assert len(messages) == len(set(messages))
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NPU_EMBED_KERNELS")
        np.testing.assert_array_equal(make(tiny_bundle).gemm(), found)


@pytest.mark.parametrize("content", [b"", b"123", bytes(64)])
def test_a_damaged_file_is_refused_though_the_bundles_is_sound(
    make: MakeRig, tiny_bundle: Path, overrides: Path, content: bytes
) -> None:
    (overrides / QKV).write_bytes(content)
    with pytest.raises(BundleError, match=QKV):
        make(tiny_bundle).gemm()


def test_a_file_of_the_bundle_is_still_needed_at_its_place(
    tiny_copy: Path, overrides: Path
) -> None:
    (tiny_copy / "kernels/gemm.xclbin").rename(overrides / "gemm.xclbin")
    with pytest.raises(BundleError, match=r"gemm.xclbin.: no such file"):
        Bundle.open(tiny_copy)
