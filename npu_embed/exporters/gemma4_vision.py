"""Gemma 4's vision tower: a checkpoint's weights as GEMMs and attention on the array.

    patch       2 * pixels - 1 times B; the host adds a row of each of two tables of positions
    layers      as gemma_layers.py says, every patch seeing all of its image
    (host)      mean of each block of patches, its norm
    projection  to the width of the text encoder: a soft token

All its kernels and params end in `.vision`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buckets import IMAGE_STEPS, buckets_for
from .gemma4_vision_config import Gemma4VisionConfig
from .gemma_layers import (
    HOST_NORMS,
    attention_gemms,
    attention_kernels,
    layer_shapes,
    mlp_gemms,
    packed_layer,
)
from .geometry import K_TILE, N_TILE, M, round_up
from .kernels import Gemm, Kernels, Mha, all_kernels
from .pack import pack_gemm
from .parts import Options, Progress
from .weights import Weights

VISION = "vision"
SUFFIX = f".{VISION}"
LINEAR = "linear."  # a projection's weight is in a module of its own

PATCH = "vision_tower.patch_embedder.input_proj"
POSITIONS = "vision_tower.patch_embedder.position_embedding_table"
PROJECTION = "embed_vision.embedding_projection"


def vision_layer_name(layer: int) -> str:
    """HF's name of a layer of the tower."""
    return f"vision_tower.encoder.layers.{layer}"


def vision_shapes(config: Gemma4VisionConfig, text_hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tower, by HF's name."""
    d, positions = config.hidden_size, config.position_embedding_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{PATCH}.weight": (d, config.patch_values),
        POSITIONS: (2, positions, d),
        f"{PROJECTION}.weight": (text_hidden_size, d),
    }
    for i in range(config.num_hidden_layers):
        layer = vision_layer_name(i)
        shapes |= layer_shapes(layer, config.heads, d, config.intermediate_size, linear=LINEAR)
    return shapes


def vision_tensors(
    config: Gemma4VisionConfig, weights: Weights, progress: Progress
) -> dict[str, NDArray[Any]]:
    """The tower's tensors in the bundle."""
    tensors: dict[str, NDArray[Any]] = {POSITIONS: weights.table(POSITIONS)}
    for name in (PATCH, PROJECTION):
        tensors[f"{name}.packed"] = pack_gemm(weights.f32(f"{name}.weight").T, None)
    for i in range(config.num_hidden_layers):
        progress("pack images", i, config.num_hidden_layers)
        layer = vision_layer_name(i)
        for norm in HOST_NORMS:
            tensors[f"{layer}.{norm}.weight"] = weights.f32(f"{layer}.{norm}.weight")
        packed = packed_layer(weights, layer, add_to_norm=0, linear=LINEAR)
        tensors |= {f"{layer}.{key}.packed": block for key, block in packed.items()}
    progress("pack images", config.num_hidden_layers, config.num_hidden_layers)
    return tensors


def vision_params(config: Gemma4VisionConfig, max_rows: int) -> dict[str, str | int | float]:
    """The tower's params in the manifest."""
    heads, limits = config.heads, config.limits
    bos, boi, eoi, eos = config.tokens
    own: dict[str, str | int | float] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads.num_attention_heads,
        "num_key_value_heads": heads.num_key_value_heads,
        "head_dim": heads.head_dim,
        "position_embedding_size": config.position_embedding_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "patch_size": limits.patch_size,
        "pooling_kernel_size": limits.pooling_kernel_size,
        "max_rows": max_rows,
    }
    return {
        **{f"{name}{SUFFIX}": value for name, value in own.items()},
        "max_soft_tokens": limits.max_soft_tokens,
        "bos_token_id": bos,
        "boi_token_id": boi,
        "eoi_token_id": eoi,
        "eos_token_id": eos,
    }


def vision_chunks(config: Gemma4VisionConfig, at_least: int) -> int:
    """Chunks of the longest GEMM: an image's patches, and not fewer than the text encoder has."""
    return max(at_least, -(-config.limits.max_patches // M))


def vision_kernels(
    config: Gemma4VisionConfig,
    text_hidden_size: int,
    chunks: int,
    options: Options,
    progress: Progress,
) -> tuple[Kernels, tuple[Mha, ...]]:
    """The tower's kernels; its attention as well, () where that is on the host."""
    hidden, patch = round_up(config.hidden_size, K_TILE), round_up(config.patch_values, K_TILE)
    soft = round_up(text_hidden_size, N_TILE)
    mlp = mlp_gemms(config.hidden_size, config.intermediate_size)
    gemms = (
        Gemm(f"patch{SUFFIX}", K=patch, N=hidden, lda=patch, c_stride=hidden, bias=False),
        *attention_gemms(config.heads, config.hidden_size, SUFFIX),
        *(replace(gemm, key=f"{gemm.key}{SUFFIX}") for gemm in mlp),
        Gemm(f"projection{SUFFIX}", K=hidden, N=soft, lda=hidden, c_stride=soft, bias=False),
    )
    mhas = (attention_kernels(config.heads, VISION),) if options.attention == "npu" else ()
    kernels = all_kernels(
        gemms,
        mhas,
        max_chunks=chunks,
        buckets=buckets_for(config.limits.max_patches, IMAGE_STEPS),
        target=options.target,
        progress=progress,
    )
    return kernels, mhas


def is_bf16(tensors: dict[str, NDArray[Any]]) -> bool:
    """Whether the tables of positions hold the bits of bfloat16 numbers."""
    return tensors[POSITIONS].dtype == np.uint16
