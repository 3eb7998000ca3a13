"""Bundles of the published layout, with something in them changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from bundle_edits import edited
from numpy.typing import NDArray

from npu_embed.tensors import TENSORS_BIN, TENSORS_TXT, open_tensors
from npu_embed.tensors_txt import write_tensors_txt

Arrays = Mapping[str, NDArray[np.generic] | None]
_READERS = {"f32": "f32", "bf16": "bf16", "u8": "u8", "i32": "i32"}


def with_tensors(bundle: Path, folder: Path, changed: Arrays) -> Path:
    """A copy with other tensors of these names; None removes one."""
    edited(bundle, folder)
    tensors = open_tensors(folder)
    found: dict[str, NDArray[np.generic]] = {}
    bf16 = [name for name in tensors.names() if tensors.dtype(name) == "bf16"]
    for name in tensors.names():
        found[name] = getattr(tensors, _READERS[tensors.dtype(name)])(name).copy()
    tensors.close()
    for name, array in changed.items():
        found.pop(name, None)
        if array is not None:
            found[name] = array
    (folder / TENSORS_TXT).unlink()
    (folder / TENSORS_BIN).unlink()
    write_tensors_txt(folder, found, [name for name in bf16 if name in found])
    return folder


def without_lines(bundle: Path, *beginnings: str) -> Path:
    """The bundle, its manifest's lines that begin so removed."""
    manifest = bundle / "manifest.txt"
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(beginnings)]
    assert len(kept) < len(lines), f"no line begins with {beginnings}"
    manifest.write_text("".join(kept), encoding="utf-8")
    return bundle
