"""Readers of parquet and Arrow files, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .delimited import check_columns
from .formats import PARQUET, import_pyarrow
from .row import InBatch, Names, Row, bytes_of, make_row

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_ROWS = 1024


@contextmanager
def _readable(name: str, format_name: str) -> Iterator[None]:
    """What pyarrow raises over a damaged file, as an InputError."""
    pa = import_pyarrow(name)
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        said = " ".join(str(error).split())
        raise InputError(
            f"{name}: cannot be read ({said}), wanted a whole {format_name} file; make it again."
        ) from error


def table_schema(path: Path, name: str, format_name: str) -> pa.Schema:
    """The file's columns.

    Raises:
        InputError: it is damaged, or something else.
    """
    with _readable(name, format_name):
        if format_name == PARQUET:
            import pyarrow.parquet as pq

            return _without_views(pq.read_schema(path))
        with path.open("rb") as file:
            return _without_views(_open_ipc(file).schema)


def _without_views(schema: pa.Schema) -> pa.Schema:
    """The schema with views, as polars writes them, as plain strings and bytes.

    pyarrow cannot take single rows of them.
    """
    pa = import_pyarrow("columns")
    if not hasattr(pa, "string_view"):
        return schema
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    for index, field in enumerate(schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if kind in plain:
            schema = schema.set(index, field.with_type(plain[kind]))
    return schema


def read_table(path: Path, name: str, names: Names, format_name: str) -> Iterator[Row]:
    """The rows of a parquet file, an Arrow file, or an Arrow stream.

    Raises:
        InputError: it is damaged, or has no such columns of strings.
    """
    schema = table_schema(path, name, format_name)
    check_columns(schema.names, name, names)
    _check_strings(schema.field(names.text), name)
    index = 0
    for piece in _batches(path, name, format_name):
        batch = _as_schema(piece, schema)
        size = batch.nbytes // max(1, batch.num_rows)
        for at, text in enumerate(_texts(batch.column(names.text))):
            yield make_row(f"{name}[{index}]", InBatch(batch, at), text, names, size)
            index += 1


def _as_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch without views."""
    pa = import_pyarrow("columns")
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _texts(column: pa.Array) -> list[object]:
    """The texts; bytes that are not UTF-8 as lone surrogates, which are a problem of their row."""
    try:
        texts: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        return [
            bytes_of(text).decode("utf-8", "surrogateescape") if text.is_valid else None
            for text in column
        ]
    return texts


def _check_strings(field: pa.Field, name: str) -> None:
    pa = import_pyarrow(name)
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if kind not in (pa.string(), pa.large_string(), pa.null()):
        raise InputError(
            f"{name}: column {field.name!r} holds {field.type}, wanted strings; pass --column NAME."
        )


def _batches(path: Path, name: str, format_name: str) -> Iterator[pa.RecordBatch]:
    with _readable(name, format_name), path.open("rb") as file:
        if format_name == PARQUET:
            import pyarrow.parquet as pq

            # Without pre_buffer, and through a buffer, a row group is never held whole.
            parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
            yield from parquet.iter_batches(batch_size=PIECE_ROWS, use_threads=False)
            return
        reader = _open_ipc(file)
        batches: Any = (
            map(reader.get_batch, range(reader.num_record_batches))
            if hasattr(reader, "get_batch")
            else reader
        )
        for batch in batches:
            for first in range(0, batch.num_rows, PIECE_ROWS):
                yield batch.slice(first, PIECE_ROWS)


def _open_ipc(file: Any) -> Any:  # noqa: ANN401 - pyarrow brings no types
    """A reader of an Arrow file or an Arrow stream."""
    import pyarrow as pa
    import pyarrow.ipc as ipc

    try:
        return ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        return ipc.open_stream(file)
