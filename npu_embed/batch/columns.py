"""The columns beside the text: their Arrow types, and rows as Arrow tables or JSON lines."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .formats import import_pyarrow
from .row import InBatch, Row, as_text

if TYPE_CHECKING:
    import pyarrow as pa

EMBEDDING = "embedding"
MAX_COLUMNS = 1000

# What a column's JSON values have been, as bits.
_BOOL, _INT, _LONG, _HUGE, _FLOAT, _STRING, _OTHER = (1 << bit for bit in range(7))
_EXACT_IN_FLOAT64 = 2**53


class Kinds:
    """What the values of each column of JSON or csv rows have been so far."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def add(self, columns: Mapping[str, object], where: str) -> None:
        """Take in a row's columns.

        Raises:
            InputError: there are too many, as where keys are values.
        """
        for name, value in columns.items():
            self._seen[name] = self._seen.get(name, 0) | _kind(value)
        if len(self._seen) > MAX_COLUMNS:
            raise InputError(
                f"{where}: {len(self._seen)} columns so far, wanted at most {MAX_COLUMNS}; write "
                ".jsonl, or keep fewer columns."
            )

    def schema(self) -> pa.Schema:
        """Their Arrow types: what mixes kinds, or is nested, is a string of JSON."""
        pa = import_pyarrow("columns")
        return pa.schema([(name, _arrow_type(kinds)) for name, kinds in self._seen.items()])


def _kind(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return _STRING
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        if abs(value) <= _EXACT_IN_FLOAT64:
            return _INT
        return _LONG if -(2**63) <= value < 2**63 else _HUGE
    return _FLOAT if isinstance(value, float) else _OTHER


def _arrow_type(kinds: int) -> Any:  # noqa: ANN401 - pyarrow brings no types
    pa = import_pyarrow("columns")
    if kinds == _BOOL:
        return pa.bool_()
    if kinds and not kinds & ~(_INT | _LONG):
        return pa.int64()
    if kinds and not kinds & ~(_INT | _FLOAT):
        return pa.float64()
    return pa.string()


def check_kept(schema: pa.Schema, where: str) -> None:
    """Check, before hours of work, that rows of such columns can be taken out of their batches.

    Raises:
        InputError: pyarrow cannot do it for the type of one.
    """
    pa = import_pyarrow("columns")
    for field in schema:
        try:
            pa.nulls(1, field.type).take(pa.array([0], pa.int64()))
        except pa.ArrowNotImplementedError as error:
            raise InputError(
                f"{where}: column {field.name!r} holds {field.type}, which cannot be kept; convert "
                "it, or write .npy or .safetensors."
            ) from error


def check_parquet(schema: pa.Schema) -> None:
    """Check, before hours of work, that a parquet file can have these columns.

    Raises:
        InputError: it cannot.
    """
    pa = import_pyarrow("columns")
    import pyarrow.parquet as pq

    for field in schema:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowNotImplementedError as error:
            raise InputError(
                f"column {field.name!r}: holds {field.type}, which parquet cannot ({error}); write "
                ".arrow or .jsonl."
            ) from error


def parquet_problems(batch: pa.RecordBatch) -> dict[int, str]:
    """What a parquet file cannot hold of a record batch's values, in words, by the row's index.

    Only times in seconds can be too far off: parquet's widest unit of time is the millisecond.
    """
    found: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if "timestamp[s" not in str(column.type) or not _parquet_error(name, column):
            continue
        for index in range(len(column)):
            if error := _parquet_error(name, column.slice(index, 1)):
                found.setdefault(index, f"column {name!r} holds what parquet cannot ({error})")
    return found


def _parquet_error(name: str, column: pa.Array) -> str:
    pa = import_pyarrow("columns")
    import pyarrow.parquet as pq

    try:
        pq.write_table(pa.table({name: column}), pa.BufferOutputStream())
    except pa.ArrowInvalid as error:
        return str(error)
    return ""


def merged_schema(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """The columns of all inputs, by name; each may be null, and none is dictionary-coded.

    schemas: an input's name, and its columns.

    Raises:
        InputError: a column has one type here and another there.
    """
    pa = import_pyarrow("columns")
    fields: dict[str, tuple[str, Any]] = {}
    for where, schema in schemas:
        for field in schema:
            kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            first, known = fields.setdefault(field.name, (where, kind))
            if known != kind:
                raise InputError(
                    f"{where}: column {field.name!r} holds {kind}, wanted {known} as in {first}; "
                    "convert one of them, or write .jsonl."
                )
    return pa.schema([(name, kind) for name, (_, kind) in fields.items()])


def as_table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """The rows' columns, as the schema has them."""
    pa = import_pyarrow("columns")
    tables = []
    for group in _groups(rows):
        if isinstance(group, list):
            arrays = [_from_values([c.get(f.name) for c in group], f.type) for f in schema]
        else:
            arrays = _from_batch(group, schema)
        tables.append(pa.Table.from_arrays(arrays, schema=schema))
    return pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()


def _groups(rows: Sequence[Row]) -> Iterator[list[Mapping[str, object]] | pa.RecordBatch]:
    """The columns of consecutive rows from one place: a list of objects, or a record batch."""
    for _, group in groupby(rows, key=_place):
        some = list(group)
        first = some[0].columns
        if isinstance(first, InBatch):
            pa = import_pyarrow("columns")
            indices = [row.columns.index for row in some if isinstance(row.columns, InBatch)]
            # Taken, never sliced: bytes under a null are then the same in every run.
            yield first.batch.take(pa.array(indices, pa.int64()))
        else:
            yield [row.columns for row in some if not isinstance(row.columns, InBatch)]


def _place(row: Row) -> int | None:
    return id(row.columns.batch) if isinstance(row.columns, InBatch) else None


def _from_values(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    pa = import_pyarrow("columns")
    if kind == pa.string():
        values = [v if v is None or isinstance(v, str) else json_text(v) for v in values]
    elif kind == pa.float64():
        values = [None if v is None else float(v) for v in values]  # type: ignore[arg-type]
    return pa.array(values, kind)


def _from_batch(batch: pa.RecordBatch, schema: pa.Schema) -> list[pa.Array]:
    pa = import_pyarrow("columns")
    names = set(batch.schema.names)
    return [
        batch.column(field.name).cast(field.type)
        if field.name in names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]


def as_json_lines(rows: Sequence[Row]) -> bytes:
    """The rows' columns, a JSON object a line; JSON has no NaN, so that is null."""
    lines: list[str] = []
    for group in _groups(rows):
        if isinstance(group, list):
            lines += [json_text(columns) for columns in group]
        else:
            names = group.schema.names
            values = [_plain_values(*one) for one in zip(names, group.columns, strict=True)]
            for row in zip(*values, strict=True):
                lines.append(json_text(dict(zip(names, row, strict=True))))
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def _plain_values(name: str, column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = as_text(column).to_pylist()
    except ValueError as error:  # nanoseconds within lists and the like
        raise InputError(
            f"column {name!r}: holds {column.type}, which Python cannot ({error}); write .parquet "
            "or .arrow."
        ) from error
    return values


def json_text(value: object) -> str:
    """The value as JSON in one line; bytes in base64, what JSON does not have as a string."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_default)
    except ValueError:
        finite = _finite(value)
        return json.dumps(finite, ensure_ascii=False, allow_nan=False, default=_json_default)


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else str(value)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
