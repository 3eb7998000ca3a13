"""File formats by the ending of a name, and what each can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, SettingError

TXT, JSONL, CSV, TSV, PARQUET, ARROW = "txt", "jsonl", "csv", "tsv", "parquet", "arrow"
NPY, SAFETENSORS = "npy", "safetensors"

INPUT_FORMATS = (TXT, JSONL, CSV, TSV, PARQUET, ARROW)
OUTPUT_FORMATS = (NPY, SAFETENSORS, PARQUET, ARROW, JSONL)
TABLES = (PARQUET, ARROW)  # pyarrow reads and writes them
WITH_COLUMNS = (PARQUET, ARROW, JSONL)  # outputs that keep the input's columns

_ENDINGS = {
    ".txt": TXT,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".csv": CSV,
    ".tsv": TSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".npy": NPY,
    ".safetensors": SAFETENSORS,
}


def _by_ending(path: Path, formats: tuple[str, ...]) -> str | None:
    found = _ENDINGS.get(path.suffix.lower())
    return found if found in formats else None


def _wanted(formats: tuple[str, ...]) -> str:
    endings = [ending for ending, name in _ENDINGS.items() if name in formats]
    return f"{', '.join(endings[:-1])} or {endings[-1]}"


def output_format(path: Path) -> str:
    """What a result of that name is written as.

    Raises:
        InputError: the ending says nothing.
    """
    found = _by_ending(path, OUTPUT_FORMATS)
    if found is None:
        raise InputError(
            f"{path}: ending {path.suffix or 'missing'}, wanted {_wanted(OUTPUT_FORMATS)}; name "
            "the output so."
        )
    return found


def input_format(path: Path) -> str:
    """What a file of that name is read as.

    Raises:
        InputError: the ending says nothing.
    """
    found = _by_ending(path, INPUT_FORMATS)
    if found is None:
        raise InputError(
            f"{path}: ending {path.suffix or 'missing'}, wanted {_wanted(INPUT_FORMATS)}; rename "
            "it, or say what it is with --input-format."
        )
    return found


def import_pyarrow(what: str) -> Any:  # noqa: ANN401 - pyarrow brings no types
    """The module pyarrow; `what` needs it.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise SettingError(
            f"{what}: needs pyarrow, which cannot be imported ({error}); pip install "
            "'npu-embed[batch]'."
        ) from error
    return pyarrow
