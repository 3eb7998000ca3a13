"""Tokenizing for an Embedder: what is counted, what is said once, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_embed import InputError, InputTypeError
from npu_embed.bundle import Bundle
from npu_embed.tokenizing import Tokenizing

LONG = "a " * 200  # of 128 tokens at most


@pytest.fixture
def bundle(tiny_bundle: Path) -> Iterator[Bundle]:
    opened = Bundle.open(tiny_bundle)
    yield opened
    opened.close()


def test_what_was_cut_is_counted_and_timed(bundle: Bundle) -> None:
    encoded, part = Tokenizing(bundle, plain_specials=False).encode(["a", LONG, LONG], "b ", True)
    assert [one.tokens for one in encoded] == [4, 203, 203]
    assert [len(one.ids) for one in encoded] == [4, 128, 128]
    assert (part.truncated, part.texts) == (2, 0)
    assert set(part.timing.seconds) == {"tokenize"}


def test_what_is_cut_first_is_said_once(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "npu_embed")
    tokenizing = Tokenizing(bundle, plain_specials=False)
    for texts in (["a"], ["a", LONG, LONG + "a"], [LONG]):
        encoded, _ = tokenizing.encode(texts, "", True)
        tokenizing.warn_of_cut(encoded, 10)
    (said,) = caplog.messages
    assert said == (
        "2 texts longer than 128 tokens were cut (the longest, index 12, has 203); truncate=False "
        "refuses such texts; said once, later ones are only counted"
    )


@pytest.mark.parametrize(
    ("truncate", "error", "words"),
    [
        (False, InputError, r"texts\[6\]: 202 tokens, this bundle runs at most 128"),
        (1, InputTypeError, "truncate=1: wanted True or False"),
        (None, InputTypeError, "truncate=None: wanted True or False"),
    ],
)
def test_what_cannot_be_cut_is_named(
    bundle: Bundle, truncate: bool, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Tokenizing(bundle, plain_specials=False).encode(["a", LONG], "", truncate, first=5)


def test_a_bundle_for_images_only_opens_and_refuses_texts(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "max_tokens", 0)
    tokenizing = Tokenizing(bundle, plain_specials=True)
    assert tokenizing.plain_specials
    with pytest.raises(InputError, match="a bundle for images only"):
        tokenizing.encode(["a"], "", True)


def test_special_tokens_may_be_plain_text(bundle: Bundle) -> None:
    plain, special = (
        Tokenizing(bundle, plain_specials=each).encode(["[SEP]"], "", True)[0][0].tokens
        for each in (True, False)
    )
    assert plain > special == 3
