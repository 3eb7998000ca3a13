"""The columns beside the text: their types, as tables and as JSON."""

from __future__ import annotations

import json
import math
from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from npu_embed import InputError
from npu_embed.batch import columns
from npu_embed.batch.columns import Kinds, as_json_lines, as_table, json_text, merged_schema
from npu_embed.batch.row import InBatch, Row
from npu_embed.driver import Xrt as Anything


def made(*objects: dict[str, object]) -> tuple[list[Row], pa.Schema]:
    kinds = Kinds()
    for found in objects:
        kinds.add(found, "a.jsonl:1")
    return [Row("", "", found) for found in objects], kinds.schema()


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([True, None, False], pa.bool_(), [True, None, False]),
        ([1, None, -(2**63)], pa.int64(), [1, None, -(2**63)]),
        ([1, 0.5], pa.float64(), [1.0, 0.5]),
        ([2**53, 0.5], pa.float64(), [2.0**53, 0.5]),
        ([2**53 + 1, 0.5], pa.string(), ["9007199254740993", "0.5"]),
        ([2**63, 1], pa.string(), ["9223372036854775808", "1"]),
        ([True, 1], pa.string(), ["true", "1"]),
        (["a", 1, None], pa.string(), ["a", "1", None]),
        ([[1, 2], {"a": "ō"}], pa.string(), ["[1, 2]", '{"a": "ō"}']),
        ([None, None], pa.string(), [None, None]),
    ],
)
def test_json_values_have_an_arrow_type(
    values: list[object], kind: Anything, wanted: list[object]
) -> None:
    rows, schema = made(*({"v": value} for value in values))
    assert schema.field("v").type == kind
    assert as_table(rows, schema).column("v").to_pylist() == wanted


def test_a_missing_key_is_null_and_columns_keep_their_order() -> None:
    rows, schema = made({"b": 1}, {"a": "x", "b": 2})
    assert as_table(rows, schema).to_pylist() == [{"b": 1, "a": None}, {"b": 2, "a": "x"}]


def test_keys_that_are_values_are_refused() -> None:
    kinds = Kinds()
    with pytest.raises(InputError, match=r"a.jsonl:9: 1001 columns so far, wanted at most"):
        kinds.add({f"k{i}": 1 for i in range(1001)}, "a.jsonl:9")


def test_columns_of_several_inputs_are_merged() -> None:
    coded = pa.schema([("text", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int64())])
    merged = merged_schema([("a", coded), ("b", pa.schema([("m", pa.date32())]))])
    assert merged.names == ["text", "n", "m"]
    assert merged.field("text").type == pa.string()


def test_a_column_of_two_types_names_both_inputs() -> None:
    schemas = [("a.parquet", pa.schema([("n", t)])) for t in (pa.int64(), pa.string())]
    with pytest.raises(InputError, match=r"column 'n' holds string, wanted int64 as in a"):
        merged_schema(schemas)


def test_rows_of_a_batch_and_of_json_make_one_table() -> None:
    table = pa.table({"text": ["a", "b", "c"], "at": pa.array([1, None, 3], pa.timestamp("ns"))})
    (batch,) = table.to_batches()
    schema = merged_schema([("", table.schema)])
    rows = [
        Row("", "", InBatch(batch, 2)),
        Row("", "", {"text": "x"}),
        Row("", "", InBatch(batch, 1)),
    ]
    found = as_table(rows, schema)
    assert found.schema == schema
    assert found.column("text").to_pylist() == ["c", "x", "b"]
    assert found.column("at").is_null().to_pylist() == [False, True, True]
    assert as_table([], schema).num_rows == 0


def test_a_batch_as_json_lines() -> None:
    table = pa.table(
        {
            "text": ["Kantō\n"],
            "at": pa.array([1], pa.timestamp("ns")),
            "raw": [b"\xff"],
            "sum": [Decimal("1.50")],
            "nan": [math.nan],
            "some": [[1, None]],
        }
    )
    lines = as_json_lines([Row("", "", InBatch(table.to_batches()[0], 0))])
    assert lines.count(b"\n") == 1
    assert json.loads(lines) == {
        "text": "Kantō\n",
        "at": "1970-01-01 00:00:00.000000001",
        "raw": "/w==",
        "sum": "1.50",
        "nan": None,
        "some": [1, None],
    }


def test_json_has_no_nan() -> None:
    value = {"a": [math.nan, {"b": math.inf}], "c": 1.5, "d": datetime(2020, 1, 2)}
    assert json.loads(json_text(value)) == {
        "a": [None, {"b": None}],
        "c": 1.5,
        "d": "2020-01-02 00:00:00",
    }


def test_rows_of_a_batch_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.table({"text": ["a"] * 100}).to_batches()[0]
    rows = [Row("", "", InBatch(batch, i)) for i in range(100)]
    assert len(list(columns._groups(rows))) == 1
