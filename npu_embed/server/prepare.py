"""Prepare: a request's texts to token ids, in a thread beside the event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..errors import InputError
from ..token_queries import checked_ids, vocab_size
from ..tokenizer import BATCH_CHARACTERS, Encoded, check_some_tokens, check_text, in_batches
from .refusals import invalid, too_large
from .request import Request

TOO_LONG = "context_length_exceeded"  # as OpenAI calls it


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token ids of a request's texts, how many of those were cut, and the time it took."""

    ids: Sequence[NDArray[np.int32]]
    truncated: int
    seconds: float


class Preparer:
    """A bundle's tokenizer, prompts and limits; may be used by threads.

    truncate: whether texts past the limit are cut where a request does not say.

    Raises:
        BundleError: the tokenizer is missing or damaged.
        InputError: the bundle is for images only.
    """

    def __init__(self, bundle: Bundle, *, truncate: bool) -> None:
        self._bundle = bundle
        self._tokenizer = bundle.open_tokenizer()
        self._vocab_size = vocab_size(bundle)
        self._truncate = truncate

    def prepare(self, request: Request) -> Prepared:
        """The token ids of a request's texts.

        Raises:
            Refusal: a text, its ids or the prompt cannot be used.
        """
        start = time.perf_counter()
        if request.tokens is not None:
            ids, truncated = self._checked(request, request.tokens), 0
        else:
            encoded = self._encoded(request, request.texts or [])
            ids, truncated = [one.ids for one in encoded], sum(one.truncated for one in encoded)
        return Prepared(ids, truncated, time.perf_counter() - start)

    def _checked(self, request: Request, tokens: list[list[int]]) -> list[NDArray[np.int32]]:
        if request.prompt is not None:
            raise invalid(
                "prompt_name: given with token ids, wanted texts; put the prompt's ids before "
                "the others.",
                "prompt_name",
            )
        limit, most = self._vocab_size, self._bundle.max_tokens
        try:
            return [
                checked_ids(one, limit, most, f"{request.field}[{index}]")
                for index, one in enumerate(tokens)
            ]
        except InputError as error:
            raise invalid(str(error), request.field) from None

    def _encoded(self, request: Request, texts: list[str]) -> list[Encoded]:
        try:
            prefix = self._bundle.prompt(request.prompt)
        except InputError:
            known = ", ".join(sorted(self._bundle.prompts)) or "none"
            message = f"prompt_name: unknown prompt, this model has: {known}."
            raise invalid(message, "prompt_name") from None
        truncate = self._truncate if request.truncate is None else request.truncate
        most = self._bundle.max_tokens
        encoded: list[Encoded] = []
        for index, text in enumerate(texts):
            if len(text) > BATCH_CHARACTERS:
                raise too_large(
                    f"{request.field}[{index}]: {len(text)} characters, this server takes at most "
                    f"{BATCH_CHARACTERS} in a text.",
                    request.field,
                )
        try:
            checked = [check_text(t, f"{request.field}[{i}]") for i, t in enumerate(texts)]
            for some in in_batches(checked, len(prefix)):
                encoded += self._tokenizer.encode_batch(some, prompt=prefix)
            check_some_tokens(encoded)
        except InputError as error:
            raise invalid(str(error), request.field) from None
        for index, one in enumerate(encoded):
            if one.truncated and not truncate:
                raise invalid(
                    f"{request.field}[{index}]: {one.tokens} tokens, this model's maximum context "
                    f'length is {most}; shorten it, or send "truncate": true to have it cut.',
                    request.field,
                    TOO_LONG,
                )
        return encoded
