"""LlamaIndex: `NpuEmbedding`, a `BaseEmbedding`; the extra `llama-index`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ..embedder import Embedder
from .engine import Engine, text_of
from .extras import missing

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
except ImportError as error:
    raise missing("llama_index", "llama-index-core") from error

# Texts that LlamaIndex hands over at a time, unless told otherwise. Its own 10 would leave the
# packs nearly empty.
BATCH_TEXTS = 256


class NpuEmbedding(BaseEmbedding):
    """LlamaIndex's embedding model, by this engine; the arguments are those of every adapter.

    Those that BaseEmbedding takes too, embed_batch_size at its default of 256. to_dict and
    from_dict keep all but an Embedder. The asynchronous methods embed in a thread.

    Raises:
        InputError, SettingError: an argument that cannot be used; see npu_embed.integrations.
    """

    bundle: str | None = Field(default=None, frozen=True, description="The bundle's folder.")
    device: str | None = Field(default=None, frozen=True, description="auto, npu or emulated.")
    query_prompt: str | None = Field(
        default=None, frozen=True, description="The name of the prompt before queries."
    )
    document_prompt: str | None = Field(
        default=None, frozen=True, description="The name of the prompt before documents."
    )
    dim: int | None = Field(default=None, frozen=True, description="The numbers of a vector kept.")
    truncate: bool = Field(default=True, frozen=True, description="Whether long texts are cut.")

    _engine: Engine = PrivateAttr()

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
        embed_batch_size: int = BATCH_TEXTS,
        **others: Any,  # noqa: ANN401 - BaseEmbedding's fields
    ) -> None:
        engine = Engine.of(bundle, device, embedder, query_prompt, document_prompt, dim, truncate)
        others.setdefault("model_name", engine.name)
        super().__init__(**engine.names(), embed_batch_size=embed_batch_size, **others)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex writes to files."""
        return "NpuEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._engine.queries(text_of(query))[0].tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings(text_of(text))[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._engine.documents(texts).tolist()
        return vectors

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
