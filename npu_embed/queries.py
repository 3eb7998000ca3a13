"""Queries and documents by their prompts, and sentence-transformers' own names for embedding."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from .bf16 import F32
from .bundle import Bundle
from .errors import InputError, InputTypeError
from .tokenizer import check_text
from .vectors import normalized

log = logging.getLogger("npu_embed")

# What models call their prompts, in the order sentence-transformers looks for them.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")

# Options of encode that have one value here, and what to do where another is wanted.
_FIXED: dict[str, tuple[object, str]] = {
    "output_value": ("sentence_embedding", "there are no vectors of single tokens"),
    "precision": ("float32", "quantize the result"),
    "convert_to_numpy": (True, "convert the result"),
    "convert_to_tensor": (False, "pass the result to torch.from_numpy"),
    "device": (None, "choose the device when the Embedder is opened"),
}


class Queries(ABC):
    """What an Embedder can do besides embed; it brings the bundle and the embedding."""

    _warned_of: frozenset[Sequence[str]] = frozenset()

    @property
    @abstractmethod
    def bundle(self) -> Bundle:
        """The opened bundle."""

    @abstractmethod
    def _embed(
        self,
        texts: str | Iterable[str],
        prefix: str,
        dim: int | None,
        truncate: bool,
        progress: bool,
    ) -> F32:
        """Embedder.embed with the text that goes before each text instead of a prompt's name."""

    def embed_query(
        self,
        texts: str | Iterable[str],
        dim: int | None = None,
        truncate: bool = True,
        progress: bool = False,
    ) -> F32:
        """The vectors of what is searched for, to be compared with those of embed_document.

        As embed, with the bundle's prompt named query; without a prompt where it has none.

        Raises:
            NpuEmbedError: as embed.
        """
        return self._embed(texts, self._prefix(QUERY_PROMPTS), dim, truncate, progress)

    def embed_document(
        self,
        texts: str | Iterable[str],
        dim: int | None = None,
        truncate: bool = True,
        progress: bool = False,
    ) -> F32:
        """The vectors of what is searched in, to be compared with those of embed_query.

        As embed, with the first of the bundle's prompts named document, passage or corpus; without
        a prompt where it has none.

        Raises:
            NpuEmbedError: as embed.
        """
        return self._embed(texts, self._prefix(DOCUMENT_PROMPTS), dim, truncate, progress)

    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **others: object,
    ) -> F32:
        """The vectors of texts: embed as sentence-transformers calls it.

        prompt is the text that goes before each text, prompt_name its name in the bundle, which
        prompt makes void. batch_size changes nothing: texts are packed by their tokens.
        normalize_embeddings: unit rows, also of a model that does not make them so. A vector cut
        to truncate_dim is scaled to unit length again. Of its other options those that would
        give something else than float32 numpy vectors are refused.

        Raises:
            NpuEmbedError: as embed; InputError also for an option that is not implemented.
        """
        _check_options(batch_size, others)
        if prompt is None:
            prefix = self.bundle.prompt(prompt_name)
        else:
            prefix = check_text(prompt, "prompt")
        vectors = self._embed(sentences, prefix, truncate_dim, True, bool(show_progress_bar))
        if not normalize_embeddings:
            return vectors
        return normalized(vectors) if vectors.ndim == 2 else normalized(vectors[None])[0]

    def encode_query(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **others: object,
    ) -> F32:
        """embed_query as sentence-transformers calls it; the options are those of encode."""
        if prompt is None and prompt_name is None:
            prompt = self._prefix(QUERY_PROMPTS)
        return self.encode(
            sentences,
            prompt_name,
            prompt,
            batch_size,
            show_progress_bar,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            **others,
        )

    def encode_document(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **others: object,
    ) -> F32:
        """embed_document as sentence-transformers calls it; the options are those of encode."""
        if prompt is None and prompt_name is None:
            prompt = self._prefix(DOCUMENT_PROMPTS)
        return self.encode(
            sentences,
            prompt_name,
            prompt,
            batch_size,
            show_progress_bar,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            **others,
        )

    def _prefix(self, names: Sequence[str]) -> str:
        """The text of the first of the bundle's prompts that has one of these names."""
        prompts = self.bundle.prompts
        for name in names:
            if name in prompts:
                return prompts[name]
        if prompts and names not in self._warned_of:
            self._warned_of |= {names}
            log.warning(
                "%s: no prompt named %s, so texts go without one; it has %s (prompt=NAME); said "
                "once",
                self.bundle.name,
                " or ".join(names),
                ", ".join(sorted(prompts)),
            )
        return ""


def _check_options(batch_size: object, others: dict[str, object]) -> None:
    """Refuse what encode would not do as sentence-transformers does."""
    try:
        size = operator.index(batch_size)  # type: ignore[arg-type]
    except TypeError:
        raise InputTypeError(
            f"batch_size={batch_size!r}: {type(batch_size).__name__}, wanted an integer."
        ) from None
    if size < 1:
        raise InputError(f"batch_size={size}: wanted at least 1.")
    for name, value in others.items():
        if name not in _FIXED:
            raise InputTypeError(
                f"encode({name}=...): unknown option; wanted prompt_name, prompt, batch_size, "
                "show_progress_bar, normalize_embeddings or truncate_dim."
            )
        only, instead = _FIXED[name]
        if type(value) is not type(only) or value != only:  # an array has no one truth
            raise InputError(f"encode({name}={value!r}): wanted {only!r}; {instead}.")
