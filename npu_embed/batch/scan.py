"""The first reading of the inputs: how many rows, of which columns, and which cannot be embedded.

It costs little beside the embedding, and whatever is wrong with row 900,000 is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from .columns import (
    EMBEDDING,
    Kinds,
    check_kept,
    check_parquet,
    merged_schema,
    parquet_problems,
)
from .formats import PARQUET, TABLES, WITH_COLUMNS
from .row import InBatch, Names, Row
from .sources import Source, all_rows, content_hash
from .tables import table_schema

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Scan:
    """What the inputs hold. schema: of the columns that a table keeps, None for other outputs.

    states: Source.state of each source, before it was read.
    """

    rows: int
    sha256: str
    schema: pa.Schema | None
    states: tuple[tuple[int, ...], ...]

    def check_unchanged(self, sources: Sequence[Source]) -> None:
        """Check that no source was written since.

        Raises:
            InputError: one was.
        """
        for source, state in zip(sources, self.states, strict=True):
            if source.state() != state:
                raise InputError(
                    f"{source.name}: changed while it was read, wanted it to stay as it was; run "
                    "the command again, with --restart if it is another input now."
                )


def scan(
    sources: Sequence[Source], names: Names, output_format: str, *, stop: bool, id_integers: bool
) -> Scan:
    """What the sources hold.

    stop: a row that cannot be embedded is an error. id_integers: ids must be 64-bit integers.

    Raises:
        InputError: an input that cannot be read or lacks a column, a bad row where stop is true,
            columns that the output cannot hold.
    """
    states = tuple(source.state() for source in sources)
    digest = content_hash(sources)
    kinds = Kinds()
    keeps = output_format in WITH_COLUMNS
    held = _Held()
    count = 0
    lacking = _Lacking()
    for row in all_rows(sources, names):
        count += 1
        if row.problem:
            if stop:
                raise bad_row_error(row.where, row.problem, row.advice)
            lacking.add(row)
            continue
        if output_format == PARQUET and isinstance(row.columns, InBatch):
            held.check(row.where, row.columns)
        if id_integers:
            _check_integer(row, names)
        if keeps and not isinstance(row.columns, InBatch):
            if EMBEDDING in row.columns:
                raise _name_taken(row.where)
            if output_format in TABLES:
                kinds.add(row.columns, row.where)
    lacking.check(count)
    schema = _schema(sources, kinds, names, output_format) if keeps else None
    found = Scan(count, digest, schema, states)
    found.check_unchanged(sources)
    return found


class _Lacking:
    """The rows that have not even the column of texts: all of them is another mistake than some."""

    def __init__(self) -> None:
        self._first: Row | None = None
        self._rows = 0

    def add(self, row: Row) -> None:
        """Count a row that cannot be embedded."""
        if row.advice:
            self._first = self._first or row
            self._rows += 1

    def check(self, rows: int) -> None:
        """Check that one of so many rows has the column.

        Raises:
            InputError: none has.
        """
        first = self._first
        if first is not None and self._rows == rows:
            raise InputError(f"{first.where}: {first.problem}, nor has any row; {first.advice}.")


class _Held:
    """Whether parquet can hold the values of rows, which come a record batch at a time."""

    def __init__(self) -> None:
        self._batch: pa.RecordBatch | None = None
        self._problems: dict[int, str] = {}

    def check(self, where: str, columns: InBatch) -> None:
        """Check a row that has a vector.

        Raises:
            InputError: a value of it cannot be held.
        """
        if columns.batch is not self._batch:
            self._batch, self._problems = columns.batch, parquet_problems(columns.batch)
        if problem := self._problems.get(columns.index):
            raise InputError(f"{where}: {problem}; correct it, or write .arrow or .jsonl.")


def bad_row_error(where: str, problem: str, advice: str = "") -> InputError:
    """The error of a row that cannot be embedded; advice: what helps more often than the rest."""
    first = f"{advice}, " if advice else ""
    return InputError(f"{where}: {problem}; {first}correct it, or pass --on-error skip.")


def _check_integer(row: Row, names: Names) -> None:
    value = row.value(names.id or "")
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InputError(
            f"{row.where}: {names.id} is {value!r}, wanted a 64-bit integer, which is all that "
            "safetensors holds; write .parquet, .arrow or .jsonl."
        )


def _schema(
    sources: Sequence[Source], kinds: Kinds, names: Names, output_format: str
) -> pa.Schema | None:
    """The columns to keep, None where the output is no table."""
    tables = [s for s in sources if s.format_name in TABLES]
    schemas = [(s.name, table_schema(s.path, s.name, s.format_name)) for s in tables]
    for where, found in schemas:
        if EMBEDDING in found.names:
            raise _name_taken(where)
        check_kept(found, where)
    if output_format not in TABLES:
        return None
    if len(tables) < len(sources):
        others = [s.name for s in sources if s.format_name not in TABLES]
        schemas.insert(0, (others[0], kinds.schema()))
    merged = merged_schema(schemas)
    if not merged.names:  # inputs without a row
        merged = merged_schema([("", _empty_schema(names))])
    if output_format == PARQUET:
        check_parquet(merged)
    return merged


def _name_taken(where: str) -> InputError:
    return InputError(
        f"{where}: a column {EMBEDDING!r}, wanted that name for the vectors; rename it."
    )


def _empty_schema(names: Names) -> pa.Schema:
    kinds = Kinds()
    kinds.add({names.text: ""}, "")
    return kinds.schema()
