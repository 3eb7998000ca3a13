"""embedding_gemma2 in the layout of taconite's published bundles, for the emulated array.

K of o and down is cut into slices as wide as the hidden state, and attention is the
host's, as the published runtime has it. The layout is in docs/bundle-format.md; what reads it is
npu_embed/published.py, which shares no table with this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bf16 import to_bf16
from ..errors import BundleError
from ..records import Record, hex_text, make_record
from .assemble import assemble
from .checkpoint import Checkpoint
from .embedding_gemma2 import layer_name, tensor_shapes, text_reference
from .embedding_gemma2_config import EmbeddingGemma2Config, embedding_gemma2_config
from .gemma4_vision import vision_shapes
from .gemma4_vision_config import gemma4_vision_config
from .gemma_config import FULL, KINDS, SLIDING, Heads
from .gemma_layers import MAX_CHUNKS, packed_layer
from .geometry import K_TILE, NO_WINDOW, Epilogue, M
from .image_reference import image_references
from .kernels import Gemm, Mha, all_kernels
from .pack import pack_gemm
from .parts import Options, Parts, Progress
from .published_tokenizer import Tables, tokenizer_tables
from .published_vision import (
    check_vision,
    reference_texts,
    vision_kernels,
    vision_params,
    vision_tensors,
)
from .selfcheck import References, make_references
from .weights import F32, Weights

_TEXT = "language_model"
# The towers of other kinds of input, which a bundle does without.
_NO_INPUTS = ("audio_tower.", "embed_audio.")
_IMAGES = ("vision_tower.", "embed_vision.")
_LETTERS = {SLIDING: "s", FULL: "g"}


def published_parts(checkpoint: Checkpoint, options: Options, progress: Progress) -> Parts:
    """The bundle of an embedding_gemma2 checkpoint in the published layout.

    Raises:
        BundleError: the checkpoint is none this engine computes as Hugging Face would, or the
            layout cannot say what it is.
    """
    config = embedding_gemma2_config(checkpoint)
    _check(config)
    tables = tokenizer_tables(checkpoint)
    vision = gemma4_vision_config(checkpoint, config.max_tokens, config.vocab_size)
    wanted, ignored = tensor_shapes(config), list(_NO_INPUTS)
    if vision is None:
        ignored += _IMAGES
    else:
        check_vision(vision)
        wanted |= vision_shapes(vision, config.hidden_size)
    progress("read", 0, 1)
    weights = Weights(checkpoint.weights_path, wanted, ignored=ignored)
    progress("read", 1, 1)
    tensors = _tensors(config, weights, tables, progress)
    model = text_reference(config, weights)
    references = _whole_texts(
        make_references(checkpoint, config.max_tokens, config.vocab_size, model.forward, progress),
        config.max_tokens,
    )
    kernels = all_kernels(
        _gemms(config),
        (),
        max_chunks=MAX_CHUNKS,
        buckets=(),
        target=options.target,
        progress=progress,
    )
    params, bf16 = _params(config, options, tables), {"t.embed"}
    mhas: tuple[Mha, ...] = ()
    if vision is not None:
        params |= vision_params(vision)
        tensors |= vision_tensors(vision, weights, f"{_TEXT}.embed_tokens.weight", progress)
        images = image_references(vision, weights, model)
        references = references.joined(images).joined(reference_texts(references))
        more, mha = vision_kernels(vision, config.hidden_size, options, progress)
        kernels, mhas = kernels.joined(more), (mha,)
        bf16.add("v.pos")
    parts = assemble(
        checkpoint,
        params,
        tensors,
        references=references,
        kernels=kernels,
        mhas=mhas,
        bf16=frozenset(bf16),
    )
    added = [make_record("added", index, hex_text(text)) for index, text in tables.added]
    return replace(parts, records=(*parts.records, *added), published=True)


def _check(config: EmbeddingGemma2Config) -> None:
    """Refuse a model the layout cannot say: its buffers are as wide as its numbers are many."""
    width = config.hidden_size
    multiples = {
        "hidden_size": (width, K_TILE),
        "hidden_size_per_layer_input": (config.hidden_size_per_layer_input, K_TILE),
        "intermediate_size": (config.intermediate_size, width),
    }
    for kind, heads in config.heads.items():
        multiples[f"width of {KINDS[kind]} heads"] = (heads.q_width, width)
        multiples[f"width of {KINDS[kind]} q, k and v"] = (_qkv(heads), K_TILE)
    for name, (found, wanted) in multiples.items():
        if found % wanted:
            raise BundleError(
                f"config.json: {name} {found}, wanted a multiple of {wanted} in the published "
                "layout; export in npu-embed's own layout."
            )
    queries = {heads.num_attention_heads for heads in config.heads.values()}
    if len(queries) > 1 or not config.normalize:
        raise BundleError(
            f"config.json: {sorted(queries)} query heads, Normalize {config.normalize}, wanted one "
            "number and Normalize in the published layout; export in npu-embed's own layout."
        )


def _qkv(heads: Heads) -> int:
    return heads.q_width + 2 * heads.kv_width


def _params(
    config: EmbeddingGemma2Config, options: Options, tables: Tables
) -> dict[str, str | int | float]:
    by_layer = [config.heads[kind] for kind in config.layer_types]
    return {
        "name": options.name,
        "target": options.target,
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "heads": by_layer[0].num_attention_heads,
        "eps": config.rms_norm_eps,
        "hd": ",".join(str(heads.head_dim) for heads in by_layer),
        "kv_heads": ",".join(str(heads.num_key_value_heads) for heads in by_layer),
        "layer_types": ",".join(_LETTERS[kind] for kind in config.layer_types),
        "theta_s": config.rope_local_base_freq,
        "theta_g": config.rope_theta,
        "ple": config.hidden_size_per_layer_input,
        "out": config.embedding_dim,
        "window": config.window,
        "t.rows": MAX_CHUNKS * M,
        "o_width": _o_width(config),
        "no_window": NO_WINDOW,
        "max_text_tokens": config.max_tokens,
        "bos": tables.bos,
        "eos": tables.eos,
    }


def _o_width(config: EmbeddingGemma2Config) -> int:
    """Elements of a row of attention's results, whichever the type of layer."""
    return max(heads.q_width for heads in config.heads.values())


def _gemms(config: EmbeddingGemma2Config) -> tuple[Gemm, ...]:
    d, inner, ple = (
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size_per_layer_input,
    )
    widths = dict.fromkeys(_qkv(heads) for heads in config.heads.values())
    every_ple = config.num_hidden_layers * ple
    pair, gelu = Epilogue.GEGLU_PAIR, Epilogue.GELU_TANH
    return (
        Gemm("t_ple", K=d, N=every_ple, lda=d, c_stride=every_ple, bias=False),
        *(Gemm(f"t_qkv{n}", K=d, N=n, lda=d, c_stride=n, bias=False) for n in widths),
        Gemm("t_o", K=d, N=d, lda=_o_width(config), c_stride=d, bias=False),
        Gemm("t_gu", K=d, N=2 * inner, lda=d, c_stride=inner, epilogue=pair, bias=False),
        Gemm("t_down", K=d, N=d, lda=inner, c_stride=d, bias=False),
        Gemm("t_pleg", K=d, N=ple, lda=d, c_stride=ple, epilogue=gelu, bias=False),
        Gemm("t_plep", K=ple, N=d, lda=ple, c_stride=d, bias=False),
    )


def _tensors(
    config: EmbeddingGemma2Config, weights: Weights, tables: Tables, progress: Progress
) -> dict[str, NDArray[Any]]:
    def f32(name: str) -> F32:
        return weights.f32(f"{_TEXT}.{name}")

    def packed(name: str) -> NDArray[np.uint8]:
        return pack_gemm(f32(name).T, None)

    embeddings = weights.table(f"{_TEXT}.embed_tokens.weight")
    tensors: dict[str, NDArray[Any]] = {
        "t.ple": packed("ple.per_layer_model_projection.weight"),
        "t.ple_norm": f32("ple.per_layer_projection_norm.weight"),
        "t.norm": f32("norm.weight"),
        "t.proj": f32("embedding_projection.weight"),
        "t.embed": embeddings if embeddings.dtype == np.uint16 else to_bf16(embeddings),
        "tok.vocab": tables.vocab,
        "tok.vocab_off": tables.offsets,
        "tok.merges": tables.merges,
    }
    scalars = []
    for i in range(config.num_hidden_layers):
        progress("pack", i, config.num_hidden_layers)
        layer = layer_name(i).removeprefix(f"{_TEXT}.")
        block = packed_layer(weights, layer_name(i), add_to_norm=0)
        tensors[f"t{i}.qkv"], tensors[f"t{i}.gu"] = block["qkv"], block["gate_up"]
        for key, name in (("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
            parts = _slices(f32(f"{layer}.{name}.weight").T, config.hidden_size)
            tensors |= {f"t{i}.{key}{s}": pack_gemm(part, None) for s, part in enumerate(parts)}
        tensors[f"t{i}.pleg"] = packed(f"{layer}.ple_block.per_layer_input_gate.weight")
        tensors[f"t{i}.plep"] = packed(f"{layer}.ple_block.per_layer_projection.weight")
        for key, name in (
            ("q_norm", "self_attn.q_norm"),
            ("k_norm", "self_attn.k_norm"),
            ("post_attn", "post_attention_layernorm"),
            ("post_ff", "post_feedforward_layernorm"),
            ("post_ple", "ple_block.post_per_layer_input_norm"),
        ):
            tensors[f"t{i}.{key}"] = f32(f"{layer}.{name}.weight")
        scalars.append(f32(f"{layer}.layer_scalar"))
    progress("pack", config.num_hidden_layers, config.num_hidden_layers)
    tensors["t.layer_scalar"] = np.concatenate(scalars)
    return tensors


def _slices(weight_kn: F32, k: int) -> list[F32]:
    """B [K, N] cut into rows of k."""
    return [weight_kn[start : start + k] for start in range(0, len(weight_kn), k)]


def _whole_texts(references: References, max_tokens: int) -> References:
    """The references as the layout has them: no rows of single layers, no text that is cut.

    The layout's own runtime refuses a text past its limit.
    """
    records: list[Record] = []
    tensors: dict[str, NDArray[Any]] = {}
    for record in references.records:
        old, new = f"tref.{record.fields[0]}", f"tref.{len(records)}"
        if len(references.tensors[f"{old}.ids"]) >= max_tokens:
            continue
        for name in ("ids", "embedding"):
            tensors[f"{new}.{name}"] = references.tensors[f"{old}.{name}"]
        records.append(make_record("tref", len(records), *record.fields[1:]))
    return References(tuple(records), tensors)
