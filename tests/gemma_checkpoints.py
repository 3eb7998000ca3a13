"""Gemma checkpoints to be changed, and packed weights read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray
from references import DATA
from safetensors.numpy import load_file, save_file

from npu_embed.bf16 import to_f32

F32 = NDArray[np.float32]
TINY_GEMMA3 = DATA / "tiny-gemma3"
TINY_EG2 = DATA / "tiny-eg2"


def linked_copy(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose JSON files may be changed; weights are links to its own."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.jsonl"))
    for weights in checkpoint.rglob("model.safetensors"):
        (folder / weights.relative_to(checkpoint)).symlink_to(weights)
    return folder


def edit(file: Path, *path: str, **changes: object) -> None:
    """Change keys of a JSON file's object, or of the one at `path` in it; `...` removes a key."""
    values = json.loads(file.read_text())
    inner = values
    for key in path:
        inner = inner[key]
    for key, value in changes.items():
        if value is ...:
            inner.pop(key, None)
        else:
            inner[key] = value
    file.write_text(json.dumps(values))


def edit_weights(file: Path, **changes: F32 | EllipsisType) -> None:
    """Replace tensors of a linked safetensors file by a file of its own; `...` removes one."""
    tensors: dict[str, F32 | EllipsisType] = {**load_file(file), **changes}
    file.unlink()
    kept = {name: value for name, value in tensors.items() if not isinstance(value, EllipsisType)}
    save_file(kept, file)


def unpack(packed: NDArray[np.uint8], k: int, n: int) -> F32:
    """B [k, n] of a packed weight without bias: blocks of 64 columns, 8 x 8 groups."""
    padded = -(-k // 64) * 64
    bits = packed.view("<u2").reshape(-1, padded // 64, 8, 8, 8, 8)
    values = to_f32(np.ascontiguousarray(bits.transpose(1, 3, 5, 0, 2, 4))).reshape(padded, -1)
    assert not values[k:].any(), "rows past K are zero"
    assert not values[:, n:].any(), "columns past N are zero"
    return values[:k, :n]


def unpair(columns: F32, width: int) -> tuple[F32, F32]:
    """Gate and up, [K, width] each, of B's columns [K, 2 N'] in turns of 32."""
    pairs = columns.reshape(len(columns), -1, 2, 32)
    gate, up = (pairs[:, :, i].reshape(len(columns), -1) for i in (0, 1))
    assert not gate[:, width:].any()
    assert not up[:, width:].any()
    return gate[:, :width], up[:, :width]
