"""Writers of finished shards as a parquet or an Arrow file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from ..errors import InputError
from .formats import PARQUET
from .shards import COLUMNS, EMBEDDING, Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .writers import Layout

ROW_GROUP_BYTES = 32 << 20
_PREFIX = "npu_embed."  # of our keys among the schema's metadata


def table_bytes(table: pa.Table) -> bytes:
    """The columns of a shard as an Arrow stream."""
    stream = io.BytesIO()
    with ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def write_parquet(file: BinaryIO, store: Store, layout: Layout) -> None:
    """The columns, and the vectors in `embedding`, in row groups of some ROW_GROUP_BYTES.

    Row groups consist of whole shards, so they do not depend on where a run was broken off.
    """
    schema = _schema(layout)
    # Dictionaries and statistics are of no use where every number differs.
    others = [name for name in schema.names if name != EMBEDDING]
    writer = pq.ParquetWriter(
        file, schema, compression="snappy", use_dictionary=others, write_statistics=others
    )
    with writer:
        for table in _row_groups(store, layout, schema):
            try:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
            except pa.ArrowInvalid as error:  # a time that its widest unit cannot say
                raise InputError(
                    f"a row's columns: {error}, which parquet cannot hold; write .arrow or .jsonl."
                ) from error


def write_arrow(file: BinaryIO, store: Store, layout: Layout) -> None:
    """The columns, and the vectors in `embedding`, a record batch a shard."""
    schema = _schema(layout)
    with ipc.new_file(file, schema) as writer:
        for index in layout.shards:
            writer.write_table(_table(store, index, schema))


def _schema(layout: Layout) -> pa.Schema:
    kind = pa.list_(pa.from_numpy_dtype(layout.dtype), layout.width)
    columns = layout.schema.append(pa.field(EMBEDDING, kind))  # type: ignore[union-attr]
    return columns.with_metadata({_PREFIX + key: text for key, text in layout.metadata.items()})


def _table(store: Store, index: int, schema: pa.Schema) -> pa.Table:
    columns = ipc.open_stream(pa.py_buffer(store.tensor(index, COLUMNS).tobytes())).read_all()
    vectors = _fixed_size_lists(store.tensor(index, EMBEDDING), schema.field(EMBEDDING).type)
    return pa.Table.from_arrays([*columns.columns, vectors], schema=schema)


def _fixed_size_lists(vectors: NDArray[np.generic], kind: pa.DataType) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind)


def _row_groups(store: Store, layout: Layout, schema: pa.Schema) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    for index in layout.shards:
        waiting.append(_table(store, index, schema))
        if sum(table.nbytes for table in waiting) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def table_metadata(path: Path, output_format: str) -> dict[str, str]:
    """Our metadata of a parquet or Arrow file."""
    if output_format == PARQUET:
        found: Any = pq.read_schema(path).metadata
    else:
        with path.open("rb") as file:
            found = ipc.open_file(file).schema.metadata
    texts = {key.decode(): value.decode() for key, value in (found or {}).items()}
    return {k.removeprefix(_PREFIX): v for k, v in texts.items() if k.startswith(_PREFIX)}
