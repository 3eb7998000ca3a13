"""A row of the input: its text, where it stands, and the columns beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InputError
from ..tokenizer import check_text
from .formats import import_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

# The tokenizer holds some 600 bytes a token, and cannot read a text in parts.
MAX_TEXT_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class InBatch:
    """A row of an Arrow record batch: its columns stay there until they are written."""

    batch: pa.RecordBatch
    index: int


Columns: TypeAlias = Mapping[str, object] | InBatch


@dataclass(frozen=True, slots=True)
class Row:
    """A row; where is its file and line. problem says why it cannot be embedded, "" if it can.

    A row that has a problem may have no columns. advice: what to do about it, where that is not
    only to correct it. size: about how many bytes all of it holds.
    """

    where: str
    text: str
    columns: Columns
    problem: str = ""
    size: int = 0
    advice: str = ""

    def value(self, column: str) -> object:
        """What stands in one of its columns, None where nothing does."""
        if isinstance(self.columns, InBatch):
            batch = self.columns.batch
            if column not in batch.schema.names:
                return None
            scalar: Any = batch.column(column)[self.columns.index]
            try:
                return as_text(scalar).as_py()
            except UnicodeDecodeError:
                return bytes_of(scalar)
        return self.columns.get(column)


def as_text(values: Any) -> Any:  # noqa: ANN401 - pyarrow brings no types
    """Arrow values with times as strings: Python's have no nanoseconds."""
    types = import_pyarrow("columns").types
    times = types.is_temporal(values.type) and not types.is_interval(values.type)
    return values.cast("string") if times else values


def bytes_of(scalar: Any) -> bytes:  # noqa: ANN401 - pyarrow brings no types
    """The bytes of an Arrow string that is not UTF-8."""
    plain = scalar.value if hasattr(scalar, "dictionary") else scalar
    found: bytes = plain.as_buffer().to_pybytes()
    return found


@dataclass(frozen=True, slots=True)
class Names:
    """Which columns are the text and the id; id is None where there are no ids."""

    text: str = "text"
    id: str | None = None


def make_row(where: str, columns: Columns, text: object, names: Names, size: int) -> Row:
    """A row as a reader found it, with the problem it has."""
    problem = _text_problem(text, names.text)
    row = Row(where, text if isinstance(text, str) and not problem else "", columns, problem, size)
    if not problem and names.id is not None and row.value(names.id) is None:
        return Row(where, "", columns, f"{names.id} is missing or null, wanted an id", size)
    return row


def bad_row(where: str, problem: str, advice: str = "") -> Row:
    """A row that could not be read."""
    return Row(where, "", {}, problem, advice=advice)


def _text_problem(text: object, column: str) -> str:
    if text is None:
        return f"{column} is missing or null, wanted a string"
    if not isinstance(text, str):
        return f"{column} is {type(text).__name__}, wanted a string"
    if len(text) > MAX_TEXT_CHARACTERS:
        return f"{column} has {len(text)} characters, wanted at most {MAX_TEXT_CHARACTERS}"
    try:
        check_text(text, column)
    except InputError as error:
        return str(error).rstrip(".")
    return ""
