"""Embedding texts without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from references import NEAR_BITS

from npu_embed import DeviceError, Embedder, InputError, InputTypeError, streaming
from npu_embed.driver import Xrt as Anything

TEXTS = ["cats", "a red car on a long road", "a", "two cats on a sofa", "plants"] * 3


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as opened:
        yield opened


def test_vectors_come_in_order_and_are_those_of_embed(engine: Embedder) -> None:
    found = np.stack(list(engine.embed_iter(TEXTS, window=4)))
    assert np.abs(found - engine.embed(TEXTS)).max() < NEAR_BITS


def test_a_window_gives_the_bits_of_embed(engine: Embedder) -> None:
    found = list(engine.embed_iter(iter(TEXTS), window=4))
    for first in range(0, len(TEXTS), 4):
        np.testing.assert_array_equal(
            np.stack(found[first : first + 4]), engine.embed(TEXTS[first : first + 4])
        )


def test_texts_without_end_are_read_a_window_ahead(engine: Embedder) -> None:
    read = itertools.count()
    texts = (f"text {i}" for i in read)
    vectors = engine.embed_iter(texts, window=3)
    assert next(read) == 0  # nothing was read for the asking
    for _ in range(4):
        next(vectors)
    assert next(read) == 7


def test_long_texts_make_a_window_shorter(engine: Embedder) -> None:
    with mock.patch.object(streaming, "BATCH_CHARACTERS", 10):
        next(engine.embed_iter(["0123456", "0123456", "never read", object()]))  # type: ignore[list-item]


def test_no_texts_give_no_vectors(engine: Embedder) -> None:
    assert list(engine.embed_iter([])) == []


def test_whoever_keeps_a_vector_keeps_no_window(engine: Embedder) -> None:
    assert all(v.base is None for v in engine.embed_iter(TEXTS))


def test_a_cut_vector_has_unit_length(engine: Embedder) -> None:
    (vector,) = engine.embed_iter(["cats"], dim=8)
    assert vector.shape == (8,)
    assert abs(np.linalg.norm(vector) - 1) < 1e-6


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a"] * 5 + [None], r"texts\[5\]: NoneType"),
        (["a"] * 5 + [float("nan")], r"texts\[5\]: float"),
        (["a"] * 5 + ["ok\ud800bad"], r"texts\[5\]: lone surrogate U\+D800 at character 2"),
        (["a"] * 5 + ["word " * 300], r"texts\[5\]: \d+ tokens, this bundle runs at most"),
    ],
)
def test_a_bad_text_is_named_by_its_place_in_all(
    engine: Embedder, texts: list[str], words: str
) -> None:
    vectors = engine.embed_iter(texts, truncate=False, window=2)
    assert len(list(itertools.islice(vectors, 4))) == 4
    with pytest.raises(InputError, match=words):
        next(vectors)


def test_a_vector_that_is_not_finite_is_named_by_its_place_in_all(
    engine: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npu_embed import models

    vectors = engine.embed_iter(["a", "b", "c", "d"], window=2)
    next(vectors)
    next(vectors)
    broken = [np.array([[1.0] * 64, [np.nan] * 64], dtype=np.float32)]
    monkeypatch.setattr(models, "forward_together", lambda *args: broken)
    with pytest.raises(DeviceError, match=r"texts\[3\]: its vector is not finite"):
        next(vectors)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"texts": "one str"}, InputTypeError, "texts: str"),
        ({"texts": 3}, InputTypeError, "texts: int"),
        ({"texts": {"a": 1}}, InputTypeError, "texts: dict"),
        ({"dim": 0}, InputError, "dim=0"),
        ({"dim": True}, InputTypeError, "dim=True"),
        ({"prompt": "none such"}, InputError, "unknown prompt"),
        ({"truncate": 1}, InputTypeError, "truncate=1"),
        ({"window": 0}, InputError, "window=0"),
        ({"window": "4"}, InputTypeError, "window='4'"),
        ({"window": True}, InputTypeError, "window=True"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(
    engine: Embedder, arguments: dict[str, Anything], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        engine.embed_iter(**{"texts": TEXTS, **arguments})


def test_a_closed_embedder_says_so_at_once(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, "emulated") as e:
        vectors = e.embed_iter(TEXTS)
    with pytest.raises(InputError, match="closed"):
        e.embed_iter(TEXTS)
    with pytest.raises(InputError, match="closed"):
        next(vectors)
