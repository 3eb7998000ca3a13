"""Config keys the Gemma families share, and what of them this engine does not do."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError
from .checkpoint import CONFIG, Checkpoint
from .geometry import K_TILE, N_TILE, round_up
from .jsonfile import JsonFile
from .limits import MAX_HEADS, MAX_LAYERS, check_width

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {SLIDING: "sliding", FULL: "full"}  # the short forms that kernels and params are named by

ACTIVATION = "gelu_pytorch_tanh"
POOLING = "mean"
MAX_HEAD_DIM = 1024
MAX_TOKENS = 2048  # attention has buckets up to here
DEFAULT_PATTERN = 6  # transformers: every 6th layer is full where nothing says otherwise


@dataclass(frozen=True, slots=True)
class Heads:
    """The head geometry of one type of layer."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        """Columns of all query heads, and of what attention gives."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_stride(self) -> int:
        """Elements of a row of q | k | v, padded to whole tiles."""
        return round_up(self.q_width + 2 * self.kv_width, N_TILE)

    @property
    def o_stride(self) -> int:
        """Elements of a row of o's A."""
        return round_up(self.q_width, K_TILE)


def read_heads(config: JsonFile) -> Heads:
    """Heads as the config's own keys say.

    Raises:
        BundleError: a number the array or the group of key/value heads does not allow.
    """
    heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", maximum=MAX_HEADS)
    head_dim = config.integer("head_dim")
    if heads % kv_heads:
        raise config.error(
            "num_key_value_heads", f"a divisor of num_attention_heads {heads}", "correct the file"
        )
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.error(
            "head_dim", f"an even number to {MAX_HEAD_DIM}", "the array moves pairs of numbers"
        )
    found = Heads(heads, kv_heads, head_dim)
    check_width(config, "q, k and v", found.qkv_stride)
    return found


def read_layer_types(config: JsonFile) -> tuple[str, ...]:
    """The type of each layer: layer_types, or what transformers makes of the pattern's length.

    Raises:
        BundleError: another type, or another count than num_hidden_layers.
    """
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if not config.has("layer_types"):
        key = "sliding_window_pattern" if config.has("sliding_window_pattern") else None
        pattern = config.integer(key or "_sliding_window_pattern", default=DEFAULT_PATTERN)
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    types = config.values["layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(t not in [*KINDS] for t in types):
        raise config.error(
            "layer_types", f"{layers} of {' or '.join(map(repr, KINDS))}", "correct the file"
        )
    return tuple(types)


def read_rope_thetas(config: JsonFile) -> tuple[float, float]:
    """(the base of full layers, the base of sliding layers), from either form of the config.

    Raises:
        BundleError: a rotary embedding of another kind than the plain one.
    """
    if not config.has("rope_parameters"):
        if config.has("rope_scaling"):
            raise config.error("rope_scaling", "none", "this engine has plain rotary positions")
        return config.number("rope_theta"), config.number("rope_local_base_freq")
    by_type = config.values["rope_parameters"]
    if not isinstance(by_type, dict) or set(by_type) != set(KINDS):
        raise config.error(
            "rope_parameters", f"an object with {' and '.join(KINDS)}", "correct the file"
        )
    thetas = []
    for kind in (FULL, SLIDING):
        rope = config.part("rope_parameters", kind)
        rope.choice("rope_type", ("default",), default="default")
        for key in rope.values:
            if key not in ("rope_type", "rope_theta") and rope.has(key):
                raise rope.error(key, "none", "this engine has plain rotary positions")
        thetas.append(rope.number("rope_theta"))
    full, sliding = thetas
    return full, sliding


def refuse_unimplemented(config: JsonFile) -> None:
    """Refuse by name what this engine would compute differently.

    Raises:
        BundleError: naming key and value.
    """
    config.choice("hidden_activation", (ACTIVATION,))
    if config.flag("attention_bias", False):
        raise config.error("attention_bias", "false", "this exporter has no biases in a Gemma")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(key):
            raise config.error(key, "none", "this engine caps no logits")


def check_pooling(checkpoint: Checkpoint, width: int) -> None:
    """Refuse what follows the transformer unless it is the mean of `width` numbers a token.

    Raises:
        BundleError: another pooling or another width.
    """
    if checkpoint.pooling != POOLING:
        raise BundleError(
            f"1_Pooling/config.json: {checkpoint.pooling} pooling, wanted {POOLING}; this exporter "
            "has no other for a Gemma."
        )
    if checkpoint.pooled_width not in (None, width):
        raise BundleError(
            f"1_Pooling/config.json: word_embedding_dimension {checkpoint.pooled_width}, wanted "
            f"{width} by {CONFIG}; correct the file."
        )


def read_max_tokens(checkpoint: Checkpoint, config: JsonFile) -> int:
    """The most tokens a text may have.

    Raises:
        BundleError: more than the engine's longest attention bucket, or hardly any.
    """
    max_tokens = checkpoint.max_tokens(config.integer("max_position_embeddings"))
    if not 3 <= max_tokens <= MAX_TOKENS:
        raise BundleError(
            f"{config.name}: texts of {max_tokens} tokens, wanted 3 to {MAX_TOKENS}; set "
            "max_seq_length in sentence_bert_config.json."
        )
    return max_tokens
