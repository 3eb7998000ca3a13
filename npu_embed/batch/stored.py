"""What a finished output says of itself, and the names of the files beside it."""

from __future__ import annotations

import json
from pathlib import Path

from .formats import JSONL, NPY, SAFETENSORS


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


def sidecar(output: Path) -> Path:
    """Where the metadata of an output is that has no place for it."""
    return output.with_name(f"{output.name}.meta.json")


def skipped_list(output: Path) -> Path:
    """Where the rows are listed that were left out of an output."""
    return output.with_name(f"{output.name}.skipped.jsonl")
