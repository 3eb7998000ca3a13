import base64
import enum
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from npu_embed.errors import BundleError, InputError, InputTypeError
from npu_embed.tensors import open_safetensors
from npu_embed.tokenizer import (
    BATCH_CHARACTERS,
    BATCH_TEXTS,
    Encoded,
    Tokenizer,
    _library_errors,
    as_texts,
    check_text,
    in_batches,
    iter_texts,
)
from npu_embed.tokenizercheck import _checked_growth, check_tokenizer

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "tiny-bert" / "tokenizer.json"
MAX = 128
CLS, SEP = 2, 3


def tokenizer(max_tokens: int = MAX, *, plain_specials: bool = False) -> Tokenizer:
    return Tokenizer.from_file(FILE, max_tokens=max_tokens, plain_specials=plain_specials)


def ids(text: str, **options: bool) -> list[int]:
    (encoded,) = tokenizer(**options).encode_batch([text])
    listed: list[int] = encoded.ids.tolist()
    return listed


@pytest.mark.parametrize("model", ["tiny-bert", "tiny-bert-cls"])
def test_ids_equal_the_references(model: str) -> None:
    lines = (DATA / model / "references.jsonl").read_text("utf-8").splitlines()
    references = open_safetensors(DATA / model / "references.safetensors")
    loaded = Tokenizer.from_file(DATA / model / "tokenizer.json", max_tokens=MAX)
    encoded = loaded.encode_batch(as_texts(json.loads(line)["text"] for line in lines))
    assert len(encoded) == len(lines) == 22
    for index, found in enumerate(encoded):
        name = f"ids.{index}"
        read = references.i32 if references.dtype(name) == "i32" else references.i64
        np.testing.assert_array_equal(found.ids, read(name))
        assert found.ids.dtype == np.int32
    assert [e.tokens for e in encoded if e.truncated] == [234, 326]


@pytest.mark.parametrize(("words", "cut"), [(126, False), (127, True), (1000, True)])
def test_a_text_past_the_limit_is_cut_before_its_last_special_token(words: int, cut: bool) -> None:
    (encoded,) = tokenizer().encode_batch(["a " * words])
    (short,) = tokenizer().encode_batch(["a " * 126])
    assert (encoded.tokens, encoded.truncated) == (words + 2, cut)
    assert len(encoded.ids) == MAX
    assert encoded.ids[0] == CLS
    assert encoded.ids[-1] == SEP
    np.testing.assert_array_equal(encoded.ids, short.ids)


def test_only_the_long_texts_of_a_batch_are_cut() -> None:
    texts = ["a", "b " * 9, "c", "d " * 7, ""]
    whole = tokenizer().encode_batch(texts)
    cut = tokenizer(6).encode_batch(texts)
    assert [e.tokens for e in cut] == [e.tokens for e in whole] == [3, 11, 3, 9, 2]
    assert [e.truncated for e in cut] == [False, True, False, True, False]
    for short, long in zip(cut, whole, strict=True):
        assert short.ids[:-1].tolist() == long.ids[: len(short.ids) - 1].tolist()


def test_a_long_text_is_refused_where_cutting_is_not_wanted() -> None:
    with pytest.raises(InputError) as info:
        tokenizer().encode_batch(["a", "a " * 611], truncate=False, first=11)
    assert str(info.value) == (
        "texts[12]: 613 tokens, this bundle runs at most 128; shorten it or pass truncate=True."
    )
    assert len(tokenizer().encode_batch(["a " * 126], truncate=False)[0].ids) == MAX


def test_a_prompt_is_put_before_every_text() -> None:
    loaded = tokenizer()
    prompted = loaded.encode_batch(["cats", ""], prompt="query: ")
    typed = loaded.encode_batch(["query: cats", "query: "])
    assert [e.ids.tolist() for e in prompted] == [e.ids.tolist() for e in typed]
    assert prompted[0].tokens > loaded.encode_batch(["cats"])[0].tokens


def test_a_prompt_counts_towards_the_limit() -> None:
    assert tokenizer(6).encode_batch(["a b"], prompt="c d e ")[0].tokens == 7


@pytest.mark.parametrize("text", ["", " ", "\n\n\n", "\t", "\u00a0", "\u200b"])
def test_a_text_without_words_is_its_special_tokens(text: str) -> None:
    assert ids(text) == [CLS, SEP]


def test_special_tokens_typed_in_a_text_are_special_unless_plain_is_wanted() -> None:
    assert ids("[SEP]") == [CLS, SEP, SEP]
    plain = ids("[SEP]", plain_specials=True)
    assert plain.count(SEP) == 1
    assert len(plain) > 3
    assert ids("cats", plain_specials=True) == ids("cats")


def test_nothing_is_cut_at_a_nul() -> None:
    reference = tokenizers.Tokenizer.from_file(str(FILE))
    assert ids("ab\0cd") == reference.encode("ab\0cd").ids != ids("ab")


def test_no_texts_are_no_ids() -> None:
    assert tokenizer().encode_batch([]) == []


def test_the_counts_of_the_file_are_known() -> None:
    loaded = tokenizer()
    assert (loaded.max_tokens, loaded.special_tokens, loaded.vocab_size) == (MAX, 2, 1000)


M = BATCH_CHARACTERS


@pytest.mark.parametrize(
    ("lengths", "prompt", "wanted"),
    [
        ([], 0, []),
        ([0], 0, [1]),
        ([1] * (BATCH_TEXTS + 1), 0, [BATCH_TEXTS, 1]),
        ([M], 0, [1]),
        ([M - 1, 1, 1], 0, [2, 1]),
        ([3 * M, 3 * M], 0, [1, 1]),
        ([1, 3 * M, 1, 1], 0, [1, 1, 2]),
        ([1, 1, 1], M // 2 - 1, [2, 1]),
    ],
)
def test_a_batch_is_bounded_by_texts_and_by_characters(
    lengths: list[int], prompt: int, wanted: list[int]
) -> None:
    texts = ["x" * length for length in lengths]
    batches = list(in_batches(texts, prompt))
    assert [len(batch) for batch in batches] == wanted
    assert [text for batch in batches for text in batch] == texts


def test_threads_share_a_tokenizer() -> None:
    loaded, texts = tokenizer(8), [f"text {i} " * (i % 5) for i in range(100)]
    wanted = [e.ids.tolist() for e in loaded.encode_batch(texts)]
    found: list[list[Encoded]] = []
    threads = [
        threading.Thread(target=lambda: found.append(loaded.encode_batch(texts))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[e.ids.tolist() for e in run] for run in found] == [wanted] * 4


def changed(folder: Path, **parts: object) -> Path:
    """A copy of the tokenizer file with some of its parts replaced."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(FILE.read_text("utf-8")), **parts}))
    return path


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        truncation={"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        padding={
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    )
    for text in ("a", "a b c d e f"):
        (encoded,) = Tokenizer.from_file(path, max_tokens=MAX).encode_batch([text])
        assert encoded.ids.tolist() == ids(text)


def test_a_file_that_cuts_at_the_left_still_does(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        truncation={"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Left"},
    )
    (encoded,) = Tokenizer.from_file(path, max_tokens=4).encode_batch(["a b c d"])
    assert encoded.ids.tolist() == ids("c d")


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(single: list[object]) -> dict[str, object]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {}},
        {"version": "9"},
        {"post_processor": template([{"SpecialToken": {"id": "[X]", "type_id": 0}}, TEXT])},
        {"added_tokens": [], "model": {"type": "WordPiece", "vocab": {"b": 1}, "unk_token": "?",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
        {"added_tokens": [], "model": {"type": "WordPiece", "vocab": {"a": 2**32 - 1, "?": 1},
            "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
    ],
    ids=["no model", "version", "unknown special", "no unknown token", "id over int32"],
)  # fmt: skip
def test_a_file_no_text_can_be_read_with_is_refused_when_opened(
    tmp_path: Path, parts: dict[str, object]
) -> None:
    with pytest.raises(BundleError, match=r"^tokenizer\.json: .*wanted a tokenizer; re-export"):
        Tokenizer.from_file(changed(tmp_path, **parts), max_tokens=MAX)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def chain(*steps: Mapping[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "normalizers": list(steps)}


BYTE_LEVEL: dict[str, object] = {"type": "ByteLevel"}


CHINESE: dict[str, object] = {"type": "BertNormalizer", "clean_text": True,
    "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}  # fmt: skip
BYTES: dict[str, object] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
    "use_regex": False}  # fmt: skip
PREFIXED = {**BYTES, "add_prefix_space": True}
METASPACE: dict[str, object] = {"type": "Metaspace", "replacement": "\u2581",
    "prepend_scheme": "always", "split": True}  # fmt: skip
LETTERS: dict[str, object] = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated",
    "invert": False}  # fmt: skip


def before(*steps: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def charsmap(longest: int) -> dict[str, object]:
    """Sentencepiece's table: a trie of a word, and two replacements."""
    table = (4).to_bytes(4, "little") + bytes(4) + b"ab\0" + b"x" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": replace("a", "a" * 257)}, "to 257 characters of one, wanted at most 256"),
        ({"normalizer": replace("aa", "a" * 600)}, "up to 300 characters"),
        ({"normalizer": replace("a*", "b" * 300, "Regex")}, "up to 301 characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 256}}, "up to 257 characters"),
        ({"normalizer": chain(*[replace("a", "aa")] * 40)}, "up to 512 characters"),
        ({"normalizer": chain(*[chain(replace("a", "aa"))] * 40)}, "up to 512 characters"),
        ({"normalizer": chain(*[BYTE_LEVEL] * 40)}, "up to 1024 characters"),
        ({"normalizer": charsmap(257)}, "up to 257 characters"),
        ({"normalizer": chain(*[replace("", "b")] * 40)}, "normalizer makes up to 512 characters"),
        ({"normalizer": chain(*[CHINESE] * 40)}, "up to 729 characters"),
        ({"normalizer": chain(*[{"type": "Lowercase"}] * 40)}, "up to 512 characters"),
        ({"normalizer": chain(*[{"type": "NFKD"}] * 40)}, "up to 324 characters"),
        ({"pre_tokenizer": before(*[BYTES] * 28)}, "pre_tokenizer makes up to 768 characters"),
        ({"pre_tokenizer": before(*[before(PREFIXED)] * 28)}, "up to 375 characters"),
        ({"pre_tokenizer": before(*[METASPACE] * 28)}, "up to 384 characters"),
        (
            {"normalizer": chain(*[replace("a", "aa")] * 6), "pre_tokenizer": before(BYTES, BYTES)},
            "pre_tokenizer makes up to 1024 characters",
        ),
        (
            {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [],
                "byte_fallback": True, "end_of_word_suffix": "s" * 256}},
            "model's end_of_word_suffix makes up to 771 characters",
        ),
        ({"post_processor": template([TEXT, TEXT])}, "the text 2 times, wanted it once"),
        ({"post_processor": template([])}, "the text 0 times, wanted it once"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([TEXT] * 9)]}},
            "the text 9 times",
        ),
        (
            {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [],
                "dropout": 0.5}},
            "model dropout 0.5, wanted none",
        ),
    ],
)  # fmt: skip
def test_what_a_tokenizer_must_not_do_to_a_text(
    tmp_path: Path, parts: dict[str, object], words: str
) -> None:
    with pytest.raises(BundleError, match=rf"^tokenizer\.json: .*{words}.*; re-export"):
        Tokenizer.from_file(changed(tmp_path, **parts), max_tokens=MAX)


def bpe(prefix: str | None, merges: list[object]) -> dict[str, object]:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "##b": 3, "a##b": 4}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges,
        "continuing_subword_prefix": prefix}  # fmt: skip


@pytest.mark.parametrize("merge", ["a b", ["a", "b"]])
def test_merges_the_library_would_cut_beyond_their_end_are_refused(
    tmp_path: Path, merge: object
) -> None:
    """Tokenizers 0.23 ends the process at one of these."""
    path = changed(tmp_path, added_tokens=[], model=bpe("##", [merge]))
    with pytest.raises(BundleError, match=r"merge of 'b', wanted .*continuing_subword_prefix '##'"):
        Tokenizer.from_file(path, max_tokens=MAX)


@pytest.mark.parametrize(("prefix", "second"), [("##", "##b"), ("", "b"), (None, "b")])
def test_merges_of_continuing_pieces_are_let_through(
    tmp_path: Path, prefix: str | None, second: str
) -> None:
    path = changed(tmp_path, added_tokens=[], model=bpe(prefix, [["a", second]]))
    Tokenizer.from_file(path, max_tokens=MAX)


@pytest.mark.parametrize("letter", ["\\u005f", "\\u005F"])
def test_a_prefix_under_an_escaped_key_is_seen(tmp_path: Path, letter: str) -> None:
    path = changed(tmp_path, added_tokens=[], model=bpe("##", ["a b"]))
    written = path.read_text("utf-8")
    assert "continuing_subword" in written
    path.write_text(written.replace("continuing_subword", f"continuing{letter}subword"), "utf-8")
    with pytest.raises(BundleError, match=r"merge of 'b', wanted .*continuing_subword_prefix '##'"):
        Tokenizer.from_file(path, max_tokens=MAX)


def test_more_values_than_any_tokenizer_has_are_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    path = changed(tmp_path, model=["@"])
    path.write_text(path.read_text("utf-8").replace('"@"', "[]," * 2_000_000 + "0"), "utf-8")
    with pytest.raises(BundleError, match=r"^tokenizer\.json: \d+ JSON values, wanted at most"):
        Tokenizer.from_file(path, max_tokens=MAX)


def test_a_key_for_the_second_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(FILE.read_text("utf-8").replace('"model"', '"model": {}, "model"', 1), "utf-8")
    with pytest.raises(BundleError, match="a key for the second time, wanted a tokenizer"):
        Tokenizer.from_file(path, max_tokens=MAX)


@pytest.mark.parametrize(
    "normalizer",
    [
        # ALBERT's and T5's chains, and Llama's.
        chain(replace("``", '"'), {"type": "NFKD"}, {"type": "Lowercase"},
            replace(" {2,}", " ", "Regex")),
        chain({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
        chain({"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
            replace(" {2,}", " ", "Regex"), replace("a", "a" * 18)),
        replace("", "x"),
        BYTE_LEVEL,
        CHINESE,
    ],
)  # fmt: skip
def test_what_published_tokenizers_do_is_let_through(
    tmp_path: Path, normalizer: dict[str, object]
) -> None:
    opened = Tokenizer.from_file(changed(tmp_path, normalizer=normalizer), max_tokens=MAX)
    assert opened.encode_batch(["a"])


def test_a_table_of_short_replacements_is_let_through(tmp_path: Path) -> None:
    normalizer = chain(charsmap(33), replace(" {2,}", " ", "Regex"))
    path = changed(tmp_path, normalizer=normalizer)
    check_tokenizer("tokenizer.json", tokenizers.Tokenizer.from_file(str(path)))


# Each with what the next makes much of, and all of it in pieces of a letter.
NORMALIZERS: list[dict[str, Any]] = [
    replace("", "\u00e9"), replace("", "b", "Regex"), replace("a*", "a", "Regex"),
    replace("l", "\ufdfa"), replace("\u0644", "\ufdfa"), replace("\u0307", "i"),
    replace("i", "\u0130"), replace("a", "\u4eca\uac01"), {"type": "NFKD"}, {"type": "NFC"},
    {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "\u00e9"}, BYTE_LEVEL,
    CHINESE, {**CHINESE, "handle_chinese_chars": False},
]  # fmt: skip
FORMS = {"NFC": 3, "NFKC": 18, "NFKD": 18}
PRE_TOKENIZERS = [BYTES, PREFIXED, METASPACE, {**METASPACE, "replacement": "x"}, LETTERS]


@pytest.mark.parametrize("seed", range(300))
def test_no_text_grows_beyond_what_is_counted(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    steps = draw.choices(NORMALIZERS, k=draw.randint(0, 5))
    normalizer = chain(*steps)
    pre_tokenizer = before(*draw.choices(PRE_TOKENIZERS, k=draw.randint(0, 4)))
    model = {"type": "Unigram", "vocab": [["?", 0.0]], "unk_id": 0}
    path = changed(tmp_path, added_tokens=[], post_processor=None, model=model,
        normalizer=normalizer, pre_tokenizer=pre_tokenizer)  # fmt: skip
    loaded = tokenizers.Tokenizer.from_file(str(path))
    try:
        growth = _checked_growth("tokenizer.json", loaded)
    except BundleError:
        return  # it is not opened
    # The first of Unicode's forms is not counted.
    growth *= next((FORMS[step["type"]] for step in steps if step["type"] in FORMS), 1)
    assert loaded.normalizer is not None
    assert loaded.pre_tokenizer is not None
    for text in ("a", "aaa", "\u00e9", "\u4eca", "\uac01", "\u0130", "\ufdfa", "\U00010000", "al"):
        try:
            with _library_errors("tokenizer.json"):
                normalized = loaded.normalizer.normalize_str(text)
                pieces = loaded.pre_tokenizer.pre_tokenize_str(normalized)
        except BundleError:
            continue  # the library fails at some of these chains
        assert sum(len(piece) for piece, _ in pieces) <= growth * (len(text) + 1)


def added(content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 1000, "content": content, "normalized": True, **flags}


@pytest.mark.parametrize(
    ("times", "content", "words"),
    [
        (40, "a", "normalizer makes up to 512 characters of one"),
        (8, "a" * 65536, "added_tokens may become 16777472 characters, wanted at most 16777216"),
    ],
)
def test_added_tokens_are_not_normalized_before_it_is_known_how_long_they_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, content: str, words: str
) -> None:
    monkeypatch.setattr("npu_embed.tokenizer._load", None)  # the library would, as it reads them
    normalizer = chain(*[replace("a", "aa")] * times)
    path = changed(tmp_path, added_tokens=[added(content)], normalizer=normalizer)
    with pytest.raises(BundleError, match=rf"^tokenizer\.json: {words}.*; re-export"):
        Tokenizer.from_file(path, max_tokens=MAX)


def test_special_tokens_that_cannot_be_told_from_the_text_are_refused(tmp_path: Path) -> None:
    bert = {"type": "BertProcessing", "sep": ["[SEP]", SEP], "cls": ["[CLS]", CLS]}
    twice = {"type": "Sequence", "processors": [bert, bert]}
    opened = Tokenizer.from_file(changed(tmp_path, post_processor=twice), max_tokens=MAX)
    with pytest.raises(BundleError, match=r"json: 2 special tokens around a text, wanted the 4 "):
        opened.encode_batch(["a " * 200])


PEAK = """
import sys
from pathlib import Path
from npu_embed.tokenizer import Tokenizer
for most in (16, 3):
    Tokenizer.from_file(Path(sys.argv[1]), max_tokens=most).encode_batch(["a " * 200_000])
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def test_what_is_cut_off_takes_no_memory_of_its_own() -> None:
    command = [sys.executable, "-c", PEAK, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    at_16_kib, at_3_kib = map(int, done.stdout.split())
    assert at_3_kib - at_16_kib < 50 << 10, "300 MB where an encoding is made of each piece"


def test_texts_are_cut_as_the_library_cuts_them(tmp_path: Path) -> None:
    bert = {"type": "BertProcessing", "sep": ["[SEP]", SEP], "cls": ["[CLS]", CLS]}
    texts = ["", "a", "[SEP] a b [CLS] [SEP]", "a b c d e f g", "[SEP] " * 9]
    for post_processor in (None, bert, template([TEXT])):
        for side in ("right", "left"):
            truncation = {"max_length": 9, "stride": 0, "strategy": "LongestFirst",
                "direction": side.title()}  # fmt: skip
            path = changed(tmp_path, post_processor=post_processor, truncation=truncation)
            reference = tokenizers.Tokenizer.from_file(str(path))
            reference.no_padding()
            for most in range(3, 9):
                reference.enable_truncation(most, direction=side)
                wanted = [one.ids for one in reference.encode_batch(texts)]
                found = Tokenizer.from_file(path, max_tokens=most).encode_batch(texts)
                assert [one.ids.tolist() for one in found] == wanted


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"\0" * 9])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"^tokenizer\.json: .*wanted a tokenizer; re-export"):
        Tokenizer.from_file(path, max_tokens=MAX)


def test_a_missing_file_a_folder_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="absent: No such file or directory, wanted a tokenizer"):
        Tokenizer.from_file(tmp_path / "absent", max_tokens=MAX)
    with pytest.raises(BundleError, match="bytes or no regular file, wanted a file of at most"):
        Tokenizer.from_file(tmp_path, max_tokens=MAX)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="1099511627776 bytes or no regular file"):
        Tokenizer.from_file(tmp_path / "huge", max_tokens=MAX)


@pytest.mark.parametrize("max_tokens", [-1, 0, 1, 2])
def test_a_limit_without_room_for_a_token_is_refused(max_tokens: int) -> None:
    with pytest.raises(
        BundleError, match=f"a limit of {max_tokens} tokens, wanted more than the 2"
    ):
        tokenizer(max_tokens)
    assert tokenizer(3).encode_batch(["a b"])[0].ids.tolist() == ids("a")


class Column:
    """As a pandas Series: iterates over its values, while its index has gaps."""

    ndim = 1

    def __init__(self, values: dict[int, str]) -> None:
        self._values = values

    def __getitem__(self, label: int) -> str:
        return self._values[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.values())


class Animal(str, enum.Enum):
    CAT = "a"


@pytest.mark.parametrize(
    "texts",
    [
        ["a", "b"],
        ("a", "b"),
        iter(["a", "b"]),
        (text for text in "ab"),
        {"x": "a", "y": "b"}.values(),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        [np.str_("a"), "b"],
        [Animal.CAT, "b"],
        Column({3: "a", 17: "b"}),
    ],
    ids=lambda texts: type(texts).__name__,
)
def test_any_iterable_of_str_is_taken_by_position(texts: list[str]) -> None:
    taken = as_texts(texts)
    assert taken == ["a", "b"]
    assert [type(text) for text in taken] == [str, str]


def test_an_open_file_is_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a\n\nb\n")
    with path.open() as file:
        assert as_texts(file) == ["a\n", "\n", "b\n"]
    with path.open("rb") as raw, pytest.raises(InputTypeError, match=r"texts\[0\]: bytes, wanted"):
        as_texts(raw)  # type: ignore[arg-type]


def test_texts_are_consumed_as_they_are_asked_for() -> None:
    asked = []

    def source() -> Iterator[str]:
        for text in ("a", "b", "c"):
            asked.append(text)
            yield text

    taken = iter_texts(source())
    assert asked == []
    assert next(taken) == "a"
    assert asked == ["a"]


def test_nul_and_any_other_character_are_kept() -> None:
    texts = ["ab\0cd", "caf\u00e9", "cafe\u0301", "\U0001f408\u200d\u2b1b", "\ufffe"]
    assert as_texts(texts) == texts


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("text", "texts: str, wanted a list of str"),
        (np.str_("text"), "texts: str_, wanted a list of str"),
        (b"x", "texts: bytes, wanted a list of str"),
        (bytearray(b"x"), "texts: bytearray, wanted a list of str"),
        (memoryview(b"x"), "texts: memoryview, wanted a list of str"),
        ({"a": 1}, "texts: dict, wanted a list of str"),
        ({"a", "b"}, "texts: set, which has no order, wanted a list of str"),
        (frozenset("a"), "texts: frozenset, which has no order, wanted a list of str"),
        (None, "texts: NoneType, wanted a list of str"),
        (3, "texts: int, wanted a list of str"),
        (np.array("text"), "texts: ndarray of 0 dimensions, wanted 1"),
        (np.array([["a"], ["b"]]), "texts: ndarray of 2 dimensions, wanted 1"),
        (["a", None], "texts[1]: NoneType, wanted str"),
        ([float("nan")], "texts[0]: float, wanted str"),
        ([3], "texts[0]: int, wanted str"),
        ([b"x"], "texts[0]: bytes, wanted str"),
        ([["a"]], "texts[0]: list, wanted str"),
        (np.array([1.0]), "texts[0]: float64, wanted str"),
        (np.array([b"a"]), "texts[0]: bytes_, wanted str"),
        (np.array(["a", None], dtype=object), "texts[1]: NoneType, wanted str"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_list_of_texts_is_a_type_error(texts: list[str], message: str) -> None:
    with pytest.raises(InputTypeError) as info:
        as_texts(texts)
    assert str(info.value).startswith(message)
    assert isinstance(info.value, TypeError)
    assert isinstance(info.value, ValueError)


def test_a_wrong_container_is_refused_before_anything_is_consumed() -> None:
    for texts in ("text", {"a"}):
        with pytest.raises(InputTypeError, match="wanted a list of str"):
            iter_texts(texts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: as_texts(["a", "ok\ud800bad"]), "texts[1]: lone surrogate U+D800 at character 2,"),
        (lambda: as_texts(["\udc80"]), "texts[0]: lone surrogate U+DC80 at character 0,"),
        (lambda: check_text("ab\udfff", "prompt"), "prompt: lone surrogate U+DFFF at character 2,"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError) as info:
        call()
    assert str(info.value).startswith(message)
    assert not isinstance(info.value, TypeError)
