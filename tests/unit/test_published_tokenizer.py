"""The tokenizer of a published bundle against the tokenizer.json that its tables were made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from gemma_checkpoints import TINY_EG2, edit, linked_copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_embed import BundleError
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.exporters.published_tokenizer import tokenizer_tables
from npu_embed.manifest import Manifest
from npu_embed.published_tokenizer import MERGES, OFFSETS, VOCAB, read_tokenizer
from npu_embed.records import hex_text
from npu_embed.tensors import open_tensors
from npu_embed.tensors_txt import write_tensors_txt

TABLES = tokenizer_tables(open_checkpoint(TINY_EG2))
WANTED = tokenizers.Tokenizer.from_file(str(TINY_EG2 / "tokenizer.json"))
ADDED = "".join(f"added {i} {hex_text(text)}\n" for i, text in TABLES.added)
PARAMS = "version 1\nparam bos 2\nparam eos 1\n"

Arrays = dict[str, NDArray[np.generic]]


def read(
    folder: Path, manifest: str = PARAMS + ADDED, changed: Arrays | None = None
) -> tokenizers.Tokenizer:
    """The tokenizer of these records and of the tables, some changed."""
    arrays: Arrays = {VOCAB: TABLES.vocab, OFFSETS: TABLES.offsets, MERGES: TABLES.merges}
    arrays |= {f"tok.{name}": array for name, array in (changed or {}).items()}
    write_tensors_txt(folder, arrays)
    return read_tokenizer(Manifest.parse(manifest), open_tensors(folder))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    """The tokenizer of the tables."""
    return read(tmp_path_factory.mktemp("tables"))


def tables(pieces: list[str]) -> Arrays:
    """Vocab and offsets of pieces, as read takes them."""
    encoded = [piece.encode() for piece in pieces]
    return {
        "vocab": np.frombuffer(b"".join(encoded), np.uint8),
        "vocab_off": np.cumsum([0, *map(len, encoded)]).astype(np.int32),
    }


def all_pieces() -> list[str]:
    """The pieces by id."""
    data, ends = TABLES.vocab.tobytes(), TABLES.offsets
    return [data[a:b].decode() for a, b in pairwise(ends)]


texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(["<bos>", "<eos>", "<|image|>", "<|image", "<0x41>", " ", "  ", "▁", "\n"]),
        st.sampled_from(["the quick brown fox", "password", "今天", "🐈‍⬛"]),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts)
def test_ids_and_text_are_those_of_the_tokenizer_file(
    found: tokenizers.Tokenizer, text: str
) -> None:
    ids = WANTED.encode(text).ids
    assert found.encode(text).ids == ids
    assert found.decode(ids) == WANTED.decode(ids)


def test_pieces_ids_and_merges_are_those_of_the_file(found: tokenizers.Tokenizer) -> None:
    assert found.get_vocab() == WANTED.get_vocab()
    assert found.num_special_tokens_to_add(False) == 2
    merges = json.loads((TINY_EG2 / "tokenizer.json").read_text())["model"]["merges"]
    assert len(TABLES.merges) == len(merges)


def test_special_tokens_can_be_plain_text(found: tokenizers.Tokenizer) -> None:
    found.encode_special_tokens = True
    try:
        assert len(found.encode("<eos>").ids) > 3
    finally:
        found.encode_special_tokens = False
    assert found.encode("<eos>").ids == [2, 1, 1]


def test_of_a_pair_that_comes_twice_the_first_rank_counts(tmp_path: Path) -> None:
    pieces = [*all_pieces()[:264], "a", "b", "c", "ab", "bc"]
    a, b, c, ab, bc = range(264, 269)
    merges = np.array([[a, b, ab], [b, c, bc], [a, b, ab]], np.int32)
    first = read(tmp_path, changed={"merges": merges, **tables(pieces)})
    assert first.encode("abc").ids == [2, ab, c, 1]


def test_an_added_token_fills_an_id_without_a_piece_or_behind_the_last(tmp_path: Path) -> None:
    pieces = [*all_pieces()[:264], ""]
    more = f"added 5 -\nadded 264 {hex_text('<one>')}\nadded 266 {hex_text('two two')}\n"
    merges = np.zeros((0, 3), np.int32)
    made = read(tmp_path, PARAMS + more, {"merges": merges, **tables(pieces)})
    assert made.encode("<one>two two<one>").ids == [2, 264, 266, 264, 1]


def test_the_longest_added_token_is_taken(tmp_path: Path) -> None:
    pieces = [*all_pieces()[:264], "", ""]
    more = f"added 264 {hex_text('xx')}\nadded 265 {hex_text('xxx')}\n"
    merges = np.zeros((0, 3), np.int32)
    made = read(tmp_path, PARAMS + more, {"merges": merges, **tables(pieces)})
    assert made.encode("xxxxx").ids == [2, 265, 264, 1]


def _merged(row: list[int]) -> Arrays:
    return {"merges": np.array([row], np.int32)}


def _pieces(change: Callable[[list[str]], None]) -> Arrays:
    pieces = all_pieces()
    change(pieces)
    return tables(pieces)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vocab_off": TABLES.offsets[:-1].copy()}, "offsets out of order, wanted 0 to"),
        ({"vocab_off": TABLES.offsets[::-1].copy()}, "offsets out of order"),
        ({"vocab_off": np.zeros(1, np.int32)}, "offsets out of order"),
        ({"vocab": np.full_like(TABLES.vocab, 0xFF)}, "a piece that is not UTF-8"),
        (_pieces(lambda p: p.__setitem__(8, "<0x0>")), "no piece <0x00>, wanted one for each of"),
        (_pieces(lambda p: p.__setitem__(300, p[301])), "twice, wanted each once"),
        (_merged([300, 301, 1400]), "ids 300 to 1400, wanted ids of pieces"),
        (_merged([-1, 301, 302]), "ids -1 to 302"),
        (_merged([300, 301, 8]), "merge 0 of .* to '<0x00>'"),
        ({"merges": np.zeros((3, 2), np.int32)}, r"shape \[3, 2\], wanted \[any, 3\]"),
        ({"merges": np.zeros((3, 3), np.float32)}, "is f32, wanted i32"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(
    tmp_path: Path, changed: Arrays, words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        read(tmp_path, changed=changed)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (PARAMS + "added 8 61\n", "manifest.txt:4: added 8 is 'a', wanted '<0x00>' as tok.vocab"),
        (PARAMS + "added 8 6\n", "wanted UTF-8 text in hex"),
        (PARAMS + "added x 61\n", "added ID HEX is 'x', wanted an integer"),
        (PARAMS + "added 99999999 61\n", "'99999999', wanted an integer 0 to 66936"),
        ("version 1\nparam eos 1\n", "param bos is missing"),
        ("version 1\nparam bos 2\nparam eos 1400\n", "param eos is '1400', wanted an integer"),
    ],
)
def test_records_that_contradict_the_tables_are_refused(
    tmp_path: Path, manifest: str, words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        read(tmp_path, manifest)


def test_added_tokens_far_apart_are_refused_before_room_is_made_for_them(tmp_path: Path) -> None:
    """Each is near enough to the one before, the last of many would be billions away."""
    last = len(all_pieces()) - 1
    more = "".join(f"added {last + 60_000 * n} {hex_text(f'x{n}')}\n" for n in (1, 2))
    with pytest.raises(BundleError, match=f"'{last + 120_000}', wanted an integer 0 to 66936"):
        read(tmp_path, PARAMS + more)


# --- the exporter --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ((), {"normalizer": None}, "normalizer missing, wanted Gemma's"),
        ((), {"normalizer": {"type": "NFC"}}, "normalizer .* wanted Gemma's"),
        ((), {"pre_tokenizer": None}, "pre_tokenizer missing, wanted Gemma's"),
        (("model",), {"byte_fallback": False}, "byte_fallback False, wanted True"),
        (("model",), {"type": "Unigram"}, "type 'Unigram', wanted 'BPE'"),
        (("model",), {"merges": [["a", "qqq"]]}, "merge .*'qqq'.*, wanted two pieces"),
        (("model",), {"merges": ["a b c"]}, "merge 'a b c', wanted two pieces"),
        (("model",), {"merges": [7]}, "merge 7, wanted two pieces"),
        (("model",), {"merges": [[["a"], "b"]]}, r"merge \[\['a'\], 'b'\], wanted two pieces"),
        (("model",), {"merges": [{"a": 1, "b": 2}]}, "merge {'a': 1, 'b': 2}, wanted two pieces"),
        (("model", "vocab"), {"\ud800": 1399}, "id 1399 is .*wanted"),
        (("model", "vocab"), {"\ud800": 1400}, "id 1400 is '.ud800', wanted text that UTF-8"),
        ((), {"added_tokens": [3]}, r"added_tokens \[3\], wanted a list of objects"),
        ((), {"added_tokens": [{"id": 2**40, "content": "a"}]}, "id 1099511627776, wanted an in"),
        (("post_processor",), {"single": [3, 4, 5]}, "one token before a text"),
        (("post_processor",), {"single": [{}, {"Sequence": {}}, {}]}, "one token before a text"),
        (
            ("post_processor",),
            {"single": [{"SpecialToken": 3}, {"Sequence": {}}, {"SpecialToken": {}}]},
            "post_processor: no object SpecialToken",
        ),
        (("post_processor", "special_tokens", "<bos>"), {"ids": [-1]}, "ids .*, wanted one id"),
        (("model", "vocab"), {"a": 3}, "id 3 is '<unk>' and 'a', wanted one"),
        (("model", "vocab"), {"a": "3"}, "vocab has an id that is no index"),
        ((), {"added_tokens": [{"id": 9, "content": "<0x00>"}]}, "id 9 is '<0x01>' and '<0x00>'"),
        ((), {"added_tokens": [{"id": 1, "content": "<eos>", "lstrip": True}]}, "lstrip True"),
        (("post_processor",), {"single": [{"Sequence": {"id": "A"}}]}, "one token before a text"),
        (("post_processor",), {"type": "BertProcessing"}, "one token before a text"),
        (("post_processor", "special_tokens", "<bos>"), {"ids": [2, 2]}, "ids .*, wanted one id"),
    ],
)
def test_a_tokenizer_that_the_layout_cannot_hold_is_refused(
    tmp_path: Path, path: tuple[str, ...], changes: dict[str, object], words: str
) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    edit(folder / "tokenizer.json", *path, **changes)
    with pytest.raises(BundleError, match=words):
        tokenizer_tables(open_checkpoint(folder))
    shutil.rmtree(folder)


def test_merges_spelled_as_one_string_are_the_same(tmp_path: Path) -> None:
    folder = linked_copy(TINY_EG2, tmp_path / "checkpoint")
    file = folder / "tokenizer.json"
    merges = json.loads(file.read_text())["model"]["merges"]
    edit(file, "model", merges=[" ".join(pair) for pair in merges])
    found = tokenizer_tables(open_checkpoint(folder))
    np.testing.assert_array_equal(found.merges, TABLES.merges)
