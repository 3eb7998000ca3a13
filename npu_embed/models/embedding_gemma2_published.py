"""embedding_gemma2 from a bundle of the published layout: K-sliced GEMMs, attention on the host.

published.py gives the bundle's parts the names that EmbeddingGemma2 reads; o and down are runs over
slices of K there, whose results, each rounded to bfloat16, are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..bf16 import F32
from .embedding_gemma2 import EmbeddingGemma2
from .gemma4_vision_params import has_vision
from .gemma_weights import EmbeddingTable

FRAME = 4  # rows around an image's soft tokens: bos, boi | eoi, eos


class EmbeddingGemma2Published(EmbeddingGemma2):
    """A published embedding_gemma2 on a device: texts, images, or both."""

    def _embedding_table(self) -> EmbeddingTable | None:
        """The table of embeddings, which a bundle for images only has not."""
        return super()._embedding_table() if self.bundle.max_tokens else None

    def _most_positions(self) -> int:
        if not has_vision(self.bundle):
            return self.bundle.max_tokens
        soft = self.bundle.manifest.param_int("max_soft_tokens", minimum=1, maximum=1 << 16)
        return max(self.bundle.max_tokens, soft + FRAME)

    def _frame(self) -> F32:
        return self.bundle.tensors.f32("t.tok", (FRAME, self.params.hidden_size))

    def _layer_scalars(self) -> Sequence[F32]:
        layers = len(self.params.layer_types)
        return list(self.bundle.tensors.f32("t.layer_scalar", (layers,)).reshape(layers, 1))
