"""LangChain: `NpuEmbeddings`, an `Embeddings`; the extra `langchain`."""

from __future__ import annotations

from pathlib import Path

from ..embedder import Embedder
from .engine import Engine, text_of
from .extras import missing

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise missing("langchain", "langchain-core") from error


class NpuEmbeddings(Embeddings):
    """LangChain's embeddings, by this engine; the arguments are those of every adapter.

    The asynchronous methods are LangChain's own, which run these in a thread.

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

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of what is searched in, packed together.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        vectors: list[list[float]] = self._engine.documents(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of what is searched for.

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        vector: list[float] = self._engine.queries(text_of(text))[0].tolist()
        return vector
