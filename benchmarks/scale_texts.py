"""Texts of a wanted length or number, made of a corpus's words."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from npu_embed.tokenizer import Tokenizer

FEWEST_WORDS, MOST_WORDS = 4, 12  # of a short text
MIXED_REPEATS = 1000  # a corpus is not used up more often than that


class Words:
    """The distinct words of some texts, with the tokens each takes.

    Raises:
        ValueError: no word takes a single token: no length could be met.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._specials = tokenizer.special_tokens
        found = dict.fromkeys(word for text in texts for word in text.split() if word.isalpha())
        words = list(found)
        sizes = [len(e.ids) - self._specials for e in tokenizer.encode_batch(words)]
        self._sizes = {word: size for word, size in zip(words, sizes, strict=True) if size > 0}
        self._short = [word for word, size in self._sizes.items() if size == 1]
        if not self._short:
            raise ValueError("the corpus has no word of one token; pass another --corpus.")
        self._all = list(self._sizes)

    def of_length(self, tokens: int, count: int, seed: int = 0) -> list[str]:
        """So many texts of exactly `tokens` tokens, special tokens included.

        Exact where words do not share tokens, as in WordPiece; near it elsewhere.
        """
        choose = random.Random(seed)
        return [self._text(tokens - self._specials, choose) for _ in range(count)]

    def _text(self, room: int, choose: random.Random) -> str:
        words: list[str] = []
        while room > 0:
            word = choose.choice(self._all)
            if self._sizes[word] > room:
                word = choose.choice(self._short)
            words.append(word)
            room -= self._sizes[word]
        return " ".join(words)

    def short(self, count: int, seed: int = 0) -> Iterator[str]:
        """So many texts of FEWEST_WORDS to MOST_WORDS words, one after another."""
        choose = random.Random(seed)
        for _ in range(count):
            yield " ".join(choose.choices(self._all, k=choose.randint(FEWEST_WORDS, MOST_WORDS)))


def mixed(texts: Sequence[str], lengths: Sequence[int], tokens: int) -> list[str]:
    """The texts, from the first on and again from the first, until they have so many tokens."""
    found: list[str] = []
    for _ in range(MIXED_REPEATS):
        for text, length in zip(texts, lengths, strict=True):
            if tokens <= 0:
                return found
            found.append(text)
            tokens -= length
    return found
