"""Finished shards -> the output, under its own name only when it is whole."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ..quantization import Int8Ranges, numpy_dtype, width
from .folder import WorkFolder, new_file, sync_folder, writing
from .formats import JSONL, NPY, PARQUET, SAFETENSORS
from .shards import Store, Totals
from .stored import Written, beside, sidecar, skipped_list
from .writers import Layout, write_jsonl, write_npy, write_safetensors

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("npu_embed")

# In the work folder, before they get their names.
_OUTPUT, _SIDECAR, _SKIPPED = "output", "output.meta.json", "output.skipped.jsonl"


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What an output is: its format, its vectors, the job's identity, columns, integer ids."""

    format_name: str
    dim: int
    dtype: str
    ranges: Int8Ranges | None
    identity: Mapping[str, str]
    schema: pa.Schema | None
    ids: bool


def assemble(work: WorkFolder, store: Store, facts: Facts, totals: Totals) -> None:
    """Write the output and what goes beside it into the work folder.

    Raises:
        OutputError: there is no room.
    """
    metadata = _metadata(facts, totals)
    layout = Layout(
        rows=totals.rows,
        width=width(facts.dtype, facts.dim),
        dtype=numpy_dtype(facts.dtype),
        shards=totals.shards,
        metadata=metadata,
        schema=facts.schema,
        ids=facts.ids,
    )
    path = work.path / _OUTPUT
    with writing(path), new_file(path) as file:
        if facts.format_name in (NPY, JSONL):  # what cannot tell by itself whether it is whole
            written = Written(file)
            _writer(facts.format_name)(cast("BinaryIO", written), store, layout)
            metadata |= written.facts()
        else:
            _writer(facts.format_name)(file, store, layout)
        file.flush()
        os.fsync(file.fileno())
    _write_beside(work, store, facts, metadata, totals)


def _writer(format_name: str) -> Callable[[BinaryIO, Store, Layout], None]:
    plain = {NPY: write_npy, SAFETENSORS: write_safetensors, JSONL: write_jsonl}
    if format_name in plain:
        return plain[format_name]
    from . import table_writers

    return table_writers.write_parquet if format_name == PARQUET else table_writers.write_arrow


def _metadata(facts: Facts, totals: Totals) -> dict[str, str]:
    """What the output says of itself: nothing that differs between two runs of one job."""
    counts = {
        "rows": totals.rows,
        "skipped": totals.skipped,
        "tokens": totals.tokens,
        "truncated": totals.truncated,
    }
    metadata = {**facts.identity, **{key: str(count) for key, count in counts.items()}}
    if facts.ranges is not None:
        metadata["int8_ranges"] = json.dumps(facts.ranges.as_array().tolist())
    return metadata


def _write_beside(
    work: WorkFolder, store: Store, facts: Facts, metadata: Mapping[str, str], totals: Totals
) -> None:
    """The sidecar of a format without metadata, and the list of skipped rows if there are any."""
    for name in (_SIDECAR, _SKIPPED):  # of a run that was killed here
        (work.path / name).unlink(missing_ok=True)
    if facts.format_name in (NPY, JSONL):
        path = work.path / _SIDECAR
        with writing(path):
            with new_file(path) as file:
                file.write((json.dumps(metadata, indent=1) + "\n").encode("utf-8"))
    if totals.skipped:
        path = work.path / _SKIPPED
        with writing(path), new_file(path) as file:
            for skipped in store.all_skipped(totals.count):
                fields = {"row": skipped.row, "where": skipped.where, "reason": skipped.reason}
                if skipped.id is not None:
                    fields["id"] = skipped.id
                file.write((json.dumps(fields) + "\n").encode("utf-8"))


def finish(work: WorkFolder, output: Path, output_format: str) -> None:
    """Give the output its name, and what goes beside it; then remove what the job left.

    Killed anywhere in here, the same job still ends as it should: what says that the output is
    complete gets its name last, and the job's note goes last.

    Raises:
        OutputError: a file cannot be renamed.
    """
    places = {_SKIPPED: skipped_list(output), _OUTPUT: output, _SIDECAR: sidecar(output)}
    with writing(output):
        for place in beside(output, output_format):  # of an output that is replaced
            place.unlink(missing_ok=True)
        for name, place in places.items():
            if (work.path / name).is_file():
                (work.path / name).replace(place)
        sync_folder(output.parent)
    work.clear()
