"""BERT and its relatives: a checkpoint's weights as GEMMs and attention on the array.

Four GEMMs a layer, all with bias: qkv (q | k | v side by side), o, up (with the activation), down.
Attention reads the qkv GEMM's result in place, and what it writes is the o GEMM's A; down reads
up's result in place. The attention scale and the change to base 2, log2(e) / sqrt(head_dim), are
folded into q.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .assemble import assemble
from .bert_config import BertConfig, bert_config
from .buckets import TEXT_STEPS, buckets_for
from .checkpoint import Checkpoint
from .geometry import K_TILE, N_TILE, NO_WINDOW, M, round_up
from .kernels import Gemm, Mha, all_kernels
from .pack import pack_gemm
from .parts import Options, Parts, Progress
from .reference import BertReference, BertShape
from .selfcheck import make_references
from .weights import F32, Weights

MAX_CHUNKS = 32

_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_HOST_TABLES = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    _TOKEN_TYPES,
)

# A tensor in float32 by BERT's name, whatever the checkpoint calls it.
Read = Callable[[str], F32]


def layer_name(layer: int) -> str:
    """HF's name of an encoder layer."""
    return f"encoder.layer.{layer}"


def norm_names(config: BertConfig) -> tuple[str, ...]:
    """HF's names of all LayerNorms."""
    layers = [layer_name(i) for i in range(config.num_hidden_layers)]
    norms = [f"{layer}.{part}" for layer in layers for part in ("attention.output", "output")]
    return tuple(f"{owner}.LayerNorm" for owner in ("embeddings", *norms))


def tensor_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model has, by BERT's name."""
    d, up = config.hidden_size, config.intermediate_size
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    shapes: dict[str, tuple[int, ...]] = {
        name: (n, d) for name, n in zip(_HOST_TABLES, rows, strict=True)
    }
    for norm in norm_names(config):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (d,)
    linears = {
        "attention.self.query": (d, d),
        "attention.self.key": (d, d),
        "attention.self.value": (d, d),
        "attention.output.dense": (d, d),
        "intermediate.dense": (up, d),
        "output.dense": (d, up),
    }
    for i in range(config.num_hidden_layers):
        for linear, (out, into) in linears.items():
            shapes[f"{layer_name(i)}.{linear}.weight"] = (out, into)
            shapes[f"{layer_name(i)}.{linear}.bias"] = (out,)
    return shapes


def reader(checkpoint: Checkpoint, config: BertConfig) -> Read:
    """The checkpoint's tensors by BERT's names; token types that it has not are zeros."""
    family, shapes = config.family, tensor_shapes(config)
    absent = {} if family.token_types else {_TOKEN_TYPES: shapes.pop(_TOKEN_TYPES)}
    weights = Weights(
        checkpoint.weights_path,
        {family.name(name): shape for name, shape in shapes.items()},
        prefix=family.prefix,
        ignored=family.ignored,
    )

    def read(name: str) -> F32:
        if name in absent:
            return np.zeros(absent[name], np.float32)
        return weights.f32(family.name(name))

    return read


def bert_parts(checkpoint: Checkpoint, options: Options, progress: Progress) -> Parts:
    """The bundle of a BERT, RoBERTa, XLM-RoBERTa or DistilBERT checkpoint.

    Raises:
        BundleError: the checkpoint is none of them as this engine computes as Hugging Face would.
        InputError: attention is wanted on the host.
    """
    if options.attention != "npu":
        raise InputError(
            f"attention={options.attention!r}: a BERT's attention runs on the NPU, wanted 'npu'."
        )
    config = bert_config(checkpoint)
    progress("read", 0, 1)
    read = reader(checkpoint, config)
    progress("read", 1, 1)
    tensors = {table: read(table) for table in _HOST_TABLES}
    for norm in norm_names(config):
        for part in ("weight", "bias"):
            tensors[f"{norm}.{part}"] = read(f"{norm}.{part}")
    packed = _packed(config, read, progress)
    references = make_references(
        checkpoint,
        config.max_tokens,
        config.vocab_size,
        bert_reference(config, read).forward,
        progress,
    )
    gemms, mha = _kernels(config)
    kernels = all_kernels(
        gemms,
        (mha,),
        max_chunks=MAX_CHUNKS,
        buckets=buckets_for(config.max_tokens, TEXT_STEPS),
        target=options.target,
        progress=progress,
    )
    return assemble(
        checkpoint,
        _params(config, options),
        {**tensors, **packed},
        references=references,
        kernels=kernels,
        mhas=(mha,),
    )


def _params(config: BertConfig, options: Options) -> dict[str, str | int | float]:
    return {
        "name": options.name,
        "family": config.model_type,
        "target": options.target,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.layer_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "pad_token_id": config.pad_token_id,
        "hidden_act": config.hidden_act,
        "pooling": config.pooling,
        "normalize": int(config.normalize),
        "dim": config.hidden_size,
        "max_tokens": config.max_tokens,
        "max_rows": MAX_CHUNKS * M,
        "no_window": NO_WINDOW,
        "stages": ",".join(config.stages),
    }


def _packed(config: BertConfig, read: Read, progress: Progress) -> dict[str, NDArray[np.uint8]]:
    packed = {}
    scale = np.float32(math.log2(math.e) / math.sqrt(config.head_dim))

    def linear(name: str) -> tuple[F32, F32]:
        return read(f"{name}.weight").T, read(f"{name}.bias")

    for i in range(config.num_hidden_layers):
        progress("pack", i, config.num_hidden_layers)
        layer = layer_name(i)
        attention = [linear(f"{layer}.attention.self.{part}") for part in ("query", "key", "value")]
        (q, q_bias), *rest = attention
        attention = [(q * scale, q_bias * scale), *rest]
        gemms = {
            "qkv": (
                np.concatenate([weight for weight, _ in attention], axis=1),
                np.concatenate([bias for _, bias in attention]),
            ),
            "o": linear(f"{layer}.attention.output.dense"),
            "up": linear(f"{layer}.intermediate.dense"),
            "down": linear(f"{layer}.output.dense"),
        }
        for key, (weight, bias) in gemms.items():
            packed[f"{layer}.{key}.packed"] = pack_gemm(weight, bias)
    progress("pack", config.num_hidden_layers, config.num_hidden_layers)
    return packed


def _kernels(config: BertConfig) -> tuple[tuple[Gemm, ...], Mha]:
    d, heads = config.hidden_size, config.num_attention_heads
    hidden = round_up(d, K_TILE)
    qkv = round_up(3 * d, N_TILE)
    inner = round_up(config.intermediate_size, K_TILE)
    gemms = (
        Gemm("qkv", K=hidden, N=qkv, lda=hidden, c_stride=qkv),
        Gemm("o", K=hidden, N=hidden, lda=hidden, c_stride=hidden),
        Gemm("up", K=hidden, N=inner, lda=hidden, c_stride=inner, epilogue=config.epilogue),
        Gemm("down", K=inner, N=hidden, lda=inner, c_stride=hidden),
    )
    return gemms, Mha(heads, heads, config.head_dim, qkv_stride=qkv, o_stride=hidden)


def bert_reference(config: BertConfig, read: Read) -> BertReference:
    """The plain forward of a checkpoint's tensors."""
    shape = BertShape(
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        layer_norm_eps=config.layer_norm_eps,
        hidden_act=config.hidden_act,
        pooling=config.pooling,
        normalize=config.normalize,
        padding_idx=config.padding_idx,
    )
    return BertReference(read, shape)
