"""The worker's answers: vectors, a second try on rebuilt contexts, and what it says of failures."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from npu_embed import Embedder
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import NoFreeContext, RunFailed
from npu_embed.kernels import Kernel
from npu_embed.runlists import RunList
from npu_embed.server.link import WorkerDied, WorkerFailed, _error
from npu_embed.server.messages import Ask, Done, Failed, Held, Opening, Order
from npu_embed.server.worker import answer, open_engine

IDS = [[2, 30, 3], [2, 3], [2, 40, 41, 42, 3]]
ORDER = Order(np.concatenate([np.array(i, dtype=np.int32) for i in IDS]), tuple(map(len, IDS)))


@pytest.fixture(scope="module")
def opened(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as embedder:
        yield embedder


def failing(monkeypatch: pytest.MonkeyPatch, errors: list[BaseException]) -> None:
    """Have the next runs fail with these errors, the later ones succeed."""
    for kind in (Kernel, RunList):
        real = kind.start

        def start(self: object, *args: Anything, real: Anything = real) -> Anything:
            if errors:
                raise errors.pop(0)
            return real(self, *args)

        monkeypatch.setattr(kind, "start", start)


def test_an_order_is_answered_with_its_vectors_and_what_it_took(opened: Embedder) -> None:
    done = answer(opened, ORDER)
    assert isinstance(done, Done)
    np.testing.assert_array_equal(done.vectors, opened.embed_tokens(IDS))
    assert (done.stats.texts, done.stats.tokens, done.stats.packs) == (3, 10, 1)
    assert done.stats.counters.runs > 0
    assert (done.contexts, done.retried) == (2, False)


def test_contexts_are_told_when_asked_for(opened: Embedder) -> None:
    opened.release()
    assert answer(opened, Ask()) == Held(0)


def test_an_order_that_the_engine_had_to_try_twice_says_so(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = opened.embed_tokens(IDS)
    failing(monkeypatch, [RunFailed("qkv: timed out")])
    done = answer(opened, ORDER)
    assert isinstance(done, Done)
    assert done.retried
    np.testing.assert_array_equal(done.vectors, wanted)
    assert "qkv: timed out; once more" in caplog.text
    again = answer(opened, ORDER)
    assert isinstance(again, Done)
    assert not again.retried


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ([NoFreeContext("no slot")], "NoFreeContext", "no slot"),
        ([ZeroDivisionError("quoted words")], "ZeroDivisionError", "ZeroDivisionError in the"),
    ],
)
def test_what_fails_is_told_by_its_class_and_the_next_order_is_right(
    opened: Embedder,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[BaseException],
    kind: str,
    words: str,
) -> None:
    wanted = opened.embed_tokens(IDS)
    failing(monkeypatch, errors)
    failed = answer(opened, ORDER)
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert words in failed.message
    assert "quoted" not in failed.message
    done = answer(opened, ORDER)
    assert isinstance(done, Done)
    np.testing.assert_array_equal(done.vectors, wanted)


def test_a_device_that_counts_as_bad_does_so_until_another_process_opens_it(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Embedder(tiny_bundle, "emulated") as opened:
        failing(monkeypatch, [RunFailed("first"), RunFailed("second")])
        for _ in range(2):
            failed = answer(opened, ORDER)
            assert isinstance(failed, Failed)
            assert failed.kind == "DeviceBad"
            assert "Then: second" in failed.message


def test_ids_out_of_range_fail_as_an_input_error(opened: Embedder) -> None:
    failed = answer(opened, Order(np.array([5000], dtype=np.int32), (1,)))
    assert isinstance(failed, Failed)
    assert failed.kind == "InputError"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("RunFailed", RunFailed), ("MemoryError", WorkerFailed), ("annotations", WorkerFailed)],
)
def test_an_error_is_of_its_class_again_on_the_servers_side(kind: str, wanted: type) -> None:
    error = _error(Failed(kind, "words"))
    assert type(error) is wanted
    assert str(error) == "words"
    assert not isinstance(error, WorkerDied)


def test_the_log_of_a_bug_has_no_words_of_it(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, [ZeroDivisionError("quoted words")])
    answer(opened, ORDER)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "quoted" not in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ([RunFailed("first"), RunFailed("second")], "DeviceBad", "Then: second"),
        ([ModuleNotFoundError("No module named 'x'")], "ModuleNotFoundError", "No module named"),
        ([PermissionError(13, "denied", "x.bin")], "PermissionError", "denied: 'x.bin'"),
    ],
)
def test_an_engine_that_cannot_run_is_told_and_closed(
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[BaseException],
    kind: str,
    words: str,
) -> None:
    closed: list[None] = []
    real = Embedder.close
    monkeypatch.setattr(Embedder, "close", lambda self: closed.append(real(self)))
    failing(monkeypatch, errors)
    failed = open_engine(Opening(tiny_bundle, "emulated"))
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert words in failed.message
    assert closed


def test_an_engine_that_is_opened_has_run(tiny_bundle: Path) -> None:
    opened = open_engine(Opening(tiny_bundle, "emulated"))
    assert isinstance(opened, Embedder)
    with opened:
        assert opened.contexts_held == 2


def test_a_bundle_that_is_none_is_told(tmp_path: Path) -> None:
    failed = open_engine(Opening(tmp_path / "none", "emulated"))
    assert isinstance(failed, Failed)
    assert failed.kind == "BundleError"
