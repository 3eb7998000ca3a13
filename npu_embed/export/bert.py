"""BERT: a checkpoint's weights as GEMMs and attention on the array.

Four GEMMs a layer, all with bias: qkv (q | k | v side by side), o, up (with the activation), down.
Attention reads the qkv GEMM's result in place, and what it writes is the o GEMM's A; down reads
up's result in place. The attention scale and the change to base 2, log2(e) / sqrt(head_dim), are
folded into q.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError
from ..records import Record, hex_text, make_param, make_record
from ..tokenizer import Tokenizer
from .bert_config import MODEL_TYPE, BertConfig, bert_config
from .checkpoint import Checkpoint
from .geometry import K_TILE, N_TILE, NO_WINDOW, M, round_up
from .kernels import GEMM_CTX, MHA_CTX, TARGETS, Gemm, Kernels, Mha, buckets_for
from .pack import pack_gemm
from .parts import Parts, Progress
from .reference import BertReference, BertShape
from .selfcheck import self_check_texts
from .weights import F32, Weights
from .xclbins import KERNEL_NAME, gemm_xclbin, mha_xclbin

MAX_CHUNKS = 32
BUCKETS = (16, 32, 64, 128, 256, 512)

_PREFIX = "bert."
# Heads a sentence embedding does not use, and a table of 0, 1, 2, ... that old versions saved.
_IGNORED = ("pooler.", "cls.", "embeddings.position_ids")
_HOST_TABLES = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
)


def layer_name(layer: int) -> str:
    """HF's name of an encoder layer."""
    return f"encoder.layer.{layer}"


def norm_names(config: BertConfig) -> tuple[str, ...]:
    """HF's names of all LayerNorms."""
    layers = [layer_name(i) for i in range(config.num_hidden_layers)]
    norms = [f"{layer}.{part}" for layer in layers for part in ("attention.output", "output")]
    return tuple(f"{owner}.LayerNorm" for owner in ("embeddings", *norms))


def tensor_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model has, by HF name."""
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


def bert_parts(checkpoint: Checkpoint, target: str, name: str, progress: Progress) -> Parts:
    """A BERT checkpoint's bundle.

    Raises:
        BundleError: the checkpoint is no BERT this engine computes as Hugging Face would.
    """
    config = bert_config(checkpoint)
    progress("read", 0, 1)
    weights = Weights(
        checkpoint.weights_path, tensor_shapes(config), prefix=_PREFIX, ignored=_IGNORED
    )
    progress("read", 1, 1)
    tensors = {table: weights.f32(table) for table in _HOST_TABLES}
    for norm in norm_names(config):
        for part in ("weight", "bias"):
            tensors[f"{norm}.{part}"] = weights.f32(f"{norm}.{part}")
    packed = _packed(config, weights, progress)
    references, trefs = _references(checkpoint, config, weights, progress)
    kernels = _kernels(config, target, progress)
    xclbins = {
        GEMM_CTX: gemm_xclbin(),
        MHA_CTX: mha_xclbin(
            config.num_attention_heads, config.num_attention_heads, config.head_dim
        ),
    }
    files = {f"kernels/{ctx}.xclbin": image for ctx, image in xclbins.items()}
    records = (
        *_params(checkpoint, config, target, name),
        *(make_record("prompt", key, hex_text(text)) for key, text in checkpoint.prompts.items()),
        *trefs,
        *(make_record("xclbin", ctx, f"kernels/{ctx}.xclbin", KERNEL_NAME) for ctx in xclbins),
        *kernels.records,
    )
    return Parts(records, {**tensors, **packed, **references}, {**files, **kernels.files})


def _params(
    checkpoint: Checkpoint, config: BertConfig, target: str, name: str
) -> tuple[Record, ...]:
    params: dict[str, str | int | float] = {
        "name": name,
        "family": MODEL_TYPE,
        "target": target,
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
    if checkpoint.default_prompt is not None:
        params["default_prompt"] = checkpoint.default_prompt
    return tuple(make_param(key, value) for key, value in params.items())


def _packed(
    config: BertConfig, weights: Weights, progress: Progress
) -> dict[str, NDArray[np.uint8]]:
    packed = {}
    scale = np.float32(math.log2(math.e) / math.sqrt(config.head_dim))

    def linear(name: str) -> tuple[F32, F32]:
        return weights.f32(f"{name}.weight").T, weights.f32(f"{name}.bias")

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


def _kernels(config: BertConfig, target: str, progress: Progress) -> Kernels:
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
    mha = Mha(
        heads=heads,
        kv_heads=heads,
        head_dim=config.head_dim,
        qkv_stride=qkv,
        q_col=0,
        k_col=d,
        v_col=2 * d,
        o_stride=hidden,
    )
    dev_gen = TARGETS[target]
    records: list[Record] = []
    files: dict[str, bytes] = {}
    total = len(gemms) + 1
    for done, gemm in enumerate(gemms):
        progress("kernels", done, total)
        kernels = gemm.kernels(MAX_CHUNKS, dev_gen)
        records.extend(kernels.records)
        files.update(kernels.files)
    kernels = mha.kernels(buckets_for(config.max_tokens, BUCKETS), dev_gen)
    progress("kernels", total, total)
    return Kernels((*records, *kernels.records), {**files, **kernels.files})


def _references(
    checkpoint: Checkpoint, config: BertConfig, weights: Weights, progress: Progress
) -> tuple[dict[str, NDArray[np.int32] | F32], tuple[Record, ...]]:
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_path, max_tokens=config.max_tokens)
    if tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"tokenizer.json: {tokenizer.vocab_size} tokens, wanted at most vocab_size "
            f"{config.vocab_size} of config.json; the two files do not belong together."
        )
    shape = BertShape(
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        layer_norm_eps=config.layer_norm_eps,
        hidden_act=config.hidden_act,
        pooling=config.pooling,
        normalize=config.normalize,
    )
    model = BertReference(weights.f32, shape)
    cases = [("-", "", text) for text in self_check_texts(config.max_tokens)]
    for prompt in list(checkpoint.prompts)[:1]:
        cases.append((prompt, checkpoint.prompts[prompt], cases[1][2]))
    tensors: dict[str, NDArray[np.int32] | F32] = {}
    records = []
    for j, (prompt, prefix, text) in enumerate(cases):
        progress("references", j, len(cases))
        (encoded,) = tokenizer.encode_batch([text], prompt=prefix)
        reference = model.forward(encoded.ids)
        tensors[f"tref.{j}.ids"] = reference.ids
        tensors[f"tref.{j}.hidden"] = reference.hidden
        tensors[f"tref.{j}.embedding"] = reference.embedding
        records.append(make_record("tref", j, prompt, hex_text(text)))
    progress("references", len(cases), len(cases))
    return tensors, tuple(records)
