"""Shards: the rows that are embedded together, and the file that each becomes when it is done.

Which rows a shard has depends on the input alone, and its vectors depend on its rows alone. So a
run that was broken off and taken up again computes the same bits as an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import new_file, sync_folder, writing
from .row import Row

log = logging.getLogger("npu_embed")

SHARD_ROWS = 1024
SHARD_CHARACTERS = 16 << 20  # long rows make shorter shards, so that memory stays flat

EMBEDDING, ROW, ID, COLUMNS = "embedding", "row", "id", "columns"  # tensors of a shard's file
_RECORD, _DIGEST = "record", "sha256"


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows; first is the number of the first one in the input, from 0."""

    index: int
    first: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was left out: its number in the input, where it stands, its id, and why."""

    row: int
    where: str
    id: object
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a shard. rows: those that have a vector; truncated: texts cut.

    first is the shard's.
    """

    rows: int
    skipped: tuple[Skipped, ...]
    tokens: int
    truncated: int
    first: int = 0

    @property
    def input_rows(self) -> int:
        """How many rows of the input it has."""
        return self.rows + len(self.skipped)

    def is_of(self, shard: Shard) -> bool:
        """Whether it is of the same rows of the input."""
        return self.first == shard.first and self.input_rows == len(shard.rows)


@dataclass(slots=True)
class Totals:
    """The records of all shards so far, added up; shards: the indices of those that have rows."""

    count: int = 0
    rows: int = 0
    skipped: int = 0
    tokens: int = 0
    truncated: int = 0
    shards: list[int] = field(default_factory=list)

    def add(self, index: int, record: Record) -> None:
        """Count a shard."""
        self.count += 1
        self.rows += record.rows
        self.skipped += len(record.skipped)
        self.tokens += record.tokens
        self.truncated += record.truncated
        if record.rows:
            insort(self.shards, index)  # they may come in any order


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A finished shard: vectors [rows, width], the rows' numbers, integer ids, other columns.

    columns: an Arrow stream or JSON lines, as the output wants them; empty where it has none.
    """

    embedding: NDArray[Any]
    row: NDArray[np.int64]
    id: NDArray[np.int64] | None
    columns: bytes


def cut_shards(rows: Iterable[Row], shard_rows: int) -> Iterator[Shard]:
    """The rows in shards of shard_rows, fewer where the rows are long."""
    index, first = 0, 0
    some: list[Row] = []
    characters = 0
    for row in rows:
        some.append(row)
        characters += max(len(row.text), row.size)
        if len(some) == shard_rows or characters >= SHARD_CHARACTERS:
            yield Shard(index, first, some)
            index, first = index + 1, first + len(some)
            some, characters = [], 0
    if some:
        yield Shard(index, first, some)


def _digest(record: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    """What tells that a shard is as it was written: a disk's errors must not become vectors."""
    digest = hashlib.sha256(record.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


class Store:
    """The finished shards in a folder, each in a file that appears whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, index: int) -> Path:
        """Where a shard is."""
        return self._folder / f"shard-{index:08}.safetensors"

    def save(self, index: int, content: Content, record: Record) -> None:
        """Write a shard; once this returns, it outlives the process and the machine's power.

        Raises:
            OutputError: it cannot be written; what was saved before is untouched.
        """
        from safetensors.numpy import save

        tensors = {
            EMBEDDING: np.ascontiguousarray(content.embedding),
            ROW: content.row,
            COLUMNS: np.frombuffer(content.columns, dtype=np.uint8),
        }
        if content.id is not None:
            tensors[ID] = content.id
        text = json.dumps(asdict(record), default=str)
        data = save(tensors, {_RECORD: text, _DIGEST: _digest(text, tensors)})
        temporary = self._folder / "shard.tmp"
        with writing(self.path(index)):
            with new_file(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path(index))
            sync_folder(self._folder)

    def record(self, index: int) -> Record | None:
        """What became of a shard; None where it is not there, or damaged."""
        from safetensors import SafetensorError, safe_open

        path = self.path(index)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata()
                text = metadata[_RECORD]
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if metadata[_DIGEST] != _digest(text, tensors):
                raise ValueError("other bytes than were written")
            fields = json.loads(text)
            fields["skipped"] = tuple(Skipped(**one) for one in fields["skipped"])
            return Record(**fields)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            log.warning("%s: %s; computed again", path, error)
            return None

    def all_skipped(self, count: int) -> Iterator[Skipped]:
        """The rows that the first `count` shards left out, in order."""
        for index in range(count):
            record = self.record(index)
            yield from record.skipped if record is not None else ()

    def tensor(self, index: int, name: str) -> NDArray[Any]:
        """One tensor of a shard's file."""
        from safetensors import safe_open

        with safe_open(self.path(index), framework="numpy") as file:
            found: NDArray[Any] = file.get_tensor(name)
            return found
