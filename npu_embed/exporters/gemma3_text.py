"""gemma3_text (EmbeddingGemma): a checkpoint's weights as GEMMs and attention on the array.

gemma_layers.py says how a layer runs. Norms multiply by 1 + weight here, and that sum is what the
bundle holds. After the mean over a text's tokens each Dense module is a GEMM over texts.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .assemble import assemble
from .buckets import TEXT_STEPS, buckets_for
from .checkpoint import Checkpoint
from .dense import dense_gemms
from .gemma3_config import MODEL_TYPE, Gemma3Config, gemma3_config
from .gemma_config import ACTIVATION, FULL, POOLING, SLIDING
from .gemma_layers import (
    HOST_NORMS,
    MAX_CHUNKS,
    attention_gemms,
    attention_kernels,
    layer_shapes,
    mlp_gemms,
    packed_layer,
)
from .gemma_reference import AttentionShape, Dense, GemmaReference, GemmaShape
from .geometry import NO_WINDOW, M
from .kernels import all_kernels
from .pack import pack_gemm
from .parts import Options, Parts, Progress
from .selfcheck import References, make_references
from .weights import Weights

_PREFIX = "model."
_EMBEDDINGS = "embed_tokens.weight"
_NORM = "norm.weight"


def tensor_shapes(config: Gemma3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor the model has, by HF's name."""
    d, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDINGS: (config.vocab_size, d), _NORM: (d,)}
    for i in range(config.num_hidden_layers):
        shapes |= layer_shapes(f"layers.{i}", config.heads, d, inner)
    return shapes


def gemma3_parts(checkpoint: Checkpoint, options: Options, progress: Progress) -> Parts:
    """A gemma3_text checkpoint's bundle.

    Raises:
        BundleError: the checkpoint is none this engine computes as Hugging Face would.
    """
    config = gemma3_config(checkpoint)
    progress("read", 0, 1)
    weights = Weights(checkpoint.weights_path, tensor_shapes(config), prefix=_PREFIX)
    dense = [Dense(*module.weights()) for module in config.dense]
    progress("read", 1, 1)

    embeddings = weights.table(_EMBEDDINGS)
    tensors: dict[str, NDArray[Any]] = {
        _EMBEDDINGS: embeddings,
        _NORM: 1 + weights.f32(_NORM),
    }
    for i in range(config.num_hidden_layers):
        progress("pack", i, config.num_hidden_layers)
        layer = f"layers.{i}"
        for norm in HOST_NORMS:
            tensors[f"{layer}.{norm}.weight"] = 1 + weights.f32(f"{layer}.{norm}.weight")
        for key, packed in packed_layer(weights, layer, add_to_norm=1).items():
            tensors[f"{layer}.{key}.packed"] = packed
    for j, module in enumerate(dense):
        tensors[f"dense.{j}.packed"] = pack_gemm(module.weight.T, module.bias)
    progress("pack", config.num_hidden_layers, config.num_hidden_layers)

    references = _references(checkpoint, config, weights, dense, progress)
    mhas = (attention_kernels(config.heads),) if options.attention == "npu" else ()
    kernels = all_kernels(
        (
            *attention_gemms(config.heads, config.hidden_size),
            *mlp_gemms(config.hidden_size, config.intermediate_size),
            *dense_gemms(config.dense),
        ),
        mhas,
        max_chunks=MAX_CHUNKS,
        buckets=buckets_for(config.max_tokens, TEXT_STEPS),
        target=options.target,
        progress=progress,
    )
    return assemble(
        checkpoint,
        _params(config, options),
        tensors,
        references=references,
        kernels=kernels,
        mhas=mhas,
        bf16=frozenset({_EMBEDDINGS} if embeddings.itemsize == 2 else ()),
    )


def _params(config: Gemma3Config, options: Options) -> dict[str, str | int | float]:
    return {
        "name": options.name,
        "family": MODEL_TYPE,
        "target": options.target,
        "attention": options.attention,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.heads.num_attention_heads,
        "num_key_value_heads": config.heads.num_key_value_heads,
        "head_dim": config.heads.head_dim,
        "layer_types": ",".join(config.layer_types),
        "sliding_window": config.sliding_window,
        "window": config.window,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.rope_local_base_freq,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "pad_token_id": config.pad_token_id,
        "hidden_activation": ACTIVATION,
        "pooling": POOLING,
        "dense": len(config.dense),
        "normalize": int(config.normalize),
        "dim": config.dim,
        "max_tokens": config.max_tokens,
        "max_rows": MAX_CHUNKS * M,
        "no_window": NO_WINDOW,
        "stages": ",".join(config.stages),
    }


def _references(
    checkpoint: Checkpoint,
    config: Gemma3Config,
    weights: Weights,
    dense: list[Dense],
    progress: Progress,
) -> References:
    def attention(rope_theta: float, window: int | None) -> AttentionShape:
        return AttentionShape(
            config.heads.num_attention_heads,
            config.heads.num_key_value_heads,
            config.heads.head_dim,
            rope_theta=rope_theta,
            scale=config.query_pre_attn_scalar**-0.5,
            window=window,
        )

    shape = GemmaShape(
        layer_types=config.layer_types,
        attention={
            SLIDING: attention(config.rope_local_base_freq, config.window),
            FULL: attention(config.rope_theta, None),
        },
        rms_norm_eps=config.rms_norm_eps,
        normalize=config.normalize,
    )
    model = GemmaReference(weights, shape, dense)
    return make_references(
        checkpoint, config.max_tokens, config.vocab_size, model.forward, progress
    )
