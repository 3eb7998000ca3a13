"""The texts whose reference vectors a bundle carries, so that it can be checked where it runs."""

from __future__ import annotations

_SENTENCE = "A text that is longer than the model can read is cut, and its end is kept. "
_SENTENCE_WORDS = len(_SENTENCE.split())

SHORT_TEXTS = (
    "hello",
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Café déjà vu: naïve façade, Zürich, smørrebrød.",
    "量子力学の講義は東京で開かれる。",
)


def self_check_texts(max_tokens: int) -> tuple[str, ...]:
    """Six texts: a word, a sentence, none, accents, CJK, and one cut at max_tokens."""
    # A word is at least a token, so this many words are certain to be too many.
    return (*SHORT_TEXTS, _SENTENCE * (max_tokens // _SENTENCE_WORDS + 1))
