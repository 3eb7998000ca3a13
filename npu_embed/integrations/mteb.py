"""MTEB: `NpuEncoder`, an encoder to evaluate; the extra `mteb`, which brings torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bf16 import F32
from ..embedder import Embedder
from ..manifest import MANIFEST, sha256_file
from .engine import Engine
from .extras import missing

try:
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ModelMeta, ScoringFunction
    from mteb.types import PromptType
except ImportError as error:
    raise missing("mteb", "mteb") from error

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata

# Of a bundle's hash, enough to tell two apart in the name of a results folder.
REVISION_DIGITS = 16


class NpuEncoder(AbsEncoder):
    """MTEB's encoder, by this engine; the arguments are those of every adapter.

    The bundle is opened at once, since MTEB asks for its facts. Of its prompts a task gets the one
    that MTEB's rules name (by the task, its type, or query or document); where they name none,
    query_prompt or document_prompt for queries and documents, the default prompt for the rest.

    Raises:
        NpuEmbedError: see Embedder, and npu_embed.integrations.
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
        self.model = self._engine.open()
        self.model_prompts = dict(self.model.bundle.prompts)
        self.mteb_model_meta = _meta(self.model, dim)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Sequence[str]]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **options: object,
    ) -> F32:
        """The vectors of the texts of all batches, float32 [texts, dim], in their order.

        Of the options none changes a vector: batch_size does not, since texts are packed by their
        tokens.

        Raises:
            NpuEmbedError: see Embedder.embed.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        name = self.get_prompt_name(task_metadata, prompt_type)
        engine = self._engine
        if name is None and prompt_type is PromptType.query:
            return engine.queries(texts)
        if name is None and prompt_type is PromptType.document:
            return engine.documents(texts)
        vectors: F32 = self.model.embed(texts, name, engine.dim, engine.truncate)
        return vectors


def _meta(embedder: Embedder, dim: int | None) -> ModelMeta:
    """What MTEB writes beside the results, and keeps them apart by."""
    bundle = embedder.bundle
    revision = sha256_file(bundle.path / MANIFEST)[:REVISION_DIGITS]  # it has the files' hashes
    return ModelMeta.create_empty(
        {
            "name": f"npu-embed/{bundle.name}",
            "revision": revision if dim is None else f"{revision}-{dim}",
            "max_tokens": embedder.max_tokens,
            "embed_dim": embedder.dim if dim is None else dim,
            "similarity_fn_name": ScoringFunction.COSINE,
            "use_instructions": bool(bundle.prompts),
        }
    )
