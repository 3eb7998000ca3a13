from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_embed import records
from npu_embed.errors import BundleError
from npu_embed.records import (
    MAX_LINE_BYTES,
    MAX_MANIFEST_BYTES,
    Record,
    hex_text,
    make_param,
    make_record,
    parse_int,
    parse_records,
    write_records,
)

WORDS = st.text(
    st.characters(exclude_categories=["Cs"]).filter(lambda c: not c.isspace()), min_size=1
)


def only(text: str | bytes) -> Record:
    (record,) = parse_records(text)
    return record


def test_blank_lines_and_comments_are_skipped_and_lines_counted_from_one() -> None:
    records = parse_records("# made by hand\n\n  \t\ntag a b\n   # more\nother\n")
    assert [(r.tag, r.fields, r.line) for r in records] == [
        ("tag", ("a", "b"), 4),
        ("other", (), 6),
    ]


def test_only_a_newline_ends_a_line_and_a_carriage_return_before_it_is_dropped() -> None:
    records = parse_records(b"a 1\r\nb 2\x0b3\r\n")
    assert [(r.tag, r.fields) for r in records] == [("a", ("1",)), ("b", ("2", "3"))]
    assert records[0].text == "a 1"


def test_key_fields_split_at_the_first_equals_sign_and_the_last_duplicate_wins() -> None:
    record = only("gemm key a=1 b=x=y a=2 c=")
    assert (record.get("a"), record.get("b"), record.get("c")) == ("2", "x=y", "")
    assert record.has("c")
    assert not record.has("key")


def test_rest_keeps_inner_and_trailing_spacing_and_drops_one_leading_space() -> None:
    assert only("param q  task:  x | query: ").rest(1) == " task:  x | query: "
    assert only("param q").rest(1) == ""
    assert only("param").rest(1) == ""


def test_a_list_of_integers_skips_empty_items() -> None:
    assert only("mha 128 kv_words=7,,9,").get_ints("kv_words") == (7, 9)


def test_hex_fields_are_text_and_a_dash_is_the_empty_text() -> None:
    record = only(f"prompt query {hex_text('query: é')} {hex_text('')}")
    assert record.field_hex(1, "HEX") == "query: é"
    assert record.fields[2] == "-"
    assert record.field_hex(2, "HEX") == ""


@pytest.mark.parametrize("text", ["zz", "abc", "ff", "eda080"])
def test_hex_that_is_no_text_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(BundleError, match=r"manifest\.txt:1: prompt HEX is .*UTF-8 text in hex"):
        only(f"prompt {text}").field_hex(0, "HEX")


@pytest.mark.parametrize(
    "text", ["", " 1", "1_0", "+1", "0x1", "1.0", "٣", "nan", "-1", "11", "9" * 5000]
)
def test_only_plain_digits_within_the_bounds_are_an_integer(text: str) -> None:
    with pytest.raises(BundleError, match=r"here: N is .*, wanted an integer 0 to 10; re-export"):
        parse_int(text, "here", "N", minimum=0, maximum=10)


def test_bounds_are_inclusive() -> None:
    assert [parse_int(t, "here", "N", minimum=-1, maximum=10) for t in ("-1", "007", "10")] == [
        -1,
        7,
        10,
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.field(2, "KEY N"), "manifest.txt:1: gemm has 2 fields, wanted KEY N; re-"),
        (lambda r: r.get("ctx"), "manifest.txt:1: gemm has no ctx=, wanted it; re-export"),
        (lambda r: r.get_int("M"), "manifest.txt:1: gemm M is 'x', wanted an integer"),
        (lambda r: r.field_int(0, "KEY"), "manifest.txt:1: gemm KEY is 'qkv', wanted an integer"),
        (lambda r: r.get_ints("M"), "manifest.txt:1: gemm M is 'x', wanted an integer"),
    ],
)
def test_a_wrong_field_is_an_error_with_its_line(
    call: Callable[[Record], object], message: str
) -> None:
    with pytest.raises(BundleError) as info:
        call(only("gemm qkv M=x"))
    assert str(info.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb \xff c\n", r"m:2: byte 3 of the line is 0xff, wanted UTF-8 text"),
        ("a\nb \ud800\n", r"m:2: byte 3 of the line is 0xed, wanted UTF-8 text"),
        (
            b"a\n" + b"x" * (MAX_LINE_BYTES + 1),
            r"m:2: a line of 65537 bytes, wanted at most 65536",
        ),
        (b"\n" * (MAX_MANIFEST_BYTES + 1), r"m: 16777217 bytes or more, wanted at most 16777216"),
    ],
    ids=["not UTF-8", "lone surrogate", "long line", "large file"],
)
def test_content_that_is_no_manifest_is_refused_with_its_place(
    content: str | bytes, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        parse_records(content, "m")


def test_a_line_of_exactly_the_limit_is_read() -> None:
    assert only(b"x" * MAX_LINE_BYTES).tag == "x" * MAX_LINE_BYTES


def test_a_made_record_reads_back_equal() -> None:
    made = make_record("gemm", "qkv", 2, M=64, words=(4, 5), eps=1e-6, paired=True, insts="k/a.bin")
    assert made.text == "gemm qkv 2 M=64 words=4,5 eps=1e-06 paired=1 insts=k/a.bin"
    assert parse_records(write_records([made])) == (made,)


def test_a_made_param_keeps_its_spaces() -> None:
    made = make_param("prompt", " task:  x | query: ")
    (read,) = parse_records(write_records([made]))
    assert read == made
    assert read.rest(1) == " task:  x | query: "


@given(st.lists(st.tuples(WORDS.filter(lambda w: w[0] != "#"), st.lists(WORDS, max_size=4))))
def test_any_fields_survive_writing_and_reading(parts: list[tuple[str, list[str]]]) -> None:
    made = [make_record(tag, *fields) for tag, fields in parts if tag != "param"]
    assert list(parse_records(write_records(made))) == made


@given(st.binary(max_size=200))
def test_what_was_read_can_be_written_and_reads_back_equal(content: bytes) -> None:
    try:
        read = parse_records(content)
        written = write_records(read)
    except BundleError:
        return
    assert parse_records(written) == read


@pytest.mark.parametrize("part", ["", "a b", "a\n", "\t", "a\u2028b", "a\u00a0b"])
def test_a_field_with_white_space_is_refused_when_made(part: str) -> None:
    with pytest.raises(BundleError, match="wanted a field without white space"):
        make_record("xclbin", "gemm", part, "MLIR_AIE")
    with pytest.raises(BundleError, match="wanted a field without white space"):
        make_record("gemm", "qkv", insts=part + " ")


@pytest.mark.parametrize(
    "record",
    [
        make_param("x", ""),
        make_param("x", "  "),
        make_param("x", "two\nlines"),
        make_param("x", "a\rb"),
        make_param("x y\n", "z"),
        make_record("#tag", "a"),
        Record("a", ("b",), text="a c"),
        Record("a", ("b c",)),
        Record("", ()),
    ],
    ids=str,
)
def test_a_record_that_would_not_read_back_is_not_written(record: Record) -> None:
    with pytest.raises(BundleError, match="would not be read back as written"):
        write_records([record])


def test_too_long_or_not_encodable_records_are_not_written() -> None:
    with pytest.raises(BundleError, match="manifest to write:1: a line of"):
        write_records([make_param("x", "y" * MAX_LINE_BYTES)])
    with pytest.raises(BundleError, match="manifest to write:1: byte"):
        write_records([make_param("x", "\udc80")])


def test_more_records_than_a_bundle_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1000
    monkeypatch.setattr(records, "MAX_RECORDS", most)
    assert len(records.parse_records("a\n" * most)) == most
    with pytest.raises(BundleError, match=rf"manifest.txt:{most + 1}: more than {most} records"):
        records.parse_records("a\n" * (most + 1))
