"""Embedding more texts than memory holds: read as they are wanted, a window at a time."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from .bf16 import F32
from .bundle import Bundle
from .errors import InputError, InputTypeError
from .tokenizer import BATCH_CHARACTERS, iter_texts
from .vectors import checked_dim

# Texts of a window are packed together: enough for some full packs, few enough to wait for.
WINDOW_TEXTS = 1024


class Streams(ABC):
    """What an Embedder can do with texts without end; it brings the embedding of a window."""

    @property
    @abstractmethod
    def bundle(self) -> Bundle:
        """The opened bundle."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """The length of a vector."""

    @abstractmethod
    def _check_usable(self) -> None:
        """Check that texts can be embedded, here and now."""

    @abstractmethod
    def _embed_texts(
        self, texts: list[str], prefix: str, dim: int | None, truncate: bool, first: int
    ) -> F32:
        """The vectors of checked texts; `first` is the index that errors give the first."""

    def embed_iter(
        self,
        texts: Iterable[str],
        prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
        *,
        window: int = WINDOW_TEXTS,
    ) -> Iterator[F32]:
        """The vectors of texts, float32 [dim] each, in their order and as they are asked for.

        texts: any iterable of str, which may never end: at most `window` of them (fewer if they are
        long) are read ahead, and are packed by their lengths. The other arguments are embed's. The
        same texts in the same windows give the same bits.

        Raises:
            InputError, InputTypeError: as embed, arguments at once, texts when they are reached.
            NoFreeContext, RunFailed, DeviceError: from the device.
        """
        self._check_usable()
        checked_dim(dim, self.dim)
        if not isinstance(truncate, bool):
            raise InputTypeError(f"truncate={truncate!r}: wanted True or False.")
        windows = _windows(iter_texts(texts), _checked_window(window))
        return self._embed_windows(windows, self.bundle.prompt(prompt), dim, truncate)

    def _embed_windows(
        self, windows: Iterator[list[str]], prefix: str, dim: int | None, truncate: bool
    ) -> Iterator[F32]:
        first = 0
        for texts in windows:
            for vector in self._embed_texts(texts, prefix, dim, truncate, first):
                yield vector.copy()  # whoever keeps one keeps no window
            first += len(texts)


def _windows(texts: Iterator[str], most: int) -> Iterator[list[str]]:
    """The texts in lists of at most `most`, or of about as many characters as are tokenized."""
    some: list[str] = []
    characters = 0
    for text in texts:
        some.append(text)
        characters += len(text)
        if len(some) == most or characters >= BATCH_CHARACTERS:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _checked_window(window: object) -> int:
    try:
        size = operator.index(window) if not isinstance(window, bool) else None  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None:
        raise InputTypeError(f"window={window!r}: {type(window).__name__}, wanted an integer.")
    if size < 1:
        raise InputError(f"window={size}: wanted at least 1 text.")
    return size
