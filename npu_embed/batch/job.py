"""Job: what a batch is to do. Summary: what it did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..quantization import FLOAT32
from .formats import NPY, output_format
from .row import Names
from .shards import SHARD_ROWS

STOP, SKIP = "stop", "skip"


@dataclass(frozen=True, slots=True)
class Job:
    """What is embedded, how, and where to. inputs: paths, globs, `-` for stdin.

    input_format: of all inputs, None to go by their endings. on_error: what becomes of a row that
    cannot be embedded, "stop" or "skip". calibrate: texts, or vectors (.npy), that give the ranges
    of int8. shard_rows: rows that are embedded together, and are lost together. restart: what an
    earlier run left is thrown away. The others are Embedder.embed's.
    """

    inputs: tuple[str, ...]
    output: Path
    column: str = "text"
    id_column: str | None = None
    input_format: str | None = None
    prompt: str | None = None
    dim: int | None = None
    dtype: str = FLOAT32
    truncate: bool = True
    on_error: str = STOP
    calibrate: Path | None = None
    shard_rows: int = SHARD_ROWS
    restart: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without reading anything."""
        if self.on_error not in (STOP, SKIP):
            raise InputError(f"on_error={self.on_error!r}: wanted {STOP!r} or {SKIP!r}.")
        if self.shard_rows < 1:
            raise InputError(f"shard_rows={self.shard_rows}: wanted at least 1.")
        if self.id_column is not None and self.format_name == NPY:
            raise InputError(
                f"{self.output}: npy holds no ids, wanted a format that does; leave --id-column "
                "out, or write .safetensors (integers), .parquet, .arrow or .jsonl."
            )

    @property
    def format_name(self) -> str:
        """What the output is written as."""
        return output_format(self.output)

    @property
    def names(self) -> Names:
        """The columns of the text and of the id."""
        return Names(self.column, self.id_column)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did: rows with a vector and rows skipped, of the whole job.

    computed: input rows that this run embedded; kept: those an earlier run had. tokens and
    truncated are the whole job's.
    """

    output: Path
    rows: int
    skipped: int
    computed: int
    kept: int
    tokens: int
    truncated: int
