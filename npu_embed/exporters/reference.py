"""BERT in plain numpy: what a bundle's embeddings are checked against.

Computed in float64 from the checkpoint's own weights and rounded to float32 at the end: the order
in which a BLAS adds up then all but never shows, so that the same checkpoint gives the same bytes.
It shares no code with the engine, which it has to be able to contradict.

Source: Devlin et al., "BERT"; the post-norm encoder as transformers computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

NORM_FLOOR = 1e-12  # sentence-transformers divides by max(norm, this)


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers of a BERT a forward needs; HF's config keys."""

    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    hidden_act: str
    pooling: str
    normalize: bool
    padding_idx: int | None = None  # RoBERTa: the token that has no position of its own


@dataclass(frozen=True, slots=True)
class Reference:
    """One text's forward: hidden [layers + 1, tokens, hidden_size], embedding [hidden_size]."""

    ids: I32
    hidden: F32
    embedding: F32


def _erf(x: F64) -> F64:
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def gelu_erf(x: F64) -> F64:
    """x/2 (1 + erf(x / sqrt 2))."""
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def gelu_tanh(x: F64) -> F64:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "gelu": gelu_erf,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


def layer_norm(x: F64, weight: F64, bias: F64, eps: float) -> F64:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    result: F64 = centred / np.sqrt(variance + eps) * weight + bias
    return result


def softmax(x: F64) -> F64:
    """exp(x - max) / sum over the last axis."""
    e: F64 = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


class BertReference:
    """The forward of one text at a time: no padding, no mask."""

    def __init__(self, weights: Callable[[str], F32], shape: BertShape) -> None:
        """weights: a checkpoint tensor by its HF name, without a "bert." before it."""
        self._weights = weights
        self._shape = shape

    def _w(self, name: str) -> F64:
        return self._weights(name).astype(np.float64)

    def _linear(self, x: F64, name: str) -> F64:
        result: F64 = x @ self._w(f"{name}.weight").T + self._w(f"{name}.bias")
        return result

    def _norm(self, x: F64, name: str) -> F64:
        eps = self._shape.layer_norm_eps
        return layer_norm(x, self._w(f"{name}.weight"), self._w(f"{name}.bias"), eps)

    def _embed(self, ids: I32) -> F64:
        words = self._weights("embeddings.word_embeddings.weight")[ids].astype(np.float64)
        table = self._weights("embeddings.position_embeddings.weight")
        positions = table[self._position_ids(ids)]
        token_type = self._weights("embeddings.token_type_embeddings.weight")[0]
        return self._norm(words + positions + token_type, "embeddings.LayerNorm")

    def _position_ids(self, ids: I32) -> list[int]:
        """BERT counts tokens from 0; RoBERTa from padding_idx + 1, and leaves padding uncounted.

        Source: transformers, RobertaEmbeddings.create_position_ids_from_input_ids.
        """
        padding = self._shape.padding_idx
        if padding is None:
            return list(range(len(ids)))
        positions, last = [], padding
        for token in ids.tolist():
            last += token != padding
            positions.append(padding if token == padding else last)
        return positions

    def _attention(self, x: F64, layer: str) -> F64:
        heads = self._shape.num_attention_heads
        n, width = x.shape

        def split(name: str) -> F64:
            flat = self._linear(x, f"{layer}.attention.self.{name}")
            by_head: F64 = flat.reshape(n, heads, width // heads).transpose(1, 0, 2)
            return by_head

        q, k, v = split("query"), split("key"), split("value")
        p = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(width // heads))
        result: F64 = (p @ v).transpose(1, 0, 2).reshape(n, width)
        return result

    def _layer(self, x: F64, layer: str) -> F64:
        attended = self._linear(self._attention(x, layer), f"{layer}.attention.output.dense")
        x = self._norm(x + attended, f"{layer}.attention.output.LayerNorm")
        up = self._linear(x, f"{layer}.intermediate.dense")
        down = self._linear(ACTIVATIONS[self._shape.hidden_act](up), f"{layer}.output.dense")
        return self._norm(x + down, f"{layer}.output.LayerNorm")

    def _pool(self, x: F64) -> F64:
        ways: dict[str, F64] = {"mean": x.mean(axis=0), "cls": x[0], "max": x.max(axis=0)}
        pooled = ways[self._shape.pooling]
        if self._shape.normalize:
            pooled = pooled / max(float(np.linalg.norm(pooled)), NORM_FLOOR)
        return pooled

    def forward(self, ids: I32) -> Reference:
        """What the checkpoint makes of token ids [tokens], special tokens included."""
        x = self._embed(ids)
        hidden = [x]
        for i in range(self._shape.num_hidden_layers):
            x = self._layer(x, f"encoder.layer.{i}")
            hidden.append(x)
        return Reference(
            ids=ids,
            hidden=np.stack(hidden).astype(np.float32),
            embedding=self._pool(x).astype(np.float32),
        )
