"""Gemma 4's vision tower in plain numpy: what a bundle's image embeddings are checked against.

Computed in float64 from the checkpoint's own weights, one image at a time; it shares no code with
the engine.

Source: transformers' gemma4 vision model in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .gemma_reference import AttentionShape, Source, attend, rms_norm
from .reference import F32, F64, I32, gelu_tanh


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The numbers of a vision tower a forward needs."""

    num_hidden_layers: int
    attention: AttentionShape
    rms_norm_eps: float
    pooling_kernel_size: int


def rotate_axial(x: F64, positions: I32, theta: float) -> F64:
    """The first half of every head turned by x, the second by y; x [patches, heads, d].

    In each half number i pairs with i + d/4.
    """
    quarter = x.shape[-1] // 4
    parts = np.split(x, 4, axis=-1)
    turned = []
    for axis in (0, 1):
        angles = positions[:, axis, None] * theta ** (-np.arange(quarter) / quarter)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = parts[2 * axis], parts[2 * axis + 1]
        turned += [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate(turned, axis=-1)


class Gemma4VisionReference:
    """The tower: patches of an image -> its soft tokens."""

    def __init__(self, source: Source, shape: VisionShape) -> None:
        self._source = source
        self._shape = shape

    def _w(self, name: str) -> F64:
        return self._source.f32(name).astype(np.float64)

    def _linear(self, x: F64, name: str) -> F64:
        product: F64 = x @ self._w(f"{name}.weight").T
        return product

    def _norm(self, x: F64, name: str) -> F64:
        return rms_norm(x, self._w(f"{name}.weight"), self._shape.rms_norm_eps)

    def _attention(self, x: F64, positions: I32, layer: str) -> F64:
        shape = self._shape.attention

        def project(name: str) -> F64:
            flat = self._linear(x, f"{layer}.{name}_proj.linear")
            return flat.reshape(len(x), -1, shape.head_dim)

        q, k = (
            rotate_axial(
                self._norm(project(name), f"{layer}.{name}_norm"), positions, shape.rope_theta
            )
            for name in "qk"
        )
        v = rms_norm(project("v"), None, self._shape.rms_norm_eps)
        return self._linear(attend(q, k, v, shape), f"{layer}.o_proj.linear")

    def _mlp(self, x: F64, mlp: str) -> F64:
        gate, up = (self._linear(x, f"{mlp}.{name}_proj.linear") for name in ("gate", "up"))
        return self._linear(gelu_tanh(gate) * up, f"{mlp}.down_proj.linear")

    def _pool(self, x: F64, positions: I32) -> F64:
        """The mean of each block of patches, in the order of the blocks."""
        k = self._shape.pooling_kernel_size
        columns = (int(positions[:, 0].max()) + 1) // k
        block = positions[:, 0] // k + columns * (positions[:, 1] // k)
        pooled = np.zeros((len(x) // k**2, x.shape[1]))
        np.add.at(pooled, block, x)
        return pooled / k**2

    def forward(self, pixels: F32, positions: I32) -> F64:
        """The soft tokens [patches / kernel^2, hidden size of the text encoder].

        pixels [patches, values] from 0 to 1, positions (x, y) [patches, 2].
        """
        tables = self._w("vision_tower.patch_embedder.position_embedding_table")
        x = self._linear(
            2 * pixels.astype(np.float64) - 1, "vision_tower.patch_embedder.input_proj"
        )
        x = x + tables[0, positions[:, 0]] + tables[1, positions[:, 1]]
        for i in range(self._shape.num_hidden_layers):
            layer = f"vision_tower.encoder.layers.{i}"
            normed = self._norm(x, f"{layer}.input_layernorm")
            y = self._attention(normed, positions, f"{layer}.self_attn")
            x = x + self._norm(y, f"{layer}.post_attention_layernorm")
            y = self._mlp(self._norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
            x = x + self._norm(y, f"{layer}.post_feedforward_layernorm")
        pooled = self._pool(x, positions) * math.sqrt(x.shape[1])
        normed = rms_norm(pooled, None, self._shape.rms_norm_eps)
        return self._linear(normed, "embed_vision.embedding_projection")
