"""Copies of bundles with something in them changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from npu_embed.tensors import SAFETENSORS

Tensors = Mapping[str, NDArray[np.generic] | None]


def edited(bundle: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy whose manifest has each (old, new) of the changes replaced, wherever old is."""
    shutil.copytree(bundle, folder)
    manifest = folder / "manifest.txt"
    text = manifest.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, f"{old!r} is not in the manifest"
        text = text.replace(old, new)
    manifest.write_text(text, encoding="utf-8")
    return folder


def with_tensors(bundle: Path, folder: Path, tensors: Tensors) -> Path:
    """A copy with other tensors of these names; None removes one."""
    edited(bundle, folder)
    file = folder / SAFETENSORS
    found = {**load_file(file), **tensors}
    save_file({name: t for name, t in found.items() if t is not None}, file)
    return folder
