"""What a batch reads: rows of every format, and what is wrong with some."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from npu_embed import InputError, SettingError
from npu_embed.batch import delimited, lines, row, sources, spool
from npu_embed.batch.folder import WorkFolder
from npu_embed.batch.formats import import_pyarrow, input_format, output_format
from npu_embed.batch.row import Names, Row
from npu_embed.batch.sources import Source, expand, make_source

Write = Callable[..., list[Row]]


@pytest.fixture
def rows(tmp_path: Path) -> Write:
    """The rows of a file of that name and content."""

    def read(name: str, content: bytes | pa.Table, names: Names | None = None) -> list[Row]:
        path = tmp_path / name
        if isinstance(content, pa.Table):
            write_table(content, path)
        else:
            path.write_bytes(content)
        return list(Source(name, path, input_format(path)).rows(names or Names()))

    return read


def write_table(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


def texts(found: list[Row]) -> list[str]:
    assert not [r.problem for r in found if r.problem]
    return [r.text for r in found]


# --- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", b"one\ntwo\n", ["one", "two"]),
        ("a.txt", b"one\r\ntwo", ["one", "two"]),
        ("a.txt", b"\xef\xbb\xbfone\n\n \n", ["one", "", " "]),
        ("a.txt", "Kantō\u2028x\x0by\n".encode(), ["Kantō\u2028x\x0by"]),
        ("a.txt", b"a\0b\n", ["a\0b"]),
        ("a.txt", b"", []),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": "two\\n"}', ["one", "two\n"]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n', ["one"]),
        ("a.ndjson", b'{"text": ""}\n', [""]),
        ("a.JSONL", b"", []),
        ("a.csv", b"id,text\n1,one\n2,two\n", ["one", "two"]),
        ("a.csv", b'\xef\xbb\xbftext,id\r\n"one\r\ntwo, ""three""",1\r\n', ['one\r\ntwo, "three"']),
        ("a.csv", b"text\n\none\n", ["one"]),
        ("a.csv", b"", []),
        ("a.csv", b"text\n", []),
        ("a.tsv", b'id\ttext\n1\tone, "two"\n', ['one, "two"']),
    ],
)
def test_texts_are_read(rows: Write, name: str, content: bytes, wanted: list[str]) -> None:
    assert texts(rows(name, content)) == wanted


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_tables_are_read(rows: Write, name: str, kind: pa.DataType) -> None:
    table = pa.table({"id": [1, 2, 3], "text": pa.array(["one", "", "three"], kind)})
    found = rows(name, table, Names("text", "id"))
    assert texts(found) == ["one", "", "three"]
    assert [r.where for r in found] == [f"{name}[{i}]" for i in range(3)]
    assert [r.value("id") for r in found] == [1, 2, 3]


def test_an_arrow_file_is_read_in_pieces(rows: Write) -> None:
    table = pa.table({"text": [str(i) for i in range(3000)]})
    found = rows("a.feather", table)
    assert texts(found) == [str(i) for i in range(3000)]
    batches = {id(r.columns.batch) for r in found if isinstance(r.columns, row.InBatch)}
    assert len(batches) == 3


def test_one_huge_line_is_a_text_like_another(rows: Write) -> None:
    huge = "word " * 500_000
    assert texts(rows("a.txt", f"{huge}\nsmall\n".encode())) == [huge, "small"]


# --- rows that cannot be embedded ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "where", "words"),
    [
        ("a.txt", b"ok\ntw\xff\nok\n", "a.txt:2", "byte 3 of the line is 0xff, wanted UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3", "broken JSON (Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n["a"]\n', "a.jsonl:2", "a JSON list, wanted an object"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            "a.jsonl:2",
            "no column 'text', it has body",
        ),
        ("a.jsonl", b'{"text": "a"}\n{}\n', "a.jsonl:2", "no column 'text', it has nothing"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl:1", "text is missing or null"),
        ("a.jsonl", b'{"text": NaN}\n', "a.jsonl:1", "text is float, wanted a string"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1", "text is int, wanted a string"),
        ("a.jsonl", b'{"text": ["a"]}\n', "a.jsonl:1", "text is list, wanted a string"),
        ("a.jsonl", b'{"text": "ok\\ud800bad"}\n', "a.jsonl:1", "lone surrogate U+D800 at char"),
        ("a.jsonl", b'{"text": "a", "b": "\\uD800"}\n', "a.jsonl:1", "lone surrogate in a column"),
        ("a.jsonl", b'{"text": "a\xff"}\n', "a.jsonl:1", "is 0xff, wanted UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1", "JSON that cannot be read"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", "a.jsonl:1", ", wanted a"),
        ("a.csv", b"id,text\n1,a\n2\n", "a.csv:3", "1 fields, wanted 2"),
        ("a.csv", b'id,text\n1,"a\nb"\n2,b,c\n', "a.csv:4", "3 fields, wanted 2"),
        ("a.csv", b"id,text\n1,a\xff\n", "a.csv:2", "byte 0xff in text, wanted UTF-8"),
        ("a.csv", b'id,text\n1,"a"b\n', "a.csv:2", "broken ("),
        ("a.csv", b'id,text\n1,"never closed\n', "a.csv:2", "broken (unexpected end of data)"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_read(
    rows: Write, name: str, content: bytes, where: str, words: str
) -> None:
    bad = [r for r in rows(name, content) if r.problem]
    assert [r.where for r in bad] == [where]
    assert words in bad[0].problem
    assert bad[0].text == ""


def test_good_rows_follow_a_bad_one(rows: Write) -> None:
    found = rows("a.csv", b'text\n"a"b\nc\n')
    assert [r.text for r in found if not r.problem] == ["c"]


def test_a_null_in_a_table_is_a_bad_row(rows: Write) -> None:
    found = rows("a.parquet", pa.table({"text": ["a", None]}))
    assert [r.problem for r in found] == ["", "text is missing or null, wanted a string"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a", "id": null}\n'),
        ("a.jsonl", b'{"text": "a"}\n'),
        ("a.parquet", pa.table({"text": ["a"], "id": pa.array([None], pa.int64())})),
    ],
)
def test_a_row_without_its_id_is_bad(rows: Write, name: str, content: bytes) -> None:
    (found,) = rows(name, content, Names("text", "id"))
    assert found.problem == "id is missing or null, wanted an id"


def test_an_id_of_nanoseconds_is_a_value(rows: Write) -> None:
    stamps = pa.array([1], pa.timestamp("ns"))
    (found,) = rows("a.parquet", pa.table({"text": ["a"], "id": stamps}), Names("text", "id"))
    assert found.problem == ""
    assert found.value("id") == "1970-01-01 00:00:00.000000001"


def test_a_text_that_no_tokenizer_should_hold_is_bad(rows: Write) -> None:
    with mock.patch.object(row, "MAX_TEXT_CHARACTERS", 5):
        found = rows("a.txt", b"12345\n123456\n")
    assert [r.problem for r in found] == ["", "text has 6 characters, wanted at most 5"]


def test_a_line_too_long_is_passed_over_without_holding_it(rows: Write) -> None:
    with mock.patch.object(lines, "MAX_LINE_BYTES", 5):
        found = rows("a.txt", b"12345\n123456\n12345\r\n" + b"x" * 50 + b"\nlast\n")
    assert [(r.where, bool(r.problem)) for r in found] == [
        ("a.txt:1", False),
        ("a.txt:2", True),
        ("a.txt:3", False),
        ("a.txt:4", True),
        ("a.txt:5", False),
    ]
    assert [r.text for r in found if not r.problem] == ["12345", "12345", "last"]


def test_a_record_too_long_is_passed_over_without_holding_it(rows: Write) -> None:
    content = b'text,n\n1234567,8\n12345678,9\n"1\n2\n3\n4\n5",\n' + b"," * 50 + b"\nlast,1\n"
    with mock.patch.object(delimited, "MAX_LINE_BYTES", 10):
        found = rows("a.csv", content)
    assert [r.where for r in found if "over 10 characters" in r.problem] == [
        "a.csv:3",
        "a.csv:4",
        "a.csv:9",
    ]
    assert [r.text for r in found if not r.problem] == ["1234567", "last"]
    assert found[-1].where == "a.csv:10"


def test_a_file_of_many_columns_is_read_at_once(rows: Write) -> None:
    names = [f"c{i}" for i in range(50_000)]  # comparing each with each takes minutes
    content = ",".join(["text", *names]) + "\n" + "x," * 50_000 + "x\n"
    assert texts(rows("a.csv", content.encode())) == ["x"]
    with pytest.raises(InputError, match=r"'text' .*'c19' and 49980 more|'c19' and 49980 more"):
        rows("a.csv", ",".join(names).encode())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_arrow_strings_that_are_not_utf8_are_bad_rows(rows: Write, kind: pa.DataType) -> None:
    offsets = np.array([0, 2, 3, 3], np.int32 if kind == pa.string() else np.int64)
    valid = pa.py_buffer(b"\x03")
    strings = pa.Array.from_buffers(
        kind, 3, [valid, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"\xffaz")]
    )
    found = rows("a.arrow", pa.table({"text": strings}))
    assert [r.text for r in found if not r.problem] == ["z"]
    assert ["lone surrogate" in r.problem for r in found] == [True, False, False]
    assert found[2].problem == "text is missing or null, wanted a string"
    ids = rows("a.arrow", pa.table({"text": ["a"], "id": strings[:1]}), Names("text", "id"))
    assert ids[0].value("id") == b"\xffa"


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("a.jsonl", b'{"text": "a", "image": "%s"}' % (b"x" * 1000), 1000),
        ("a.csv", b"text,image\na,%s\n" % (b"x" * 1000), 1000),
        ("a.parquet", pa.table({"text": ["a"], "image": ["x" * 1000]}), 1000),
    ],
)
def test_the_size_of_a_row_counts_its_other_columns(
    rows: Write, name: str, content: bytes | pa.Table, size: int
) -> None:
    assert size < rows(name, content)[0].size < 2 * size


# --- files that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "names", "words"),
    [
        ("a.txt", "ab".encode("utf-16"), Names(), "a.txt: UTF-16, wanted UTF-8"),
        ("a.txt", b"a", Names("text", "id"), "text lines have no column 'id'"),
        ("a.csv", b"id,body\n1,a\n", Names(), "no column 'text', it has 'id', 'body'"),
        ("a.csv", b"text\na\n", Names("text", "id"), "no column 'id'.*--id-column"),
        ("a.csv", b"text,text\na,b\n", Names(), "column 'text' twice"),
        ("a.csv", b'"text"x\n', Names(), "wanted a line of column names"),
        ("a.parquet", b"", Names(), "a.parquet: cannot be read"),
        ("a.parquet", b"PAR1nonsensePAR1", Names(), "a.parquet: cannot be read"),
        ("a.arrow", b"nonsense", Names(), "a.arrow: cannot be read"),
        ("a.arrow", b"", Names(), "a.arrow: cannot be read"),
        ("a.parquet", pa.table({"body": ["a"]}), Names(), "no column 'text', it has 'body'"),
        ("a.parquet", pa.table({"text": [1]}), Names(), "'text' holds int64, wanted strings"),
        ("a.arrow", pa.table({"text": [b"a"]}), Names(), "'text' holds binary, wanted strings"),
        (
            "a.arrow",
            pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]),
            Names(),
            "column 'text' twice",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    rows: Write, name: str, content: bytes, names: Names, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        rows(name, content, names)


def test_a_cut_parquet_file_is_named(rows: Write, tmp_path: Path) -> None:
    write_table(pa.table({"text": ["a"] * 100}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    with pytest.raises(InputError, match=r"cut.parquet: cannot be read"):
        rows("cut.parquet", whole[:-20])


# --- which files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (input_format, "ending .md, wanted .txt, .jsonl, .ndjson, .csv.*--input-format"),
        (output_format, "ending .md, wanted .jsonl, .*npy or .safetensors"),
    ],
)
def test_an_unknown_ending_lists_the_known(ask: Callable[[Path], str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(Path("a.md"))
    with pytest.raises(InputError, match="ending missing"):
        ask(Path("a"))


def test_globs_are_sorted_and_may_be_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "[x].txt", "sub/c.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")
    out = Path("out.npy")
    assert expand(["*.txt"], out) == ["[x].txt", "a.txt", "b.txt"]
    assert expand(["**/[ac].txt", "[x].txt"], out) == ["a.txt", "sub/c.txt", "[x].txt"]
    assert expand(["b.txt", "-", "b.txt"], out) == ["b.txt", "-", "b.txt"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["none.txt"], "none.txt: no such file"),
        (["*.none"], r"\*.none: no such file"),
        (["-", "-"], "-: twice"),
        (["."], r"\.: a folder, wanted files"),
        (["out.jsonl"], "out.jsonl: is the output too"),
        (["broken"], "broken: a link to nothing"),
        (["/dev/zero"], "/dev/zero: a device, wanted a regular file or a pipe"),
        (["su*"], "no inputs"),
        ([], "no inputs"),
    ],
)
def test_inputs_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out.jsonl").write_text("")
    Path("broken").symlink_to("nowhere")
    Path("sub").mkdir()
    with pytest.raises(InputError, match=words):
        expand(inputs, Path("out.jsonl"))


def test_the_format_may_be_said(tmp_path: Path) -> None:
    assert make_source("-", None, tmp_path).format_name == "txt"
    assert make_source("-", "jsonl", tmp_path).format_name == "jsonl"
    assert make_source("a.md", "txt", None).format_name == "txt"


def test_a_closed_stdin_says_so() -> None:
    with pytest.raises(InputError, match="stdin: closed"):
        sources.open_pipe("-", None)


@pytest.mark.parametrize(
    ("kind", "most", "fails"), [("txt", 9, True), ("csv", 9, True), ("txt", 40, False)]
)
def test_a_pipe_of_lines_that_never_end_is_not_copied_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most: int, fails: bool
) -> None:
    monkeypatch.setattr(spool, "MAX_LINELESS_BYTES", most)
    monkeypatch.setattr(spool, "_BLOCK_BYTES", 4)
    stdin = io.BytesIO(b"abc\nabc\n" + bytes(40))
    with WorkFolder.locked(tmp_path / "out.npy") as work:
        if fails:
            with pytest.raises(InputError, match=r"stdin: \d+ bytes without the end of a line"):
                spool.spooled_sources(["-"], kind, work, stdin)
            assert stdin.read()  # not to its end
            assert not list(work.path.glob("spool*"))
        else:
            (source,) = spool.spooled_sources(["-"], kind, work, stdin)
            assert source.path.read_bytes() == stdin.getvalue()


def test_a_pipe_of_a_table_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_LINELESS_BYTES", 4)
    with WorkFolder.locked(tmp_path / "out.npy") as work:
        (source,) = spool.spooled_sources(["-"], "parquet", work, io.BytesIO(bytes(100)))
        assert source.path.stat().st_size == 100


def test_stdin_stays_open() -> None:
    stdin = io.BytesIO(b"a")
    with sources.open_pipe("-", stdin) as pipe:
        assert pipe.read() == b"a"
    assert not stdin.closed


def test_without_pyarrow_the_extra_is_named() -> None:
    with (
        mock.patch.dict("sys.modules", {"pyarrow": None}),
        pytest.raises(SettingError, match=r"a.parquet: needs pyarrow.*npu-embed\[batch\]"),
    ):
        import_pyarrow("a.parquet")
