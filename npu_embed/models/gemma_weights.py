"""A Gemma's weights: what of them is on the device, and what stays on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import jit
from ..bf16 import F32, to_f32
from ..device import Buffer
from ..heads import HeadStep
from ..tensors import Tensors
from . import checks
from .gemma_params import Attention, GemmaParams


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights: packed B on the device by GEMM key, norms on the host.

    A GEMM whose K is cut has a B a slice, in order.
    """

    index: int
    attention: Attention
    packed: Mapping[str, tuple[Buffer, ...]]
    heads: HeadStep
    post_attention_norm: F32
    post_feedforward_norm: F32


class EmbeddingTable:
    """The rows of the table of embeddings, float32 or bfloat16, times sqrt(hidden_size)."""

    def __init__(self, tensors: Tensors, name: str, params: GemmaParams) -> None:
        shape = (params.vocab_size, params.hidden_size)
        self._bits = tensors.bf16(name, shape) if tensors.dtype(name) == "bf16" else None
        self._f32 = tensors.f32(name, shape) if self._bits is None else None
        self._vocab_size = params.vocab_size
        # Of float32 and not of the table's own type: bfloat16's sqrt(768) is off by 0.1 %.
        self._scale = np.float32(math.sqrt(params.hidden_size))

    def rows(self, ids: NDArray[np.int32]) -> F32:
        """The scaled rows of token ids, float32 [ids, hidden_size].

        Raises:
            BundleError: an id that has no row.
        """
        checks.token_ids(ids, self._vocab_size)
        if self._bits is not None and jit.kernels is not None:
            rows = np.empty((len(ids), self._bits.shape[1]), dtype=np.float32)
            jit.kernels.table_rows(self._bits, ids, self._scale, rows)
            return rows
        if self._bits is not None:
            rows = to_f32(self._bits[ids])
        else:
            assert self._f32 is not None
            rows = self._f32[ids]
        rows *= self._scale
        return rows
