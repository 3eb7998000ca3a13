"""Haystack: `NpuTextEmbedder` and `NpuDocumentEmbedder`, components; the extra `haystack`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..embedder import Embedder
from ..errors import InputTypeError
from .engine import Engine, text_of
from .extras import missing

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError as error:
    raise missing("haystack", "haystack-ai") from error


@component
class NpuTextEmbedder:
    """Haystack's embedder of a query; the arguments are those of every adapter.

    Raises:
        InputError, SettingError: an argument that cannot be used; see npu_embed.integrations.
    """

    def __init__(
        self,
        bundle: str | Path | None = None,
        device: str | None = None,
        *,
        embedder: Embedder | None = None,
        query_prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
    ) -> None:
        self._engine = Engine.of(bundle, device, embedder, query_prompt, None, dim, truncate)

    def warm_up(self) -> None:
        """Open the bundle, which else the first run does.

        Raises:
            NpuEmbedError: see Embedder.
        """
        self._engine.open()

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        """{"embedding": the text's vector as a query, "meta": {"model": its name}}.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        (vector,) = self._engine.queries(text_of(text)).tolist()
        return {"embedding": vector, "meta": {"model": self._engine.open().bundle.name}}

    def to_dict(self) -> dict[str, Any]:
        """What Haystack writes to a pipeline's file.

        Raises:
            InputError: as Engine.names.
        """
        names = self._engine.names()
        del names["document_prompt"]
        return default_to_dict(self, **names)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NpuTextEmbedder:
        """The component of what to_dict wrote."""
        made: NpuTextEmbedder = default_from_dict(cls, data)
        return made


@component
class NpuDocumentEmbedder:
    """Haystack's embedder of documents; the arguments are those of every adapter.

    meta_fields_to_embed: names in a document's meta whose values go before its content, with
    embedding_separator between them, as in Haystack's own embedders.

    Raises:
        InputError, SettingError: an argument that cannot be used; see npu_embed.integrations.
    """

    def __init__(
        self,
        bundle: str | Path | None = None,
        device: str | None = None,
        *,
        embedder: Embedder | None = None,
        document_prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
    ) -> None:
        self._engine = Engine.of(bundle, device, embedder, None, document_prompt, dim, truncate)
        self._meta_fields = list(meta_fields_to_embed or ())
        self._separator = embedding_separator

    def warm_up(self) -> None:
        """Open the bundle, which else the first run does.

        Raises:
            NpuEmbedError: see Embedder.
        """
        self._engine.open()

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """{"documents": copies with their vectors, in order, "meta": {"model": its name}}.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed; InputTypeError for what is no list of
                documents.
        """
        if not isinstance(documents, list):
            raise InputTypeError(
                f"documents: {type(documents).__name__}, wanted a list of Documents; a str goes to "
                "NpuTextEmbedder."
            )
        vectors = self._engine.documents([self._text(d, i) for i, d in enumerate(documents)])
        found = [
            replace(document, embedding=vector)
            for document, vector in zip(documents, vectors.tolist(), strict=True)
        ]
        return {"documents": found, "meta": {"model": self._engine.open().bundle.name}}

    def _text(self, document: object, index: int) -> str:
        """What is embedded of a document."""
        if not isinstance(document, Document):
            raise InputTypeError(
                f"documents[{index}]: {type(document).__name__}, wanted a Document; a str goes to "
                "NpuTextEmbedder."
            )
        values = [document.meta.get(name) for name in self._meta_fields]
        before = [str(value) for value in values if value is not None]
        return self._separator.join([*before, document.content or ""])

    def to_dict(self) -> dict[str, Any]:
        """What Haystack writes to a pipeline's file.

        Raises:
            InputError: as Engine.names.
        """
        names = self._engine.names()
        del names["query_prompt"]
        return default_to_dict(
            self,
            **names,
            meta_fields_to_embed=self._meta_fields,
            embedding_separator=self._separator,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NpuDocumentEmbedder:
        """The component of what to_dict wrote."""
        made: NpuDocumentEmbedder = default_from_dict(cls, data)
        return made
