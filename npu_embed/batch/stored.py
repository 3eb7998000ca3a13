"""What a finished output says of itself, and the names of the files beside it."""

from __future__ import annotations

import json
from pathlib import Path

from .formats import JSONL, NPY, SAFETENSORS

MAX_SIDECAR_CHARACTERS = 16 << 20


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
