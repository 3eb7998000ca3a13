"""A bundle of one small GEMM and one small attention, for the emulated NPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..exporters.geometry import K_TILE, N_TILE, M
from ..exporters.kernels import GEMM_CTX, MHA_CTX, TARGETS, Gemm, Mha
from ..exporters.xclbins import KERNEL_NAME, gemm_xclbin, mha_xclbin
from ..manifest import MANIFEST, VERSION
from ..records import make_param, make_record, write_records
from ..tensors import SAFETENSORS, write_safetensors

HEADS, KV_HEADS, HEAD_DIM, BUCKET = 4, 2, 16, 32
QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def write_known_kernels(folder: Path, target: str) -> Path:
    """The bundle, written to a folder, with kernels for `npu1` or `npu2`; it holds no model."""
    k, n = 2 * K_TILE, 3 * N_TILE
    gemm = Gemm("known", K=k, N=n, lda=k, c_stride=n).kernels(1, TARGETS[target])
    mha = Mha(HEADS, KV_HEADS, HEAD_DIM, qkv_stride=QKV_WIDTH, o_stride=HEADS * HEAD_DIM)
    both = gemm.joined(mha.kernels((BUCKET,), TARGETS[target]))
    paths = {ctx: f"kernels/{ctx}.xclbin" for ctx in (GEMM_CTX, MHA_CTX)}
    files = {
        **both.files,
        paths[GEMM_CTX]: gemm_xclbin(),
        paths[MHA_CTX]: mha_xclbin(HEADS, KV_HEADS, HEAD_DIM),
    }
    params: dict[str, str | int] = {
        "name": "known",
        "family": "none",
        "target": target,
        "max_tokens": 1,
        "max_rows": M,
    }
    records = [
        make_record("version", VERSION),
        *(make_param(name, value) for name, value in params.items()),
        *(make_record("xclbin", ctx, path, KERNEL_NAME) for ctx, path in paths.items()),
        *both.records,
    ]
    (folder / "kernels").mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_safetensors(folder / SAFETENSORS, {"none": np.zeros(1, np.float32)})
    (folder / MANIFEST).write_text(write_records(records), encoding="utf-8")
    return folder
