"""embedding_gemma2: a checkpoint's weights as GEMMs and attention on the array.

The tower that makes soft tokens of images is in gemma4_vision.py; this is the text encoder.
gemma_layers.py says how a layer runs; here it ends with a block of its own, fed by the per-layer
inputs that the `ple` GEMM makes of the embeddings before the first layer:

    ple_gate  gelu(x B), with x as it is: no norm before it
    (host)    times the layer's per-layer input
    ple_proj

Sliding and full layers differ in their heads, so their qkv, o and attention kernels end in
`.sliding` and `.full`. The projection to the embedding's length stays on the host: it is linear, so
it is applied once a text, after the mean.
"""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from .assemble import assemble
from .buckets import TEXT_STEPS, buckets_for
from .checkpoint import Checkpoint
from .embedding_gemma2_config import (
    MODEL_TYPE,
    EmbeddingGemma2Config,
    embedding_gemma2_config,
)
from .gemma4_vision import POSITIONS as IMAGE_POSITIONS
from .gemma4_vision import (
    is_bf16,
    vision_chunks,
    vision_kernels,
    vision_params,
    vision_shapes,
    vision_tensors,
)
from .gemma4_vision_config import gemma4_vision_config
from .gemma_config import ACTIVATION, FULL, KINDS, POOLING, SLIDING
from .gemma_layers import (
    HOST_NORMS,
    MAX_CHUNKS,
    attention_gemms,
    attention_kernels,
    layer_shapes,
    mlp_gemms,
    packed_layer,
)
from .gemma_reference import AttentionShape, EmbeddingGemma2Reference, GemmaShape
from .geometry import K_TILE, N_TILE, NO_WINDOW, Epilogue, M, round_up
from .image_reference import image_references
from .kernels import Gemm, all_kernels
from .pack import pack_gemm
from .parts import Options, Parts, Progress
from .selfcheck import make_references
from .weights import Weights

logger = logging.getLogger(__name__)

_TEXT = "language_model."
_EMBEDDINGS = f"{_TEXT}embed_tokens.weight"
_NORM = f"{_TEXT}norm.weight"
_PROJECTION = f"{_TEXT}embedding_projection.weight"
_PLE = f"{_TEXT}ple.per_layer_model_projection.weight"
_PLE_NORM = f"{_TEXT}ple.per_layer_projection_norm.weight"
_PLE_GATE = "ple_block.per_layer_input_gate.weight"
_PLE_PROJECTION = "ple_block.per_layer_projection.weight"
_PLE_POST_NORM = "ple_block.post_per_layer_input_norm"
# The towers of other kinds of input, which a bundle does without.
_NO_INPUTS = ("audio_tower.", "embed_audio.")
_IMAGES = ("vision_tower.", "embed_vision.")


def layer_name(layer: int) -> str:
    """HF's name of a text layer."""
    return f"{_TEXT}layers.{layer}"


def tensor_shapes(config: EmbeddingGemma2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor the text encoder has, by HF's name."""
    d, inner, ple = (
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size_per_layer_input,
    )
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDINGS: (config.vocab_size, d),
        _NORM: (d,),
        _PROJECTION: (config.embedding_dim, d),
        _PLE: (config.num_hidden_layers * ple, d),
        _PLE_NORM: (ple,),
    }
    for i, kind in enumerate(config.layer_types):
        layer = layer_name(i)
        shapes |= layer_shapes(layer, config.heads[kind], d, inner)
        shapes[f"{layer}.{_PLE_GATE}"] = (ple, d)
        shapes[f"{layer}.{_PLE_PROJECTION}"] = (d, ple)
        shapes[f"{layer}.{_PLE_POST_NORM}.weight"] = (d,)
        shapes[f"{layer}.layer_scalar"] = (1,)
    return shapes


def embedding_gemma2_parts(checkpoint: Checkpoint, options: Options, progress: Progress) -> Parts:
    """The bundle of an embedding_gemma2 checkpoint: texts, and images where it has their tower.

    Raises:
        BundleError: the checkpoint is none this engine computes as Hugging Face would.
    """
    config = embedding_gemma2_config(checkpoint)
    vision = gemma4_vision_config(checkpoint, config.max_tokens, config.vocab_size)
    wanted = tensor_shapes(config)
    ignored = _NO_INPUTS if vision is not None else (*_NO_INPUTS, *_IMAGES)
    if vision is not None:
        wanted |= vision_shapes(vision, config.hidden_size)
    progress("read", 0, 1)
    weights = Weights(checkpoint.weights_path, wanted, ignored=ignored)
    progress("read", 1, 1)
    if checkpoint.config.has("audio_config"):
        logger.info("%s: the bundle embeds no audio.", options.name)

    model = text_reference(config, weights)
    tensors = _tensors(config, weights, progress)
    references = make_references(
        checkpoint, config.max_tokens, config.vocab_size, model.forward, progress
    )
    on_npu = config.heads.items() if options.attention == "npu" else ()
    mhas = tuple(attention_kernels(heads, KINDS[kind]) for kind, heads in on_npu)
    kernels = all_kernels(
        _gemms(config),
        mhas,
        max_chunks=MAX_CHUNKS,
        buckets=buckets_for(config.max_tokens, TEXT_STEPS),
        target=options.target,
        progress=progress,
    )
    params = _params(config, options)
    bf16 = {_EMBEDDINGS} if tensors[_EMBEDDINGS].itemsize == 2 else set()
    if vision is not None:
        tensors |= vision_tensors(vision, weights, progress)
        progress("image reference", 0, 1)
        references = references.joined(image_references(vision, weights, model))
        progress("image reference", 1, 1)
        chunks = vision_chunks(vision, at_least=MAX_CHUNKS)
        params |= vision_params(vision, chunks * M)
        more, attention = vision_kernels(vision, config.hidden_size, chunks, options, progress)
        kernels, mhas = kernels.joined(more), (*mhas, *attention)
        bf16 |= {IMAGE_POSITIONS} if is_bf16(tensors) else set()
    return assemble(
        checkpoint,
        params,
        tensors,
        references=references,
        kernels=kernels,
        mhas=mhas,
        bf16=frozenset(bf16),
    )


def _tensors(
    config: EmbeddingGemma2Config, weights: Weights, progress: Progress
) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        _EMBEDDINGS: weights.table(_EMBEDDINGS),
        f"{_TEXT}ple.packed": pack_gemm(weights.f32(_PLE).T, None),
    }
    for name in (_NORM, _PROJECTION, _PLE_NORM):
        tensors[name] = weights.f32(name)
    for i in range(config.num_hidden_layers):
        progress("pack", i, config.num_hidden_layers)
        layer = layer_name(i)
        for norm in (*HOST_NORMS, _PLE_POST_NORM):
            tensors[f"{layer}.{norm}.weight"] = weights.f32(f"{layer}.{norm}.weight")
        tensors[f"{layer}.layer_scalar"] = weights.f32(f"{layer}.layer_scalar")
        packed = packed_layer(weights, layer, add_to_norm=0)
        packed["ple_gate"] = pack_gemm(weights.f32(f"{layer}.{_PLE_GATE}").T, None)
        packed["ple_proj"] = pack_gemm(weights.f32(f"{layer}.{_PLE_PROJECTION}").T, None)
        for key, block in packed.items():
            tensors[f"{layer}.{key}.packed"] = block
    progress("pack", config.num_hidden_layers, config.num_hidden_layers)
    return tensors


def _gemms(config: EmbeddingGemma2Config) -> tuple[Gemm, ...]:
    hidden = round_up(config.hidden_size, K_TILE)
    ple = round_up(config.hidden_size_per_layer_input, K_TILE)
    all_ple = round_up(config.num_hidden_layers * config.hidden_size_per_layer_input, N_TILE)
    gelu = Epilogue.GELU_TANH
    attention = [
        gemm
        for kind, heads in config.heads.items()
        for gemm in attention_gemms(heads, config.hidden_size, f".{KINDS[kind]}")
    ]
    return (
        Gemm("ple", K=hidden, N=all_ple, lda=hidden, c_stride=all_ple, bias=False),
        *attention,
        *mlp_gemms(config.hidden_size, config.intermediate_size),
        Gemm("ple_gate", hidden, ple, lda=hidden, c_stride=ple, epilogue=gelu, bias=False),
        Gemm("ple_proj", K=ple, N=hidden, lda=ple, c_stride=hidden, bias=False),
    )


def _params(config: EmbeddingGemma2Config, options: Options) -> dict[str, str | int | float]:
    by_kind: dict[str, str | int | float] = {}
    for kind, heads in config.heads.items():
        by_kind[f"num_attention_heads.{KINDS[kind]}"] = heads.num_attention_heads
        by_kind[f"num_key_value_heads.{KINDS[kind]}"] = heads.num_key_value_heads
        by_kind[f"head_dim.{KINDS[kind]}"] = heads.head_dim
    return {
        "name": options.name,
        "family": MODEL_TYPE,
        "target": options.target,
        "attention": options.attention,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        **by_kind,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
        "embedding_dim": config.embedding_dim,
        "layer_types": ",".join(config.layer_types),
        "sliding_window": config.sliding_window,
        "window": config.window,
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.rope_local_base_freq,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "pad_token_id": config.pad_token_id,
        "hidden_activation": ACTIVATION,
        "pooling": POOLING,
        "normalize": int(config.normalize),
        "dim": config.embedding_dim,
        "max_tokens": config.max_tokens,
        "max_rows": MAX_CHUNKS * M,
        "no_window": NO_WINDOW,
        "stages": ",".join(config.stages),
    }


def text_reference(config: EmbeddingGemma2Config, weights: Weights) -> EmbeddingGemma2Reference:
    """The text encoder in plain numpy."""
    positions = {
        SLIDING: (config.rope_local_base_freq, config.window),
        FULL: (config.rope_theta, None),
    }
    shape = GemmaShape(
        layer_types=config.layer_types,
        attention={
            kind: AttentionShape(
                heads.num_attention_heads,
                heads.num_key_value_heads,
                heads.head_dim,
                rope_theta=positions[kind][0],
                scale=1.0,
                window=positions[kind][1],
            )
            for kind, heads in config.heads.items()
        },
        rms_norm_eps=config.rms_norm_eps,
        normalize=config.normalize,
    )
    return EmbeddingGemma2Reference(weights, shape)
