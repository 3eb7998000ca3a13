"""embedding_gemma2 from a bundle of the published layout: K-sliced GEMMs, attention on the host.

published.py gives the bundle's parts the names that EmbeddingGemma2 reads; o and down are runs over
slices of K there, whose results, each rounded to bfloat16, are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..bf16 import F32
from .embedding_gemma2 import FRAME, EmbeddingGemma2
from .gemma_weights import EmbeddingTable


class EmbeddingGemma2Published(EmbeddingGemma2):
    """A published embedding_gemma2 on a device: texts, images, or both."""

    def _embedding_table(self) -> EmbeddingTable | None:
        """The table of embeddings, which a bundle for images only has not."""
        return super()._embedding_table() if self.bundle.max_tokens else None

    def _frame(self) -> F32:
        return self.bundle.tensors.f32("t.tok", (len(FRAME), self.params.hidden_size))

    def _layer_scalars(self) -> Sequence[np.float32]:
        return list(self.bundle.tensors.f32("t.layer_scalar", (len(self.params.layer_types),)))
