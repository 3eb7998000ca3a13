"""What a gemma3_text checkpoint's configuration says, and what of it this engine does not do."""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import Checkpoint
from .dense import DenseConfig, dense_configs
from .gemma_config import (
    Heads,
    check_pooling,
    read_heads,
    read_layer_types,
    read_max_tokens,
    read_rope_thetas,
    refuse_unimplemented,
)
from .limits import MAX_LAYERS, MAX_WIDTH, check_hidden

MODEL_TYPE = "gemma3_text"


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """A checked gemma3_text configuration: HF's config keys, then what the pipeline adds."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    heads: Heads
    layer_types: tuple[str, ...]
    sliding_window: int
    query_pre_attn_scalar: float
    rope_theta: float
    rope_local_base_freq: float
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int
    dense: tuple[DenseConfig, ...]
    normalize: bool
    max_tokens: int

    @property
    def window(self) -> int:
        """The furthest key a sliding layer sees: |i - j| <= window.

        Source: transformers turns sliding_window of a bidirectional Gemma 3 into half of it plus
        one, and that is an exclusive bound.
        """
        return self.sliding_window // 2

    @property
    def dim(self) -> int:
        """The length of an embedding."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def stages(self) -> tuple[str, ...]:
        """What happens to a text, in order."""
        stages = ["embeddings", "layers", "norm", "pooling"]
        if self.dense:
            stages.append("dense")
        if self.normalize:
            stages.append("normalize")
        return tuple(stages)


def gemma3_config(checkpoint: Checkpoint) -> Gemma3Config:
    """The configuration of a checkpoint that this engine computes as Hugging Face would.

    Raises:
        BundleError: naming the key and value that it would compute differently.
    """
    config = checkpoint.config
    config.choice("model_type", (MODEL_TYPE,))
    refuse_unimplemented(config)
    if not config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "true", "this engine runs encoders only")
    hidden_size = config.integer("hidden_size", maximum=MAX_WIDTH)
    check_pooling(checkpoint, hidden_size)
    heads = read_heads(config)
    rope_theta, rope_local_base_freq = read_rope_thetas(config)
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    max_tokens = read_max_tokens(checkpoint, config)
    check_hidden(config, max_tokens, layers, hidden_size)
    has_scalar = config.has("query_pre_attn_scalar")
    return Gemma3Config(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_hidden_layers=layers,
        heads=heads,
        layer_types=read_layer_types(config),
        sliding_window=config.integer("sliding_window"),
        query_pre_attn_scalar=config.number("query_pre_attn_scalar") if has_scalar else 256.0,
        rope_theta=rope_theta,
        rope_local_base_freq=rope_local_base_freq,
        rms_norm_eps=config.number("rms_norm_eps", below=1),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        pad_token_id=config.integer("pad_token_id", default=0, minimum=0),
        dense=dense_configs(checkpoint, hidden_size),
        normalize="Normalize" in [module.kind for module in checkpoint.modules],
        max_tokens=max_tokens,
    )
