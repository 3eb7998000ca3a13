"""What an embedding_gemma2 checkpoint's configuration says of its text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import BundleError
from .checkpoint import Checkpoint
from .gemma_config import (
    FULL,
    KINDS,
    SLIDING,
    Heads,
    check_pooling,
    read_heads,
    read_layer_types,
    read_max_tokens,
    read_rope_thetas,
    refuse_unimplemented,
)
from .jsonfile import JsonFile
from .limits import MAX_LAYERS, MAX_WIDTH, check_hidden, check_width

MODEL_TYPE = "embedding_gemma2"
TEXT_MODEL_TYPE = "embedding_gemma2_text"

# transformers gives full layers these heads where a config has no per_layer_config.
_FULL_HEAD_DIM, _FULL_KV_HEADS = 512, 1
_PER_LAYER_KEYS = ("head_dim", "num_key_value_heads")
_DEFAULT_THETAS = (1e6, 1e4)  # full, sliding


@dataclass(frozen=True, slots=True)
class EmbeddingGemma2Config:
    """A checked text_config: HF's config keys, then what the pipeline around it adds.

    heads: by layer type, only of types that there are.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    hidden_size_per_layer_input: int
    embedding_dim: int
    heads: Mapping[str, Heads]
    layer_types: tuple[str, ...]
    sliding_window: int
    rope_theta: float
    rope_local_base_freq: float
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int
    normalize: bool
    max_tokens: int

    @property
    def window(self) -> int:
        """The furthest key a sliding layer sees: |i - j| <= window; the config says just that."""
        return self.sliding_window

    @property
    def stages(self) -> tuple[str, ...]:
        """What happens to a text, in order."""
        stages = (
            "embeddings",
            "per_layer_inputs",
            "layers",
            "norm",
            "pooling",
            "embedding_projection",
        )
        return (*stages, "normalize") if self.normalize else stages


def embedding_gemma2_config(checkpoint: Checkpoint) -> EmbeddingGemma2Config:
    """The text encoder's configuration, of a checkpoint that this engine computes as HF would.

    Raises:
        BundleError: naming the key and value that it would compute differently.
    """
    checkpoint.config.choice("model_type", (MODEL_TYPE,))
    config = checkpoint.config.part("text_config")
    config.choice("model_type", (TEXT_MODEL_TYPE,), default=TEXT_MODEL_TYPE)
    refuse_unimplemented(config)
    kinds = [module.kind for module in checkpoint.modules]
    if kinds not in ([], ["Normalize"]):
        raise BundleError(
            f"modules.json: {', '.join(kinds)} after Pooling, wanted Normalize or nothing; this "
            "exporter does no other module for an EmbeddingGemma 2."
        )
    hidden_size = config.integer("hidden_size", maximum=MAX_WIDTH)
    embedding_dim = config.integer("embedding_dim", maximum=MAX_WIDTH)
    check_pooling(checkpoint, embedding_dim)
    layer_types = read_layer_types(config)
    if layer_types[-1] != FULL:
        raise config.error("layer_types", f"{FULL} at its end", "transformers would make it so")
    rope_theta, rope_local_base_freq = (
        read_rope_thetas(config) if config.has("rope_parameters") else _DEFAULT_THETAS
    )
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    per_layer = config.integer("hidden_size_per_layer_input", maximum=MAX_WIDTH)
    max_tokens = read_max_tokens(checkpoint, config)
    check_hidden(config, max_tokens, layers, hidden_size)
    check_width(config, "all layers' per-layer inputs", layers * per_layer)
    return EmbeddingGemma2Config(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_hidden_layers=layers,
        hidden_size_per_layer_input=per_layer,
        embedding_dim=embedding_dim,
        heads=_heads(config, layer_types),
        layer_types=layer_types,
        sliding_window=config.integer("sliding_window"),
        rope_theta=rope_theta,
        rope_local_base_freq=rope_local_base_freq,
        rms_norm_eps=config.number("rms_norm_eps", below=1),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        pad_token_id=config.integer("pad_token_id", default=0, minimum=0),
        normalize="Normalize" in kinds,
        max_tokens=max_tokens,
    )


def _heads(config: JsonFile, layer_types: tuple[str, ...]) -> dict[str, Heads]:
    """The heads of each type of layer, which all layers of the type must have."""
    own = _own_heads(config, layer_types)
    found: dict[str, Heads] = {}
    for i, kind in enumerate(layer_types):
        changed = own.get(i, {})
        layer = JsonFile(
            f"{config.name}: layer {i}",
            {**config.values, **{key: value for key, value in changed.items()}},
        )
        heads = read_heads(layer)
        if found.setdefault(kind, heads) != heads:
            raise BundleError(
                f"{layer.name}: {heads.num_key_value_heads} key/value heads of {heads.head_dim}, "
                f"wanted {found[kind].num_key_value_heads} of {found[kind].head_dim} as other "
                f"{KINDS[kind]} layers have; this exporter has one geometry a type of layer."
            )
    return {kind: found[kind] for kind in (SLIDING, FULL) if kind in found}


def _own_heads(config: JsonFile, layer_types: tuple[str, ...]) -> dict[int, Mapping[str, object]]:
    """What single layers have of their own, by layer."""
    if not config.has("per_layer_config"):
        wide = {
            "head_dim": config.integer("global_head_dim", default=_FULL_HEAD_DIM),
            "num_key_value_heads": config.integer(
                "num_global_key_value_heads", default=_FULL_KV_HEADS
            ),
        }
        return {i: wide for i, kind in enumerate(layer_types) if kind == FULL}
    own: dict[int, Mapping[str, object]] = {}
    by_layer = config.part("per_layer_config")
    names = [str(i) for i in range(len(layer_types))]
    for index in by_layer.values:
        if index not in names:
            raise by_layer.error(index, f"layers 0 to {len(layer_types) - 1}", "correct the file")
        layer = config.part("per_layer_config", index)
        for key in layer.values:
            if key not in _PER_LAYER_KEYS:
                raise layer.error(key, "nothing of that name", "this exporter knows no such key")
        own[int(index)] = {key: value for key, value in layer.values.items() if layer.has(key)}
    return own
