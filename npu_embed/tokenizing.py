"""Tokenizing for an Embedder: in batches, timed and counted, and said once where a text is cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count

from .bundle import Bundle
from .errors import InputTypeError
from .stats import Tally
from .tokenizer import Encoded, Tokenizer, in_batches
from .trace import Timing

log = logging.getLogger("npu_embed")


class Tokenizing:
    """A bundle's tokenizer, if it has one, for threads that share an Embedder.

    plain_specials: as for Tokenizer.from_file.

    Raises:
        BundleError: as Bundle.open_tokenizer.
    """

    def __init__(self, bundle: Bundle, *, plain_specials: bool) -> None:
        self._bundle = bundle
        self._plain_specials = plain_specials
        self._tokenizer = self._open() if bundle.max_tokens else None
        self._cuts = count()  # counted without a lock, which a signal handler could meet again

    @property
    def plain_specials(self) -> bool:
        """Whether special tokens typed in a text are plain text."""
        return self._plain_specials

    def encode(
        self, texts: Sequence[str], prefix: str, truncate: bool, first: int = 0
    ) -> tuple[list[Encoded], Tally]:
        """The token ids of `prefix + text` for each text, and what it took and was cut.

        The texts must have passed `as_texts`. `first` is the index that errors give the first.

        Raises:
            InputError, InputTypeError: the bundle is for images only, truncate is no bool, or it
                is False and a text is too long.
        """
        if not isinstance(truncate, bool):
            raise InputTypeError(f"truncate={truncate!r}: wanted True or False.")
        tokenizer = self._tokenizer or self._open()
        timing = Timing()
        encoded: list[Encoded] = []
        with timing.stage("tokenize"):
            for some in in_batches(texts, len(prefix)):
                encoded += tokenizer.encode_batch(
                    some, prompt=prefix, truncate=truncate, first=first + len(encoded)
                )
        return encoded, Tally(truncated=sum(e.truncated for e in encoded), timing=timing)

    def warn_of_cut(self, encoded: Sequence[Encoded], first: int) -> None:
        """Log how many texts were cut and which is the longest, the first time that one was."""
        cut = [i for i, e in enumerate(encoded) if e.truncated]
        if cut and next(self._cuts) == 0:
            longest = max(cut, key=lambda i: encoded[i].tokens)
            log.warning(
                "%s longer than %d tokens %s cut (the longest, index %d, has %d); truncate=False "
                "refuses such texts; said once, later ones are only counted",
                "1 text" if len(cut) == 1 else f"{len(cut)} texts",
                self._bundle.max_tokens,
                "was" if len(cut) == 1 else "were",
                first + longest,
                encoded[longest].tokens,
            )

    def _open(self) -> Tokenizer:
        return self._bundle.open_tokenizer(plain_specials=self._plain_specials)
