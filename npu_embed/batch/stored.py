"""What a finished output says of itself, and the names of the files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ..manifest import sha256_file
from .formats import JSONL, NPY, SAFETENSORS

MAX_SIDECAR_CHARACTERS = 16 << 20
_BYTES, _SHA256 = "output_bytes", "output_sha256"


class Written:
    """A file that is written from its beginning to its end, and what tells it from any other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes) -> int:
        """Write bytes behind those before; how many."""
        self._digest.update(data)
        self._size_bytes += len(data)
        return self._file.write(data)

    def facts(self) -> dict[str, str]:
        """What a sidecar says of the file as it was finished."""
        return {_BYTES: str(self._size_bytes), _SHA256: self._digest.hexdigest()}


def changed_since(path: Path, stored: Mapping[str, str]) -> str:
    """How an output differs from what it was when it was finished, in words; "" if it does not.

    stored: what its sidecar says; an output without one tells by itself whether it is whole.
    """
    if _SHA256 not in stored:
        return ""
    size_bytes = path.stat().st_size
    if str(size_bytes) != stored.get(_BYTES):
        return f"{size_bytes} bytes, {stored.get(_BYTES)} when it was finished"
    return "" if sha256_file(path) == stored[_SHA256] else "other bytes than when it was finished"


def read_metadata(path: Path, output_format: str) -> dict[str, str]:
    """What a finished output says of itself; empty where it is none of ours."""
    try:
        if output_format in (NPY, JSONL):
            found = json.loads(sidecar(path).read_bytes())
        elif output_format == SAFETENSORS:
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                found = file.metadata() or {}
        else:
            from .table_writers import table_metadata

            found = table_metadata(path, output_format)
        return {str(key): str(value) for key, value in found.items()}
    except Exception:  # each library has errors of its own for a file of somebody else
        return {}


def beside(output: Path, output_format: str) -> tuple[Path, ...]:
    """The files that may be beside an output of that format, and go when it is replaced."""
    lists = (skipped_list(output),)
    return (sidecar(output), *lists) if output_format in (NPY, JSONL) else lists


def is_ours(path: Path) -> bool:
    """Whether a file beside an output was written by a batch job."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.readline() if path.suffix == ".jsonl" else file.read(MAX_SIDECAR_CHARACTERS)
        found = json.loads(text)
    except (OSError, ValueError):
        return False
    fields = ("row", "where", "reason") if path.suffix == ".jsonl" else ("bundle_sha256",)
    return isinstance(found, dict) and all(field in found for field in fields)


def sidecar(output: Path) -> Path:
    """Where the metadata of an output is that has no place for it."""
    return output.with_name(f"{output.name}.meta.json")


def skipped_list(output: Path) -> Path:
    """Where the rows are listed that were left out of an output."""
    return output.with_name(f"{output.name}.skipped.jsonl")
