"""Embedding token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from npu_embed import Embedder
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import InputError, InputTypeError
from npu_embed.token_queries import checked_ids

TEXTS = ["hello world", "a", "[SEP] and more of it"]


@pytest.fixture(scope="module")
def opened(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as embedder:
        yield embedder


def test_the_ids_of_tokenize_give_the_vectors_of_embed(opened: Embedder) -> None:
    ids = opened.tokenize(TEXTS)
    np.testing.assert_array_equal(opened.embed_tokens(ids), opened.embed(TEXTS))
    assert opened.last_stats.texts == len(TEXTS)
    arrays = [np.array(one) for one in ids]
    np.testing.assert_array_equal(opened.embed_tokens(arrays, dim=5), opened.embed(TEXTS, dim=5))


def test_no_texts_have_no_vectors(opened: Embedder) -> None:
    assert opened.embed_tokens([]).shape == (0, opened.dim)


def test_an_embedder_says_how_many_contexts_it_holds(opened: Embedder) -> None:
    opened.embed("a")
    assert opened.contexts_held == 2
    opened.release()
    assert opened.contexts_held == 0


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([], InputError, "0 tokens, wanted 1 to 4"),
        ([1] * 5, InputError, "5 tokens, wanted 1 to 4"),
        ([3, -1], InputError, "token id -1, wanted 0 to 9"),
        ([3, 10], InputError, "token id 10, wanted 0 to 9"),
        ([1, 2**70], InputError, "more than 64 bits"),
        ([1, True], InputTypeError, "wanted a list of integers"),
        ([1, 2.0], InputTypeError, "wanted a list of integers"),
        ("12", InputTypeError, "str, wanted a list of integers"),
        (7, InputTypeError, "int, wanted a list of integers"),
        (np.ones(2), InputTypeError, "float64"),
        (np.ones((1, 2), dtype=int), InputTypeError, "2 dimensions"),
    ],
)
def test_what_is_no_text_is_refused_by_index(ids: Anything, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        checked_ids(ids, 10, 4, "tokens[3]")
    assert str(caught.value).startswith("tokens[3]: ")


def test_a_bad_text_among_good_ones_costs_nothing(opened: Embedder) -> None:
    before = opened.stats.texts
    with pytest.raises(InputError, match=r"tokens\[1\]: token id 1000, wanted 0 to 999"):
        opened.embed_tokens([[1], [1000]])
    assert opened.stats.texts == before
