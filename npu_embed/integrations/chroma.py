"""Chroma: `NpuEmbeddingFunction`, an `EmbeddingFunction`; the extra `chroma`.

Importing this module makes the function known to Chroma, so that a collection that was made with
it is opened with it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..embedder import Embedder
from ..errors import InputError
from .engine import Engine
from .extras import missing

try:
    from chromadb.api.types import Documents, EmbeddingFunction, Embeddings, Space
    from chromadb.utils.embedding_functions import register_embedding_function
except ImportError as error:
    raise missing("chroma", "chromadb") from error

# What the vectors of a collection depend on: others in the same collection would be compared with
# them in vain.
LASTING = ("bundle", "query_prompt", "document_prompt", "dim")


class NpuEmbeddingFunction(EmbeddingFunction[Documents]):
    """Chroma's embedding function, by this engine; the arguments are those of every adapter.

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
        document_prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
    ) -> None:
        self._engine = Engine.of(
            bundle, device, embedder, query_prompt, document_prompt, dim, truncate
        )

    def __call__(self, input: Documents) -> Embeddings:
        """The vectors of documents, packed together.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        return list(self._engine.documents(input))

    def embed_query(self, input: Documents) -> Embeddings:
        """The vectors of queries, packed together.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        return list(self._engine.queries(input))

    @staticmethod
    def name() -> str:
        """The name Chroma writes beside a collection."""
        return "npu_embed"

    def default_space(self) -> Space:
        """The distance of a collection that names none."""
        return "cosine"

    def get_config(self) -> dict[str, Any]:
        """What Chroma writes beside a collection: the bundle's path and the options.

        Raises:
            InputError: as Engine.names.
        """
        return self._engine.names()

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> NpuEmbeddingFunction:
        """The function of what get_config wrote.

        Raises:
            InputError, SettingError: an argument that cannot be used.
        """
        return NpuEmbeddingFunction(**config)

    def validate_config_update(
        self, old_config: dict[str, Any], new_config: dict[str, Any]
    ) -> None:
        """Refuse a change after which new vectors could not be compared with the stored ones.

        Raises:
            InputError: naming the option.
        """
        for option in LASTING:
            old, new = old_config.get(option), new_config.get(option)
            if option in new_config and new != old:
                raise InputError(
                    f"{option}={new!r}: this collection was made with {old!r}, whose vectors "
                    "cannot be compared with the new ones; make another collection."
                )


register_embedding_function(NpuEmbeddingFunction)  # type: ignore[no-untyped-call]
