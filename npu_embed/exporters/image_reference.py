"""The image whose reference embedding a bundle carries, so that it can be checked where it runs.

Its size is one that needs no resizing: exporting does without Pillow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..images import ImageLimits, preprocess, target_size
from ..records import Record, make_record
from .gemma4_vision_config import Gemma4VisionConfig
from .gemma4_vision_reference import Gemma4VisionReference, VisionShape
from .gemma_reference import AttentionShape, EmbeddingGemma2Reference
from .reference import F32, I32
from .selfcheck import References, check_finite
from .weights import Weights

NAME = "waves"
_PROPORTIONS = 240, 320


def self_check_image(limits: ImageLimits) -> NDArray[np.uint8]:
    """Waves of three colours, [height, width, 3], of a size that stays as it is."""
    size = _PROPORTIONS
    while (resized := target_size(*size, limits)) != size:  # never gets smaller, nor past a budget
        size = resized
    y, x = np.mgrid[: size[0], : size[1]]
    waves = [np.sin(x / 17 + y / 41), np.sin(x / 29 - y / 13), np.sin(x * y / 4096)]
    return np.round(127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)


def vision_reference(config: Gemma4VisionConfig, weights: Weights) -> Gemma4VisionReference:
    """The tower in plain numpy."""
    heads = config.heads
    attention = AttentionShape(
        heads.num_attention_heads,
        heads.num_key_value_heads,
        heads.head_dim,
        rope_theta=config.rope_theta,
        scale=1.0,
        window=None,
    )
    shape = VisionShape(
        config.num_hidden_layers,
        attention,
        config.rms_norm_eps,
        config.limits.pooling_kernel_size,
    )
    return Gemma4VisionReference(weights, shape)


def image_embedding(
    vision: Gemma4VisionReference,
    text: EmbeddingGemma2Reference,
    tokens: tuple[int, int, int, int],
    pixels: F32,
    positions: I32,
) -> tuple[F32, F32]:
    """(soft tokens, embedding) of an image; `tokens` are the ids around its soft tokens."""
    soft = vision.forward(pixels, positions)
    bos, boi, eoi, eos = text.embed(np.array(tokens, dtype=np.int32))
    _, embedding = text.encode(np.vstack([bos, boi, soft, eoi, eos]))
    return soft.astype(np.float32), embedding


def image_references(
    config: Gemma4VisionConfig, weights: Weights, text: EmbeddingGemma2Reference
) -> References:
    """The `ref` record of a bundle and its tensors."""
    rgb = self_check_image(config.limits)
    patches = preprocess(rgb, config.limits)
    vision = vision_reference(config, weights)
    with np.errstate(all="ignore"):  # what is not finite at the end is refused
        soft, embedding = image_embedding(
            vision, text, config.tokens, patches.pixels, patches.positions
        )
    check_finite(f"image {NAME}", soft, embedding)
    tensors: dict[str, NDArray[Any]] = {
        "rgb": rgb,
        "pixels": patches.pixels,
        "positions": patches.positions,
        "soft": soft,
        "embedding": embedding,
    }
    record: Record = make_record("ref", NAME, rgb.shape[1], rgb.shape[0])
    return References((record,), {f"ref.{NAME}.{key}": tensor for key, tensor in tensors.items()})
