"""Embedder: arguments, order, statistics, threads, lifetime."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from references import NEAR_BITS, UNIT_TOLERANCE, cosines

from npu_embed import Embedder, embedder, models, tokenizer
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import (
    BundleError,
    DeviceBad,
    DeviceError,
    InputError,
    InputTypeError,
    RunFailed,
    SettingError,
)
from npu_embed.kernels import Kernel
from npu_embed.models.bert import Bert
from npu_embed.runlists import RunList
from npu_embed.tokenizer import Tokenizer
from npu_embed.trace import Timing

TEXTS = ["two cats on a sofa", "a", "a red car", "", "cats " * 30]


@pytest.fixture
def opened(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as made:
        yield made


# --- results ------------------------------------------------------------------------------------


def test_a_list_gives_a_matrix_and_a_str_a_vector(opened: Embedder) -> None:
    matrix = opened.embed(TEXTS)
    vector = opened.embed(TEXTS[0])
    assert matrix.shape == (5, 64)
    assert vector.shape == (64,)
    assert matrix.dtype == vector.dtype == np.float32
    np.testing.assert_array_equal(opened.embed([TEXTS[0]])[0], vector)


def test_no_texts_give_an_empty_matrix(opened: Embedder) -> None:
    empty = opened.embed([])
    assert empty.shape == (0, 64)
    assert empty.dtype == np.float32
    assert opened.embed([], dim=10).shape == (0, 10)
    assert opened.tokenize([]) == []


def test_the_result_is_the_callers_own(opened: Embedder) -> None:
    first = opened.embed(TEXTS)
    kept = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(opened.embed(TEXTS), kept)


def test_facts_are_the_bundles(opened: Embedder, tiny_bundle: Path) -> None:
    assert (opened.dim, opened.max_tokens, opened.device) == (64, 128, "emulated")
    assert opened.bundle.path == tiny_bundle


@pytest.mark.parametrize("dim", [1, 10, 63, 64, np.int64(10)])
def test_a_cut_vector_is_the_first_numbers_at_unit_length(opened: Embedder, dim: int) -> None:
    whole, cut = opened.embed(TEXTS), opened.embed(TEXTS, dim=dim)
    assert cut.shape == (5, dim)
    assert np.abs(np.linalg.norm(cut, axis=1) - 1).max() < UNIT_TOLERANCE
    assert cosines(cut, whole[:, :dim]).min() > 1 - UNIT_TOLERANCE


@pytest.mark.parametrize("dim", [0, -1, 65, 10**30])
def test_a_dim_the_vector_does_not_have_is_refused(opened: Embedder, dim: int) -> None:
    with pytest.raises(InputError, match=rf"dim={dim}: wanted 1 to 64"):
        opened.embed(TEXTS, dim=dim)


@pytest.mark.parametrize("dim", ["10", True, np.True_, 10.0, [10]])
def test_a_dim_that_is_no_integer_is_refused(opened: Embedder, dim: Anything) -> None:
    with pytest.raises(InputTypeError, match=r"dim=.*wanted an integer from 1 to 64"):
        opened.embed(TEXTS, dim=dim)


@pytest.mark.parametrize("truncate", [None, 1, "yes"])
def test_truncate_is_a_bool(opened: Embedder, truncate: Anything) -> None:
    with pytest.raises(InputTypeError, match=r"truncate=.*wanted True or False"):
        opened.embed(TEXTS, truncate=truncate)


def test_small_packs_change_at_most_the_last_bits(tiny_bundle: Path, opened: Embedder) -> None:
    texts = TEXTS * 4
    whole = opened.embed(texts)
    with Embedder(tiny_bundle, "emulated", pack_rows=128) as small:
        found = small.embed(texts)
        assert small.stats.packs > 1
    assert opened.stats.packs == 1
    assert np.abs(found - whole).max() < NEAR_BITS


@pytest.mark.parametrize(
    ("pack_rows", "kind"),
    [
        (127, InputError),
        (2049, InputError),
        (0, InputError),
        (True, InputTypeError),
        ("128", InputTypeError),
        (128.0, InputTypeError),
    ],
)
def test_pack_rows_hold_the_longest_text_and_fit_the_bundle(
    tiny_bundle: Path, pack_rows: Anything, kind: type[InputError]
) -> None:
    with pytest.raises(kind, match=r"pack_rows="):
        Embedder(tiny_bundle, "emulated", pack_rows=pack_rows)


# --- prompts and tokens -------------------------------------------------------------------------


@pytest.fixture
def prompted(tiny_copy: Path) -> Iterator[Embedder]:
    manifest = tiny_copy / "manifest.txt"
    prompts = "".join(
        f"prompt {name} {text.encode().hex()}\n"
        for name, text in (("query", "query: "), ("document", "passage: "))
    )
    manifest.write_text(manifest.read_text().replace("version 1\n", "version 1\n" + prompts))
    with Embedder(tiny_copy, "emulated") as made:
        yield made


def test_a_prompt_by_name_is_its_text_typed_before(prompted: Embedder) -> None:
    query, document = (prompted.embed(TEXTS, prompt=p) for p in ("query", "document"))
    np.testing.assert_array_equal(query, prompted.embed(["query: " + t for t in TEXTS]))
    np.testing.assert_array_equal(document, prompted.embed(["passage: " + t for t in TEXTS]))
    assert np.abs(query - document).max() > 0.01
    assert prompted.tokenize("cats", prompt="query") == prompted.tokenize(["query: cats"])


def test_an_unknown_prompt_lists_the_known_ones(prompted: Embedder) -> None:
    for call in (prompted.embed, prompted.tokenize):
        with pytest.raises(InputError, match=r"prompt='q': .* has: document, query"):
            call(TEXTS, prompt="q")


def test_the_default_prompt_goes_before_every_text(tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    text = manifest.read_text().replace(
        "param stages", f"param default_prompt q\nprompt q {b'query: '.hex()}\nparam stages"
    )
    manifest.write_text(text)
    with Embedder(tiny_copy, "emulated") as made:
        assert made.tokenize("cats") == made.tokenize(["cats"], prompt="q")
        assert len(made.tokenize("cats")[0]) > len(made.tokenize("")[0])
        np.testing.assert_array_equal(made.embed("cats"), made.embed("cats", prompt="q"))


def test_tokens_are_plain_ints_with_special_ones(opened: Embedder) -> None:
    (ids,) = opened.tokenize("two cats")
    assert all(type(i) is int for i in ids)
    assert opened.tokenize([""]) == [[ids[0], ids[-1]]]
    assert opened.stats.texts == opened.stats.truncated == 0


def test_typed_special_tokens_can_be_plain_text(tiny_bundle: Path, opened: Embedder) -> None:
    special = opened.tokenize("a [SEP] b")[0]
    with Embedder(tiny_bundle, "emulated", plain_specials=True) as plain:
        typed = plain.tokenize("a [SEP] b")[0]
    assert special.count(special[-1]) == 2
    assert typed.count(special[-1]) == 1


# --- truncation ---------------------------------------------------------------------------------


def test_cut_texts_are_counted_and_said_once(
    opened: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    long = "word " * 300
    opened.embed(["short", long, long])
    opened.embed(long)
    assert opened.stats.truncated == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("2 texts longer than 128 tokens were cut (the longest, ")
    assert "word" not in record.getMessage()


def test_without_truncate_a_long_text_is_an_error_with_limit_count_and_flag(
    opened: Embedder,
) -> None:
    tokens = len(opened.tokenize("word " * 10)[0]) - 2
    long = "word " * 130
    wanted = rf"texts\[1\]: {13 * tokens + 2} tokens, this bundle runs at most 128; .*truncate=True"
    with pytest.raises(InputError, match=wanted):
        opened.embed(["short", long], truncate=False)
    with pytest.raises(InputError, match=r"texts\[0\]"):
        opened.embed(long, truncate=False)
    assert opened.stats.texts == opened.stats.truncated == 0


def test_an_index_is_that_of_the_callers_list_in_any_batch_of_the_tokenizer(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "BATCH_TEXTS", 2)
    assert opened.tokenize(TEXTS) == [ids for text in TEXTS for ids in opened.tokenize(text)]
    with pytest.raises(InputError, match=r"texts\[5\]: "):
        opened.embed([*TEXTS, "word " * 300], truncate=False)


# --- statistics ---------------------------------------------------------------------------------


def test_stats_count_texts_tokens_packs_and_runs(opened: Embedder) -> None:
    before = opened.stats
    assert (before.texts, before.runs, before.packs) == (0, 0, 0)
    opened.embed(TEXTS)
    stats = opened.stats
    tokens = sum(len(ids) for ids in opened.tokenize(TEXTS))
    assert (stats.texts, stats.tokens, stats.packs) == (5, tokens, 1)
    assert stats.runs == 3 * (4 + len(TEXTS))  # layers x (gemms + texts)
    assert stats.switches == 2 * 3
    assert stats.bytes_to_device > before.bytes_to_device
    assert stats.bytes_from_device > 0
    assert set(stats.seconds) >= {
        "open",
        "tokenize",
        "embeddings",
        "gemm",
        "mha",
        "host",
        "pooling",
    }
    assert all(seconds >= 0 for seconds in stats.seconds.values())


def test_stats_are_a_snapshot_that_json_and_pickle_take(opened: Embedder) -> None:
    before = opened.stats
    flat = before.as_dict()
    opened.embed(TEXTS)
    assert before.as_dict() == flat
    assert json.loads(json.dumps(flat)) == flat
    assert pickle.loads(pickle.dumps(before)) == before == copy.deepcopy(before)
    with pytest.raises(AttributeError, match=r"Stats has no 'speed'"):
        before.speed  # noqa: B018


# --- failures -----------------------------------------------------------------------------------


def test_a_vector_that_is_not_finite_is_an_error_that_names_the_text(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = opened.embed(TEXTS)
    forward = models.forward_together

    def poisoned(model: Anything, packs: Anything, timing: Timing) -> list[NDArray[np.float32]]:
        vectors = forward(model, packs, timing)
        vectors[0][packs[0][1].indices.index(2)] = np.nan
        return vectors

    with monkeypatch.context() as patch:
        patch.setattr(models, "forward_together", poisoned)
        with pytest.raises(DeviceError, match=r"texts\[2\]: its vector is not finite"):
            opened.embed(TEXTS)
    np.testing.assert_array_equal(opened.embed(TEXTS), wanted)


@pytest.mark.parametrize("error", [RunFailed("k: made to fail"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("kind", "method"),
    [(Kernel, "start"), (Kernel, "patch"), (RunList, "start"), (RunList, "_finish")],
)
def test_after_two_failures_in_mid_pack_a_later_call_is_right(
    opened: Embedder,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    error: BaseException,
) -> None:
    wanted = opened.embed(TEXTS)
    real = getattr(kind, method)
    for nth in (0, 4):
        left = nth

        def sometimes(self: object, *args: Anything) -> Anything:
            nonlocal left
            left -= 1
            if left < 0 and method != "_finish":
                raise error
            done = real(self, *args)
            if left < 0:
                raise error
            return done

        opened.release()
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, sometimes)
            bad = isinstance(error, RunFailed)
            with pytest.raises(
                DeviceBad if bad else type(error), match="made to fail" if bad else None
            ):
                opened.embed(TEXTS)
        if bad:
            opened.release()
        np.testing.assert_array_equal(opened.embed(TEXTS), wanted)


def test_a_bad_text_costs_nothing_but_its_own_call(opened: Embedder) -> None:
    with pytest.raises(InputTypeError, match=r"texts\[1\]: NoneType"):
        opened.embed(["a", None])  # type: ignore[list-item]
    assert opened.stats.texts == 0
    assert opened.embed("a").shape == (64,)


# --- lifetime -----------------------------------------------------------------------------------


def test_close_frees_the_slots_and_may_be_called_twice(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    one = Embedder(tiny_bundle, "emulated")
    wanted = one.embed(TEXTS)
    one.close()
    one.close()
    with Embedder(tiny_bundle, "emulated") as other:
        np.testing.assert_array_equal(other.embed(TEXTS), wanted)


def test_a_closed_embedder_says_so(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, "emulated") as made:
        made.embed("a")
    assert made.stats.texts == 1
    for call in (made.embed, made.tokenize):
        with pytest.raises(InputError, match=r"this Embedder is closed"):
            call(TEXTS)


def test_another_process_is_told_to_open_its_own(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened._turns, "_pid", opened._turns._pid - 1)
    for call in (lambda: opened.embed(TEXTS), opened.release):
        with pytest.raises(DeviceError, match=r"does not survive a fork"):
            call()


def test_a_forked_process_does_not_wait_for_a_thread_it_does_not_have(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []

    def child() -> None:
        ended.append(opened.stats.texts)
        with pytest.raises(DeviceError, match=r"does not survive a fork"):
            opened.release()
        opened.close()
        ended.append("closed")

    with opened._turns.take():  # as a thread of the parent may have it at the fork
        monkeypatch.setattr(opened._turns, "_pid", opened._turns._pid - 1)
        thread = threading.Thread(target=child, daemon=True)
        thread.start()
        thread.join(timeout=5)
    assert ended == [0, "closed"]


def test_a_signal_handler_reads_stats_and_is_refused_anything_else(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = opened.embed(TEXTS)
    found: list[object] = []

    def handler(*_: object) -> None:
        found.append(opened.stats.packs)
        for call in (lambda: opened.embed("a"), opened.release, opened.close):
            try:
                call()
            except InputError as error:
                found.append(str(error).partition(",")[0])

    start = Kernel.start

    def interrupted(*args: Anything, **kwargs: Anything) -> Anything:
        if not found:
            signal.raise_signal(signal.SIGUSR1)
        return start(*args, **kwargs)

    before = signal.signal(signal.SIGUSR1, handler)
    # A thread that hangs would hang the tests: an alarm ends them.
    alarm = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        monkeypatch.setattr(Kernel, "start", interrupted)
        np.testing.assert_array_equal(opened.embed(TEXTS), wanted)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGUSR1, before)
    assert found == [1, *["this Embedder is in use by this very thread"] * 3]
    assert opened.stats.packs == 2


@pytest.mark.parametrize(
    ("bundle", "error", "words"),
    [
        (3, InputTypeError, "bundle=3: int, wanted a path as str"),
        (b"folder", InputTypeError, "bundle=b'folder': bytes, wanted a path as str"),
        ("a\0b", InputError, "a NUL in a path"),
        ("a" * 5000, BundleError, "a: no such folder, wanted a bundle"),
    ],
)
def test_a_bundle_that_is_no_path_is_refused(
    bundle: Anything, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Embedder(bundle, "emulated")


def test_a_text_without_a_token_is_named(opened: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tokenizers.Tokenizer.from_file(str(opened.bundle.path / "tokenizer.json"))
    bare.post_processor = tokenizers.processors.TemplateProcessing("$0", "$A $B", [])
    limited = Tokenizer.limited("tokenizer.json", bare, 128)
    monkeypatch.setattr(opened._tokenizing, "_tokenizer", limited)
    assert opened.tokenize(["a", ""])[1] == []
    with pytest.raises(InputError, match=r"texts\[1\]: 0 tokens, wanted at least one"):
        opened.embed(["a", "", "b"])


def test_a_zero_vector_of_a_model_that_normalizes_is_never_returned(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = opened._model.pool  # type: ignore[attr-defined]

    def second_is_zero(*args: Anything) -> Anything:
        pooled = pool(*args)
        pooled[1] = 0
        return pooled

    monkeypatch.setattr(opened._model, "pool", second_is_zero)
    with pytest.raises(DeviceError, match=r"^texts\[\d\]: its vector is not finite, or zero"):
        opened.embed(TEXTS)


def test_what_cannot_be_opened_is_a_typed_error(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no such folder"):
        Embedder(tmp_path / "nowhere", "emulated")
    with pytest.raises(SettingError, match=r"device='gpu'"):
        Embedder(tiny_bundle, "gpu")
    with pytest.raises(DeviceError, match=r"no hardware can run"):
        Embedder(tiny_bundle, "npu")


def test_the_setting_names_the_bundle(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(tiny_bundle))
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")
    with Embedder() as made:
        assert made.bundle.path == tiny_bundle


def test_without_a_bundle_the_default_one_is_opened(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "default_bundle", lambda: tiny_bundle)
    with Embedder(device="emulated") as made:
        assert made.bundle.path == tiny_bundle


def test_threads_take_turns_and_get_their_own(opened: Embedder) -> None:
    texts = [[f"thread {t} text {i}" for i in range(30)] for t in range(2)]
    wanted = [opened.embed(mine) for mine in texts]
    found: dict[int, NDArray[np.float32]] = {}
    start = threading.Barrier(2)

    def work(t: int) -> None:
        start.wait()
        for _ in range(3):
            found[t] = opened.embed(texts[t])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t in range(2):
        np.testing.assert_array_equal(found[t], wanted[t])


def test_closing_under_a_running_thread_ends_it_with_a_typed_error(tiny_bundle: Path) -> None:
    made = Embedder(tiny_bundle, "emulated", pack_rows=128)
    begun = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                made.embed(TEXTS * 4)
                begun.set()
        except InputError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    made.close()
    thread.join(timeout=10)
    assert [str(e) for e in errors] == ["this Embedder is closed; open another one."]


def test_close_frees_the_buffers_of_weights_and_rows(tiny_bundle: Path) -> None:
    embedder = Embedder(tiny_bundle, device="emulated")
    embedder.embed("a")
    model = embedder._model
    embedder.close()
    assert isinstance(model, Bert)
    assert model._layers == []
    assert model._slots == []
