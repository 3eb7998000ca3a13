"""A Gemma layer on the array: its tensors, GEMMs and attention.

No bias anywhere:

    qkv      the input norm's weight folded into B; q heads | k heads | v heads
    (host)   norms of q and k (and v), rotary positions, q times its scale and log2(e)
    mha      reads q | k | v side by side as the host put them, writes the A of o
    o
    gate_up  the norm's weight folded into B; a GeGLU pair, whose result is the A of down
    down
"""

from __future__ import annotations

import numpy as np

from ..specs import DEFAULT_MHA
from .gemma_config import Heads
from .geometry import K_TILE, Epilogue, round_up
from .kernels import Gemm, Mha
from .pack import U8, geglu_pair, pack_gemm
from .weights import F32, Weights

MAX_CHUNKS = 32

# Norms that stay on the host: those whose result a GEMM reads are folded into its B.
HOST_NORMS = (
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


def attention_kernels(heads: Heads, name: str = DEFAULT_MHA) -> Mha:
    """Attention over q | k | v as the host puts them."""
    return Mha(
        heads.num_attention_heads,
        heads.num_key_value_heads,
        heads.head_dim,
        qkv_stride=heads.qkv_stride,
        o_stride=heads.o_stride,
        name=name,
    )


def attention_gemms(heads: Heads, hidden_size: int, suffix: str = "") -> tuple[Gemm, Gemm]:
    """Qkv and o of one type of layer; keys end in `suffix`."""
    hidden, qkv, o = round_up(hidden_size, K_TILE), heads.qkv_stride, heads.o_stride
    return (
        Gemm(f"qkv{suffix}", K=hidden, N=qkv, lda=hidden, c_stride=qkv, bias=False),
        Gemm(f"o{suffix}", K=o, N=hidden, lda=o, c_stride=hidden, bias=False),
    )


def mlp_gemms(hidden_size: int, intermediate_size: int) -> tuple[Gemm, Gemm]:
    """gate_up and down."""
    hidden, inner = round_up(hidden_size, K_TILE), round_up(intermediate_size, K_TILE)
    pair = Epilogue.GEGLU_PAIR
    return (
        Gemm("gate_up", hidden, 2 * inner, hidden, inner, epilogue=pair, bias=False),
        Gemm("down", K=inner, N=hidden, lda=inner, c_stride=hidden, bias=False),
    )


def packed_layer(
    weights: Weights, layer: str, add_to_norm: float, linear: str = ""
) -> dict[str, U8]:
    """The packed B of the four GEMMs every layer has, by key without suffix.

    layer: HF's name of it; add_to_norm: 1 where norms multiply by 1 + weight, else 0; linear: what
    goes between a projection's name and its weight.
    """

    def projection(name: str) -> F32:
        transposed: F32 = weights.f32(f"{layer}.{name}.{linear}weight").T
        return transposed

    def normed(name: str, weight_kn: F32) -> F32:
        norm = weights.f32(f"{layer}.{name}.weight") + np.float32(add_to_norm)
        folded: F32 = norm[:, None] * weight_kn
        return folded

    qkv = np.concatenate([projection(f"self_attn.{part}_proj") for part in "qkv"], axis=1)
    pair = geglu_pair(projection("mlp.gate_proj"), projection("mlp.up_proj"))
    return {
        "qkv": pack_gemm(normed("input_layernorm", qkv), None),
        "o": pack_gemm(projection("self_attn.o_proj"), None),
        "gate_up": pack_gemm(normed("pre_feedforward_layernorm", pair), None),
        "down": pack_gemm(projection("mlp.down_proj"), None),
    }


def layer_shapes(
    layer: str, heads: Heads, hidden: int, inner: int, linear: str = ""
) -> dict[str, tuple[int, ...]]:
    """The tensors every layer has, by HF's name; linear as packed_layer takes it."""
    projections: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads.q_width, hidden),
        "self_attn.k_proj": (heads.kv_width, hidden),
        "self_attn.v_proj": (heads.kv_width, hidden),
        "self_attn.o_proj": (hidden, heads.q_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms: dict[str, tuple[int, ...]] = {
        "self_attn.q_norm": (heads.head_dim,),
        "self_attn.k_norm": (heads.head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
    }
    named = {f"{layer}.{name}.{linear}weight": shape for name, shape in projections.items()}
    return named | {f"{layer}.{name}.weight": shape for name, shape in norms.items()}
