"""Bundles from before `gemm_rows` and the run-time word of a run's rows: they run as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from references import NEAR_BITS

from npu_embed import Embedder
from npu_embed.emulator import txn, xclbin
from npu_embed.exporters.xclbins import KERNEL_NAME, pdi_image

ROWS_WORD_OFFSET = 1024 + 4 * 5  # in core memory
TEXTS = ["a", "two cats on a sofa", "numbers 3.14159, 1,000,000 and 0xDEADBEEF", "word " * 90]


def _without_rows_word(stream: txn.Stream) -> bytes:
    ops = [
        op
        for op in stream.ops
        if not (
            isinstance(op, txn.Write)
            and txn.split_address(op.address)[1] >= 2
            and txn.split_address(op.address)[2] == ROWS_WORD_OFFSET
        )
    ]
    assert len(ops) == len(stream.ops) - 16, "one a core"
    header = stream.header
    return txn.assemble(ops, dev_gen=header.dev_gen, num_cols=header.num_cols).encode()


@pytest.fixture
def older(tiny_copy: Path) -> Path:
    """The tiny bundle as version 1 of the exporter wrote it, but for the buckets."""
    kernels = tiny_copy / "kernels"
    for path in kernels.glob("*_r*.insts.bin"):
        path.unlink()
    for path in kernels.glob("*_x*.insts.bin"):
        path.write_bytes(_without_rows_word(txn.decode(path.read_bytes())))
    constants: dict[str, str | int] = {
        "program": "gemm",
        "columns": 4,
        "core_rows": 4,
        "rows_per_core": 16,
        "k_tile": 64,
        "n_tile": 64,
        "rtp_offset": 1024,
    }
    (kernels / "gemm.xclbin").write_bytes(
        xclbin.build(
            kernel_name=KERNEL_NAME,
            pdi_image=pdi_image(constants),
            column_width=4,
            name="npu_embed_gemm",
        )
    )
    manifest = tiny_copy / "manifest.txt"
    lines = manifest.read_text().splitlines(keepends=True)
    newer = ("gemm_rows ", "sha256 ")
    manifest.write_text("".join(line for line in lines if not line.startswith(newer)))
    return tiny_copy


def test_an_older_bundle_gives_the_vectors_of_a_newer_one(older: Path, tiny_bundle: Path) -> None:
    with Embedder(older, "emulated") as old, Embedder(tiny_bundle, "emulated") as new:
        for texts in (*([text] for text in TEXTS), TEXTS):
            assert np.abs(old.embed(texts) - new.embed(texts)).max() < NEAR_BITS
        gemms = [old.bundle.specs.gemms[key] for key in ("qkv", "o", "up", "down")]
    assert all(stream.rows % 64 == 0 for gemm in gemms for stream in gemm.streams)
