"""Embedding texts that are token ids already, for who has tokenized them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32
from .bundle import Bundle
from .errors import InputError, InputTypeError
from .stats import Tally
from .tokenizer import Encoded
from .vectors import checked_dim, cut

MAX_VOCAB_SIZE = 1 << 24


class TokenQueries(ABC):
    """What an Embedder can do with token ids; it brings the bundle and the running of packs."""

    @property
    @abstractmethod
    def bundle(self) -> Bundle:
        """The opened bundle."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """The length of a vector."""

    @abstractmethod
    def _run(self, encoded: Sequence[Encoded], progress: bool, call: Tally, first: int) -> F32:
        """The model's vectors, in order."""

    @abstractmethod
    def _ended(self, call: Tally) -> None:
        """A call has ended well."""

    def embed_tokens(
        self, tokens: Iterable[Sequence[int] | NDArray[np.integer]], dim: int | None = None
    ) -> F32:
        """The vectors of texts given as token ids, float32 [texts, dim] in their order.

        tokens: of each text its ids as `tokenize` gives them: special tokens and prompt included,
        nothing is added or cut. dim: as for embed.

        Raises:
            InputError, InputTypeError: ids or an argument that cannot be used, by index.
            NoFreeContext, RunFailed, DeviceError: from the device; the next call starts afresh.
        """
        keep = checked_dim(dim, self.dim)
        limit = vocab_size(self.bundle)
        encoded = [
            Encoded(ids, len(ids))
            for ids in (
                checked_ids(one, limit, self.bundle.max_tokens, f"tokens[{index}]")
                for index, one in enumerate(tokens)
            )
        ]
        call = Tally()
        vectors = self._run(encoded, False, call, 0)
        self._ended(call)
        return cut(vectors, keep, "tokens")


def vocab_size(bundle: Bundle) -> int:
    """How many token ids a bundle's model has rows for.

    Raises:
        BundleError: its manifest does not say.
    """
    return bundle.manifest.param_int("vocab_size", minimum=1, maximum=MAX_VOCAB_SIZE)


def checked_ids(
    ids: Sequence[int] | NDArray[np.integer], vocab_size: int, max_tokens: int, where: str
) -> NDArray[np.int32]:
    """The token ids of one text as int32 [1 to max_tokens], each below vocab_size.

    Raises:
        InputError, InputTypeError: they are not, said with `where` in front.
    """
    if not isinstance(ids, np.ndarray) and not (
        isinstance(ids, list | tuple) and all(type(i) is int for i in ids)
    ):
        raise InputTypeError(
            f"{where}: {type(ids).__name__}, wanted a list of integers; pass what tokenize gives."
        )
    try:
        array = np.asarray(ids, dtype=None if isinstance(ids, np.ndarray) else np.int64)
    except OverflowError:
        wanted = f"wanted 0 to {vocab_size - 1}"
        raise InputError(f"{where}: an id of more than 64 bits, {wanted}.") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputTypeError(
            f"{where}: {array.dtype} of {array.ndim} dimensions, wanted integers in one."
        )
    if not 1 <= array.size <= max_tokens:
        raise InputError(
            f"{where}: {array.size} tokens, wanted 1 to {max_tokens}; cut it, keeping the special "
            "tokens that close it."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{where}: token id {low if low < 0 else high}, wanted 0 to {vocab_size - 1}; use this "
            "bundle's own tokenizer."
        )
    return array.astype(np.int32)
