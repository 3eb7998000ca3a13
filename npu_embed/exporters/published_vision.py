"""The vision tower of an embedding_gemma2 in the published layout.

As gemma4_vision.py has it, under other names, and with K of down cut into slices as wide as the
hidden state. Widths that are no whole tiles are padded, which those of the published model are not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bf16 import to_bf16
from ..errors import BundleError
from ..records import make_record
from .buckets import IMAGE_STEPS, buckets_for
from .gemma4_vision import (
    LINEAR,
    PATCH,
    POSITIONS,
    PROJECTION,
    vision_chunks,
    vision_layer_name,
)
from .gemma4_vision_config import Gemma4VisionConfig
from .gemma_layers import attention_kernels, packed_layer
from .geometry import K_TILE, N_TILE, Epilogue, M, round_up
from .kernels import Gemm, Kernels, Mha, all_kernels
from .pack import pack_gemm
from .parts import Options, Progress
from .selfcheck import References
from .weights import Weights


def check_vision(config: Gemma4VisionConfig) -> None:
    """Refuse a tower the layout cannot say.

    Raises:
        BundleError: naming the number.
    """
    heads, k = config.heads, _slice_width(config)
    if heads.num_attention_heads != heads.num_key_value_heads:
        raise BundleError(
            f"config.json: vision_config: {heads.num_key_value_heads} key/value heads, wanted "
            f"{heads.num_attention_heads} in the published layout; "
            "export in npu-embed's own layout."
        )
    if config.intermediate_size % k:
        raise BundleError(
            f"config.json: vision_config: intermediate_size {config.intermediate_size}, wanted a "
            f"multiple of {k} in the published layout; export in npu-embed's own layout."
        )


def vision_params(config: Gemma4VisionConfig) -> dict[str, str | int | float]:
    """The tower's params in the manifest."""
    return {
        "v.D": config.hidden_size,
        "v.I": config.intermediate_size,
        "v.layers": config.num_hidden_layers,
        "v.heads": config.heads.num_attention_heads,
        "v.hd": config.heads.head_dim,
        "v.patch": config.limits.patch_size,
        "v.pool": config.limits.pooling_kernel_size,
        "v.theta": config.rope_theta,
        "v.eps": config.rms_norm_eps,
        "v.rows": vision_chunks(config, at_least=1) * M,
        "max_soft_tokens": config.limits.max_soft_tokens,
    }


def vision_kernels(
    config: Gemma4VisionConfig, text_hidden_size: int, options: Options, progress: Progress
) -> tuple[Kernels, Mha]:
    """The tower's kernels; its attention, which is on the NPU in this layout."""
    d, k = round_up(config.hidden_size, K_TILE), _slice_width(config)
    patch, inner = round_up(config.patch_values, K_TILE), config.intermediate_size
    qkv, o = config.heads.qkv_stride, config.heads.o_stride
    soft = round_up(text_hidden_size, N_TILE)
    pair = Epilogue.GEGLU_PAIR
    gemms = (
        Gemm("v_patch", K=patch, N=d, lda=patch, c_stride=d, bias=False),
        Gemm("v_qkv", K=d, N=qkv, lda=d, c_stride=qkv, bias=False),
        Gemm("v_o", K=o, N=d, lda=o, c_stride=d, bias=False),
        Gemm("v_gu", K=d, N=2 * inner, lda=d, c_stride=inner, epilogue=pair, bias=False),
        Gemm("v_down", K=k, N=d, lda=inner, c_stride=d, bias=False),
    )
    projection = Gemm("v_ev", K=d, N=soft, lda=d, c_stride=soft, bias=False)
    mha = attention_kernels(config.heads)
    buckets = buckets_for(config.limits.max_patches, IMAGE_STEPS)
    chunks = vision_chunks(config, at_least=1)
    soft_tokens = chunks * M // config.limits.pooling_kernel_size**2
    soft_chunks = -(-soft_tokens // M)
    kernels = [
        all_kernels(
            some, mhas, max_chunks=n, buckets=buckets, target=options.target, progress=progress
        )
        for some, mhas, n in ((gemms, (mha,), chunks), ((projection,), (), soft_chunks))
    ]
    return kernels[0].joined(kernels[1]), mha


def vision_tensors(
    config: Gemma4VisionConfig, weights: Weights, embeddings: str, progress: Progress
) -> dict[str, NDArray[Any]]:
    """The tower's tensors, and the rows round an image's soft tokens of the table `embeddings`."""
    positions = weights.table(POSITIONS)
    frame = weights.rows(embeddings, np.array(config.tokens, dtype=np.int32))
    tensors: dict[str, NDArray[Any]] = {
        "v.patch": pack_gemm(weights.f32(f"{PATCH}.weight").T, None),
        "v.ev": pack_gemm(weights.f32(f"{PROJECTION}.weight").T, None),
        "v.pos": positions if positions.dtype == np.uint16 else to_bf16(positions),
        "t.tok": frame * np.float32(math.sqrt(frame.shape[1])),
    }
    k = _slice_width(config)
    for i in range(config.num_hidden_layers):
        progress("pack images", i, config.num_hidden_layers)
        layer = vision_layer_name(i)
        block = packed_layer(weights, layer, add_to_norm=0, linear=LINEAR)
        for key, name in (("qkv", "qkv"), ("o", "o"), ("gu", "gate_up")):
            tensors[f"v{i}.{key}"] = block[name]
        down = weights.f32(f"{layer}.mlp.down_proj.{LINEAR}weight").T
        for s, start in enumerate(range(0, len(down), k)):
            tensors[f"v{i}.down{s}"] = pack_gemm(down[start : start + k], None)
        for key, name in (
            ("q_norm", "self_attn.q_norm"),
            ("k_norm", "self_attn.k_norm"),
            ("post_attn", "post_attention_layernorm"),
            ("post_ff", "post_feedforward_layernorm"),
        ):
            tensors[f"v{i}.{key}"] = weights.f32(f"{layer}.{name}.weight")
    progress("pack images", config.num_hidden_layers, config.num_hidden_layers)
    return tensors


def reference_texts(references: References) -> References:
    """The `text` records of the texts without a prompt, by which images are told apart."""
    plain = [record for record in references.records if record.fields[1] == "-"]
    vectors = [references.tensors[f"tref.{record.fields[0]}.embedding"] for record in plain]
    records = [make_record("text", i, record.fields[2]) for i, record in enumerate(plain)]
    return References(tuple(records), {"ref.texts": np.stack(vectors)})


def _slice_width(config: Gemma4VisionConfig) -> int:
    """Rows of B in a slice of down."""
    return round_up(config.hidden_size, K_TILE)
