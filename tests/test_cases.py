"""Cases that broke other engines, each a public report told as a situation and the right behaviour.

What one module alone decides is tested with it: dims, prompts and statistics in test_embedder,
files in test_tensors and test_manifest, errnos and waits in test_device, slots in test_npu.
"""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gemma_checkpoints import TINY_GEMMA3
from numpy.typing import NDArray
from references import NEAR_BITS, TINY, UNIT_TOLERANCE
from tokenizers import Tokenizer

from npu_embed import BundleError, Embedder, InputError, InputTypeError
from npu_embed.driver import Xrt as Anything
from npu_embed.tensors import SAFETENSORS

F32 = NDArray[np.float32]

LONG = "energy from sunlight drives photosynthesis in plants. " * 200  # some 2,000 tokens
SPACES = ["", " ", "\n\n\n", "\t", "\u00a0", "\u200b"]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Embedder]:
    """One for all tests: what an earlier one left behind must not matter."""
    with Embedder(tiny_bundle, "emulated") as opened:
        yield opened


def unequal(count: int, seed: int = 0) -> list[str]:
    """Texts of one word to some twenty, no two alike."""
    choose = random.Random(seed)
    words = ("cats", "sofa", "red", "car", "the", "a", "password", "plants", "Kantō")
    return [
        f"{i} " + " ".join(choose.choices(words, k=choose.choice((0, 1, 2, 5, 20))))
        for i in range(count)
    ]


def check_near(found: F32, wanted: F32) -> None:
    """The promise to a text in other company: not the same bits, but within NEAR_BITS."""
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() < NEAR_BITS


# --- vectors ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_text_is_the_same_bits_after_a_long_one_60_times(engine: Embedder) -> None:
    first = engine.embed("short")
    for _ in range(60):
        engine.embed(LONG)
        np.testing.assert_array_equal(engine.embed("short"), first)


@pytest.mark.slow
def test_the_same_call_is_the_same_bits_whatever_ran_between(engine: Embedder) -> None:
    texts = unequal(20)
    first = engine.embed(texts)
    for other in (["a"], [LONG] * 30, unequal(50, seed=1)):
        engine.embed(other)
        np.testing.assert_array_equal(engine.embed(texts), first)


@pytest.mark.slow
def test_unequal_texts_shuffled_come_back_in_their_order(engine: Embedder) -> None:
    texts = unequal(50)
    alone = np.stack([engine.embed(text) for text in texts])
    order = list(range(50))
    random.Random(1).shuffle(order)
    check_near(engine.embed([texts[i] for i in order]), alone[order])
    # They are unlike enough for a swapped pair to be seen.
    apart = np.abs(alone[:, None] - alone[None]).max(axis=2) + np.eye(50)
    assert apart.min() > 2 * NEAR_BITS


@pytest.mark.slow
def test_pack_sizes_from_one_text_to_all_stay_within_the_bound(
    engine: Embedder, tiny_bundle: Path
) -> None:
    texts = unequal(256)
    whole = engine.embed(texts)
    for pack_rows in (128, 700):
        with Embedder(tiny_bundle, "emulated", pack_rows=pack_rows) as small:
            check_near(small.embed(texts), whole)
    check_near(np.stack([engine.embed(text) for text in texts[:40]]), whole[:40])


@pytest.mark.slow
@pytest.mark.parametrize("company", [[LONG], [LONG] * 20, ["b"] * 100, SPACES])
def test_a_word_beside_other_texts_is_as_alone(engine: Embedder, company: list[str]) -> None:
    alone = engine.embed("password")
    for texts in (["password", *company], [*company, "password"]):
        check_near(engine.embed(texts)[texts.index("password")], alone)


def test_a_text_in_each_of_the_buckets_is_the_same(engine: Embedder, tiny_bundle: Path) -> None:
    texts = ["a", "two cats on a sofa"]
    wanted = engine.embed(texts)
    with Embedder(tiny_bundle, "emulated") as other:
        whole = other.bundle.specs
        for skipped in range(1, len(whole.mhas)):
            shorter = {name: buckets[skipped:] for name, buckets in whole.buckets.items()}
            other.bundle.specs = replace(whole, buckets=shorter)
            check_near(other.embed(texts), wanted)
        loads = other.stats.loads
    assert loads == 7 * len(texts) + 4  # each length in each longer bucket, and the four gemms


def test_a_text_in_each_stream_of_a_gemm_is_the_same(tiny_bundle: Path) -> None:
    text = "two cats on a sofa"
    with Embedder(tiny_bundle, "emulated") as other:
        wanted = other.embed(text)
        whole = other.bundle.specs
        for rows in (32, 48, 64, 96, 128):
            longer = {
                key: replace(gemm, streams=tuple(s for s in gemm.streams if s.rows >= rows))
                for key, gemm in whole.gemms.items()
            }
            other.bundle.specs = replace(whole, gemms=longer)
            check_near(other.embed(text), wanted)
        assert other.stats.loads == 1 + 4 * 6  # one bucket, and four gemms in six streams


@pytest.mark.slow
def test_two_threads_of_100_texts_get_each_their_own(engine: Embedder) -> None:
    texts = [[f"thread {t} {text}" for text in unequal(100, seed=t)] for t in range(2)]
    wanted = [engine.embed(mine) for mine in texts]
    found: dict[int, F32] = {}
    start = threading.Barrier(2)

    def work(t: int) -> None:
        start.wait()
        found[t] = np.concatenate([engine.embed(texts[t][i : i + 25]) for i in range(0, 100, 25)])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t in range(2):
        check_near(found[t], wanted[t])


@pytest.mark.parametrize("text", ["word", "5.2", "0", "-1"])
def test_a_word_50_times_is_finite_and_the_same_each_time(engine: Embedder, text: str) -> None:
    first = engine.embed(text)
    assert np.isfinite(first).all()
    for _ in range(49):  # 200 in all
        np.testing.assert_array_equal(engine.embed(text), first)


# --- texts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma3_engine(gemma3_bundle: Path) -> Iterator[Embedder]:
    with Embedder(gemma3_bundle, "emulated") as opened:
        yield opened


@pytest.fixture(scope="module")
def reference_ids() -> Callable[[str], list[int]]:
    """The ids of the tokenizer file itself, cut to the model's 128 as the reference does."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.mark.parametrize("text", SPACES)
def test_a_text_of_nothing_is_its_special_tokens(
    engine: Embedder, reference_ids: Callable[[str], list[int]], text: str
) -> None:
    assert engine.tokenize(text) == [reference_ids(text)] == [reference_ids("")]
    alone = engine.embed(text)
    assert abs(float(np.linalg.norm(alone)) - 1) < UNIT_TOLERANCE
    check_near(engine.embed(["before", text, "after"])[1], alone)


@pytest.mark.parametrize(
    "text",
    [
        "ab\u0000cd",
        "[SEP]",
        "a [CLS] b [SEP] c [PAD] [MASK] [UNK]",
        "<bos> <eos> <pad> <|endoftext|>",
        "caf\u00e9",
        "cafe\u0301",
        "Kantō",
        "🐈‍⬛ 👩🏽‍🚀 🇫🇷 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
        "今天天气很好",
        "مرحبا",
        "x" * 5000,
        LONG,
    ],
)
def test_odd_texts_have_the_tokenizers_ids(
    engine: Embedder, reference_ids: Callable[[str], list[int]], text: str
) -> None:
    assert engine.tokenize(text) == [reference_ids(text)]
    assert np.isfinite(engine.embed(text)).all()


def test_nothing_is_cut_at_a_nul(engine: Embedder) -> None:
    assert engine.tokenize("ab\u0000cd") != engine.tokenize("ab")


@pytest.mark.parametrize("token", ["[SEP]", "[CLS]", "[PAD]", "[MASK]"])
def test_a_typed_special_token_takes_part(engine: Embedder, token: str) -> None:
    found = engine.embed([f"a {token} b", "a b"])
    assert np.abs(found[0] - found[1]).max() > NEAR_BITS


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*SPACES, "a <pad> b", "a <eos> b", "<bos>a", "caf\u00e9", "a\u0000b"]
)
def test_a_tokenizer_that_keeps_spaces_is_followed_too(gemma3_engine: Embedder, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY_GEMMA3 / "tokenizer.json"))
    assert gemma3_engine.tokenize(text) == [tokenizer.encode(text).ids]
    alone = gemma3_engine.embed(text)
    assert np.isfinite(alone).all()
    assert np.abs(alone - gemma3_engine.embed("a b")).max() > NEAR_BITS


@pytest.mark.parametrize("text", ["ok\ud800bad", "\udfff"])
def test_a_lone_surrogate_is_named(engine: Embedder, text: str) -> None:
    at = 2 if text.startswith("ok") else 0
    words = rf"texts\[1\]: lone surrogate U\+{ord(text[at]):04X} at character {at}"
    with pytest.raises(ValueError, match=words):
        engine.embed(["fine", text])
    with pytest.raises(InputError, match=r"texts(\[0\])?: lone surrogate"):
        engine.embed(text)
    with pytest.raises(InputError, match=r"texts: lone surrogate"):
        engine.tokenize(text)


@pytest.mark.parametrize(
    ("words", "tokens", "cut"),
    [(125, 127, False), (126, 128, False), (127, 129, True), (1000, 1002, True)],
)
def test_a_text_is_cut_past_the_limit_special_tokens_included(
    tiny_bundle: Path, words: int, tokens: int, cut: bool
) -> None:
    text = "a " * words
    with Embedder(tiny_bundle, "emulated") as opened:
        found = opened.embed(text)
        np.testing.assert_array_equal(opened.embed([text])[0], found)
        (ids,) = opened.tokenize(text)
        assert ids[-1] == opened.tokenize("")[0][-1]
        assert len(ids) == min(tokens, 128)
        assert opened.stats.tokens == 2 * min(tokens, 128)
        assert opened.stats.truncated == (2 if cut else 0)
        if cut:
            np.testing.assert_array_equal(opened.embed("a " * 126), found)
            for one in (text, [text]):
                with pytest.raises(
                    InputError, match=rf"{tokens} tokens, .* at most 128.*truncate="
                ):
                    opened.embed(one, truncate=False)
        else:
            np.testing.assert_array_equal(opened.embed(text, truncate=False), found)


class GappedSeries:
    """What of a pandas Series matters here: labels that are not 0, 1, 2, ... and no positions."""

    ndim = 1

    def __init__(self, values: list[str]) -> None:
        self._values = dict(zip(range(7, 7 + 3 * len(values), 3), values, strict=True))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: int) -> str:
        return self._values[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.values())


LIST = ["two cats", "a", "a red car"]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(tuple(LIST), id="tuple"),
        pytest.param(np.array(LIST), id="numpy str"),
        pytest.param(np.array(LIST, dtype=object), id="numpy object"),
        pytest.param(np.array([LIST, LIST]).T[:, 0], id="numpy column"),
        pytest.param(GappedSeries(LIST), id="gapped series"),
        pytest.param({i: t for i, t in enumerate(LIST)}.values(), id="dict values"),
    ],
)
def test_an_iterable_of_str_is_as_a_list(engine: Embedder, texts: Anything) -> None:
    np.testing.assert_array_equal(engine.embed(texts), engine.embed(LIST))


def test_a_pandas_column_is_read_by_position(engine: Embedder) -> None:
    pandas = pytest.importorskip("pandas")
    column = pandas.DataFrame({"text": ["left out", *LIST]}, index=[5, 7, 3, 7])["text"][1:]
    np.testing.assert_array_equal(engine.embed(column), engine.embed(LIST))


def test_generators_and_files_are_read_once_in_order(engine: Embedder) -> None:
    wanted = engine.embed(LIST)
    np.testing.assert_array_equal(engine.embed(text for text in LIST), wanted)
    np.testing.assert_array_equal(engine.embed(iter(LIST)), wanted)
    lines = io.StringIO("two cats\na\na red car\n")
    np.testing.assert_array_equal(engine.embed(lines), wanted)
    assert lines.read() == ""


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a", None], r"texts\[1\]: NoneType, wanted str"),
        ([float("nan")], r"texts\[0\]: float, wanted str"),
        ([3], r"texts\[0\]: int, wanted str"),
        (["a", b"x"], r"texts\[1\]: bytes, wanted str"),
        ([["a"]], r"texts\[0\]: list, wanted str"),
        (np.array([1.0]), r"texts\[0\]: float64, wanted str"),
        (b"x", r"texts: bytes, wanted a list of str"),
        ({"a": 1}, r"texts: dict, wanted a list of str"),
        ({"a", "b"}, r"texts: set, which has no order"),
        (frozenset("ab"), r"texts: frozenset, which has no order"),
        (None, r"texts: NoneType, wanted a list of str"),
        (3, r"texts: int, wanted a list of str"),
        (np.array([["a"]]), r"texts: ndarray of 2 dimensions"),
        (np.array("a"), r"texts: ndarray of 0 dimensions"),
        ((t for t in ("a", None)), r"texts\[1\]: NoneType"),
    ],
)
def test_what_is_no_text_is_named_by_index_and_type(
    engine: Embedder, texts: Anything, words: str
) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        engine.embed(texts)
    assert isinstance(caught.value, InputTypeError)


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 7, 8, 1024, -1])
def test_cut_weights_are_refused_with_both_sizes(tiny_copy: Path, size: int) -> None:
    weights = tiny_copy / SAFETENSORS
    content = weights.read_bytes()[:size]
    weights.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{SAFETENSORS}: expected .*, found {len(content)}"):
        Embedder(tiny_copy, "emulated")


# --- exits --------------------------------------------------------------------------------------

OPEN = """
import os, signal, sys, threading, time
from npu_embed import DeviceError, Embedder
engine = Embedder(sys.argv[1], "emulated")
engine.embed("a")
"""
LOOP = """
def work():
    while True:
        engine.embed(["two cats on a sofa"] * 50)
"""
WITHOUT_CLOSE = OPEN + "sys.exit(3)"
BY_AN_ERROR = OPEN + "engine.embed([None])"
THREAD = OPEN + "t = threading.Thread(target=engine.embed, args=('b',)); t.start(); sys.exit(3)"
DAEMON = (
    OPEN
    + LOOP
    + ("threading.Thread(target=work, daemon=True).start(); time.sleep(0.2); sys.exit(3)")
)
FORK = (
    OPEN
    + """
child = os.fork()
if child == 0:
    try:
        engine.embed("a")
    except DeviceError as error:
        assert "fork" in str(error)
        engine.close()
        sys.exit(5)
_, status = os.waitpid(child, 0)
engine.embed("a")
assert engine.stats.swaps == 0
sys.exit(os.waitstatus_to_exitcode(status))
"""
)
FORK_BESIDE_A_THREAD = (
    OPEN
    + LOOP
    + """
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
child = os.fork()
if child == 0:
    with Embedder(sys.argv[1], "emulated") as own:
        own.embed("a")
    sys.exit(6)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
)
BAD_DEVICE = (
    """
import os, sys
os.environ["NPU_EMBED_EMU_FAULTS"] = "timeout@9+"
import logging
logging.disable()
"""
    + OPEN
    + "engine.embed('b')"
)
CTRL_C = OPEN + LOOP + "print('ready', flush=True)\nwork()\n"
CTRL_C_WITH = OPEN + LOOP + "print('ready', flush=True)\nwith engine:\n    work()\n"
MAX_EXIT_SECONDS = 5.0  # generous for a busy machine; a hang takes for ever


def start(program: str, bundle: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(bundle)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        pytest.param(WITHOUT_CLOSE, 3, "", id="without close"),
        pytest.param(BY_AN_ERROR, 1, "InputTypeError: texts[0]: NoneType", id="by an error"),
        pytest.param(THREAD, 3, "", id="while a thread embeds"),
        pytest.param(DAEMON, 3, "", id="while a daemon thread embeds"),
        pytest.param(FORK, 5, "", id="after fork"),
        pytest.param(FORK_BESIDE_A_THREAD, 6, "", id="after a fork while a thread embeds"),
        pytest.param(BAD_DEVICE, 1, "DeviceBad: bundle: failed twice", id="with a bad device"),
    ],
)
def test_a_process_exits_at_once_with_its_code(
    tiny_bundle: Path, program: str, code: int, words: str
) -> None:
    with start(program, tiny_bundle) as process:
        _, stderr = process.communicate(timeout=10 * MAX_EXIT_SECONDS)
    assert process.returncode == code, stderr
    assert words in stderr
    assert bool(stderr) == bool(words)


@pytest.mark.slow
@pytest.mark.parametrize("program", [CTRL_C, CTRL_C_WITH], ids=["bare", "in a with"])
def test_ctrl_c_ends_the_process_at_once(tiny_bundle: Path, program: str) -> None:
    with start(program, tiny_bundle) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10 * MAX_EXIT_SECONDS)
    assert time.monotonic() - begun < MAX_EXIT_SECONDS
    assert process.returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "dropped while its command runs" not in stderr
