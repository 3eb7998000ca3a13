"""Gemma text encoders in plain numpy: what a bundle's embeddings are checked against.

Computed in float64 from the checkpoint's own weights and rounded to float32 at the end, one text
at a time and attention a head at a time. It shares no code with the engine, which it has to be able
to contradict.

Source: "EmbeddingGemma" (Vera et al.); gemma3_text and embedding_gemma2 as transformers computes
them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .reference import F32, F64, I32, NORM_FLOOR, Reference, gelu_tanh, softmax


class Source(Protocol):
    """Where the checkpoint's tensors come from, by HF's name."""

    def f32(self, name: str) -> F32:
        """A tensor."""
        ...

    def rows(self, name: str, indices: I32) -> F32:
        """Some rows of a table, which is too large to be widened whole."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one type of layer; window: the furthest key seen, None = all are."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class GemmaShape:
    """The numbers of a Gemma a forward needs; attention by the names in layer_types."""

    layer_types: Sequence[str]
    attention: Mapping[str, AttentionShape]
    rms_norm_eps: float
    normalize: bool


@dataclass(frozen=True, slots=True)
class Dense:
    """y = weight x + bias: weight [out, in], bias [out] or None."""

    weight: F32
    bias: F32 | None


def rms_norm(x: F64, weight: F64 | None, eps: float) -> F64:
    """The rows x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    normed: F64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def rotate(x: F64, theta: float) -> F64:
    """Rotary positions 0, 1, 2, ... on x [tokens, heads, d]; element i pairs with i + d/2."""
    tokens, _, d = x.shape
    half = d // 2
    angles = np.arange(tokens)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q: F64, k: F64, v: F64, shape: AttentionShape) -> F64:
    """softmax(q k^T scale) v, each of [tokens, heads, d] -> [tokens, heads * d]."""
    tokens = len(q)
    positions = np.arange(tokens)
    group = shape.num_attention_heads // shape.num_key_value_heads
    heads = []
    for head in range(shape.num_attention_heads):
        scores = q[:, head] @ k[:, head // group].T * shape.scale
        if shape.window is not None:
            distance = np.abs(positions[:, None] - positions[None, :])
            scores[distance > shape.window] = -np.inf
        heads.append(softmax(scores) @ v[:, head // group])
    return np.concatenate(heads, axis=-1)


class GemmaReference:
    """EmbeddingGemma (gemma3_text): the sandwich of four norms a layer, all by 1 + weight."""

    prefix = ""

    def __init__(self, source: Source, shape: GemmaShape, dense: Sequence[Dense] = ()) -> None:
        """`dense` is what follows the pooling, in order."""
        self._source = source
        self._shape = shape
        self._dense = tuple(dense)

    def _w(self, name: str) -> F64:
        return self._source.f32(self.prefix + name).astype(np.float64)

    def _linear(self, x: F64, name: str) -> F64:
        product: F64 = x @ self._w(f"{name}.weight").T
        return product

    def _norm(self, x: F64, name: str) -> F64:
        return rms_norm(x, 1.0 + self._w(f"{name}.weight"), self._shape.rms_norm_eps)

    def embed(self, ids: I32) -> F64:
        """The scaled embeddings of token ids, [tokens, hidden_size]."""
        rows = self._source.rows(f"{self.prefix}embed_tokens.weight", ids).astype(np.float64)
        return rows * math.sqrt(rows.shape[1])

    def _value_norm(self, v: F64) -> F64:
        return v

    def _attention(self, x: F64, layer: str, shape: AttentionShape) -> F64:
        def project(name: str) -> F64:
            flat = self._linear(x, f"{layer}.self_attn.{name}_proj")
            return flat.reshape(len(x), -1, shape.head_dim)

        q = rotate(self._norm(project("q"), f"{layer}.self_attn.q_norm"), shape.rope_theta)
        k = rotate(self._norm(project("k"), f"{layer}.self_attn.k_norm"), shape.rope_theta)
        attended = attend(q, k, self._value_norm(project("v")), shape)
        return self._linear(attended, f"{layer}.self_attn.o_proj")

    def _mlp(self, x: F64, layer: str) -> F64:
        gate = self._linear(x, f"{layer}.mlp.gate_proj")
        up = self._linear(x, f"{layer}.mlp.up_proj")
        return self._linear(gelu_tanh(gate) * up, f"{layer}.mlp.down_proj")

    def _layer(self, x: F64, index: int) -> F64:
        layer = f"layers.{index}"
        shape = self._shape.attention[self._shape.layer_types[index]]
        y = self._attention(self._norm(x, f"{layer}.input_layernorm"), layer, shape)
        x = x + self._norm(y, f"{layer}.post_attention_layernorm")
        y = self._mlp(self._norm(x, f"{layer}.pre_feedforward_layernorm"), layer)
        return x + self._norm(y, f"{layer}.post_feedforward_layernorm")

    def _start(self, x: F64) -> None:
        """Whatever the layers need that is made from the embeddings."""

    def _head(self, pooled: F64) -> F64:
        for dense in self._dense:
            pooled = dense.weight.astype(np.float64) @ pooled
            if dense.bias is not None:
                pooled = pooled + dense.bias
        return pooled

    def forward(self, ids: I32) -> Reference:
        """What the checkpoint makes of token ids [tokens], special tokens included.

        hidden: the scaled embeddings, then each layer's output; the last norm is not in it.
        """
        hidden, embedding = self.encode(self.embed(ids))
        return Reference(ids, hidden, embedding)

    def encode(self, x: F64) -> tuple[F32, F32]:
        """(hidden, embedding) of what the first layer is given, [tokens, hidden_size]."""
        self._start(x)
        hidden = [x.astype(np.float32)]
        for index in range(len(self._shape.layer_types)):
            x = self._layer(x, index)
            hidden.append(x.astype(np.float32))
        vector = self._head(self._norm(x, "norm").mean(axis=0))
        if self._shape.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), NORM_FLOOR)
        return np.stack(hidden), vector.astype(np.float32)


class EmbeddingGemma2Reference(GemmaReference):
    """EmbeddingGemma 2's text encoder: norms by weight, a norm of v, per-layer inputs."""

    prefix = "language_model."
    _per_layer: NDArray[np.float64]  # [tokens, layers, hidden_size_per_layer_input]

    def _norm(self, x: F64, name: str) -> F64:
        return rms_norm(x, self._w(f"{name}.weight"), self._shape.rms_norm_eps)

    def _value_norm(self, v: F64) -> F64:
        return rms_norm(v, None, self._shape.rms_norm_eps)

    def _start(self, x: F64) -> None:
        flat = self._linear(x, "ple.per_layer_model_projection") / math.sqrt(x.shape[1])
        by_layer = flat.reshape(len(x), len(self._shape.layer_types), -1)
        self._per_layer = self._norm(by_layer, "ple.per_layer_projection_norm")

    def _layer(self, x: F64, index: int) -> F64:
        x = super()._layer(x, index)
        block = f"layers.{index}.ple_block"
        gate = gelu_tanh(self._linear(x, f"{block}.per_layer_input_gate"))
        y = self._linear(gate * self._per_layer[:, index], f"{block}.per_layer_projection")
        x = x + self._norm(y, f"{block}.post_per_layer_input_norm")
        return x * self._w(f"layers.{index}.layer_scalar")

    def _head(self, pooled: F64) -> F64:
        return self._linear(pooled, "embedding_projection")  # linear, so it commutes with the mean
