"""A shard's rows -> its vectors, and the rows that have none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from ..quantization import Int8Ranges, quantize
from .formats import JSONL, TABLES
from .row import Names, Row
from .scan import bad_row_error
from .shards import Content, Record, Shard, Skipped

if TYPE_CHECKING:
    import pyarrow as pa

    from ..bf16 import F32
    from ..embedder import Embedder

_INDEX = re.compile(r"^texts\[\d+\]: ")


@dataclass(frozen=True, slots=True)
class How:
    """How vectors are made of texts: embed's arguments, and what they are stored as."""

    prompt: str | None
    dim: int | None
    truncate: bool
    dtype: str
    ranges: Int8Ranges | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a row beside its vector: integer ids or not, columns for which output."""

    names: Names
    output_format: str
    schema: pa.Schema | None
    ids: bool


def embed_texts(
    embedder: Embedder, texts: Sequence[str], how: How
) -> tuple[F32, dict[int, str], int]:
    """The vectors of the texts that have one; why the others have none, by index; texts cut.

    Raises:
        InputError: an argument that cannot be used.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    try:
        vectors = embedder.embed(texts, how.prompt, how.dim, how.truncate)
        return vectors, {}, embedder.last_stats.truncated
    except InputError:
        problems = _problems(embedder, texts, how)
        if not problems:
            raise
    good = [text for i, text in enumerate(texts) if i not in problems]
    vectors = embedder.embed(good, how.prompt, how.dim, how.truncate)
    return vectors, problems, embedder.last_stats.truncated


def _problems(embedder: Embedder, texts: Sequence[str], how: How) -> dict[int, str]:
    """What is wrong with single texts: too long for --no-truncate, or without a token."""
    found = {}
    for index, text in enumerate(texts):
        try:
            (ids,) = embedder.tokenize([text], how.prompt, how.truncate)
        except InputError as error:
            found[index] = _INDEX.sub("", str(error)).partition(";")[0].rstrip(".")
        else:
            if not ids:
                found[index] = "no tokens, wanted at least one"
    return found


def compute(
    embedder: Embedder, shard: Shard, how: How, kept: Kept, *, stop: bool
) -> tuple[Content, Record]:
    """A shard's content, and what became of its rows.

    Raises:
        InputError: stop is true and a row cannot be embedded; or as embed_texts.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    import numpy as np

    reasons = {i: row.problem for i, row in enumerate(shard.rows) if row.problem}
    candidates = [i for i in range(len(shard.rows)) if i not in reasons]
    texts = [shard.rows[i].text for i in candidates]
    vectors, problems, truncated = embed_texts(embedder, texts, how)
    tokens = embedder.last_stats.tokens
    reasons |= {candidates[i]: problem for i, problem in problems.items()}
    if stop and reasons:
        first = min(reasons)
        raise bad_row_error(shard.rows[first].where, reasons[first])
    good = [i for i in candidates if i not in reasons]
    rows = [shard.rows[i] for i in good]
    name = kept.names.id
    ids = [row.value(name) for row in rows] if kept.ids and name is not None else None
    content = Content(
        quantize(vectors, how.dtype, how.ranges),
        np.array([shard.first + i for i in good], dtype=np.int64),
        None if ids is None else np.array(ids, dtype=np.int64),
        _columns(rows, kept),
    )
    skipped = tuple(
        _skipped(shard.rows[i], shard.first + i, reasons[i], name) for i in sorted(reasons)
    )
    return content, Record(len(good), skipped, tokens, truncated, shard.first)


def _skipped(row: Row, number: int, reason: str, id_column: str | None) -> Skipped:
    return Skipped(number, row.where, row.value(id_column) if id_column else None, reason)


def _columns(rows: Sequence[Row], kept: Kept) -> bytes:
    from .columns import as_json_lines, as_table

    if kept.output_format == JSONL:
        return as_json_lines(rows)
    if kept.output_format in TABLES:
        from .table_writers import table_bytes

        return table_bytes(as_table(rows, kept.schema))
    return b""
