"""What a checkpoint says of its Gemma 4 vision tower, and of how images are prepared for it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError
from ..images import ImageLimits
from .checkpoint import Checkpoint
from .gemma_config import ACTIVATION, Heads, read_heads
from .jsonfile import JsonFile
from .limits import (
    MAX_LAYERS,
    MAX_PATCH_SIZE,
    MAX_PATCHES,
    MAX_POOLING,
    MAX_SOFT_TOKENS,
    MAX_WIDTH,
)

VISION_MODEL_TYPE = "gemma4_vision"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"

# transformers' defaults.
_PATCH_SIZE, _POOLING, _POSITIONS, _ROPE_THETA = 16, 3, 10240, 100.0
_MAX_SOFT_TOKENS = 280
_BICUBIC = 3  # PIL's number of the filter
# What is done to the pixels, and the only value of each that images.py computes.
_PREPARATION: dict[str, object] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": False,
    "resample": _BICUBIC,
}


@dataclass(frozen=True, slots=True)
class Gemma4VisionConfig:
    """A checked vision_config, and what its images are prepared and framed with.

    tokens: the ids before and behind an image's soft tokens: bos, boi | eoi, eos.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    heads: Heads
    position_embedding_size: int
    rope_theta: float
    rms_norm_eps: float
    limits: ImageLimits
    tokens: tuple[int, int, int, int]

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: its pixels, three of each."""
        return 3 * self.limits.patch_size**2


def gemma4_vision_config(
    checkpoint: Checkpoint, max_tokens: int, vocab_size: int
) -> Gemma4VisionConfig | None:
    """The vision tower's configuration; None where the checkpoint has no tower.

    max_tokens, vocab_size: the text encoder's.

    Raises:
        BundleError: naming the key and value that this engine would compute differently.
    """
    if not checkpoint.config.has("vision_config"):
        return None
    config = checkpoint.config.part("vision_config")
    config.choice("model_type", (VISION_MODEL_TYPE,))
    config.choice("hidden_activation", (ACTIVATION,), default=ACTIVATION)
    for key in ("attention_bias", "standardize", "use_clipped_linears"):
        if config.flag(key, False):
            raise config.error(key, "false", "this exporter has no such vision tower")
    heads = read_heads(config)
    if heads.head_dim % 4:
        raise config.error("head_dim", "a multiple of 4", "half of a head turns with x, half by y")
    limits = _limits(checkpoint, config)
    positions = config.integer("position_embedding_size", default=_POSITIONS)
    longest = limits.max_soft_tokens * limits.pooling_kernel_size
    if longest > positions:
        raise config.error(
            "position_embedding_size", f"at least {longest} for the longest image", "lower its size"
        )
    tokens = _tokens(checkpoint, vocab_size)
    if limits.max_soft_tokens + len(tokens) > max_tokens:
        raise BundleError(
            f"{config.name}: images of {limits.max_soft_tokens + len(tokens)} tokens, wanted at "
            f"most {max_tokens} as texts have; raise max_seq_length in sentence_bert_config.json."
        )
    hidden_size = config.integer("hidden_size", maximum=MAX_WIDTH)
    intermediate_size = config.integer("intermediate_size", maximum=MAX_WIDTH)
    return Gemma4VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
        heads=heads,
        position_embedding_size=positions,
        rope_theta=_rope_theta(config),
        rms_norm_eps=config.number("rms_norm_eps", below=1),
        limits=limits,
        tokens=tokens,
    )


def _rope_theta(config: JsonFile) -> float:
    if not config.has("rope_parameters"):
        return _ROPE_THETA
    rope = config.part("rope_parameters")
    rope.choice("rope_type", ("axial",), default="axial")
    for key in rope.values:
        if key not in ("rope_type", "rope_theta") and rope.has(key):
            raise rope.error(key, "none", "this engine has plain axial positions")
    return rope.number("rope_theta")


def _limits(checkpoint: Checkpoint, config: JsonFile) -> ImageLimits:
    """The sizes the image processor works with, which must be the tower's."""
    processor = JsonFile.read_if_there(checkpoint.model_folder, PREPROCESSOR)
    if not processor.values:
        whole = JsonFile.read_if_there(checkpoint.model_folder, PROCESSOR)
        if whole.has("image_processor"):
            processor = whole.part("image_processor")
    for key, only in _PREPARATION.items():
        if processor.has(key) and processor.values[key] != only:
            raise processor.error(key, repr(only), "this engine prepares images in one way")
    if processor.has("rescale_factor") and abs(processor.number("rescale_factor") * 255 - 1) > 1e-6:
        raise processor.error("rescale_factor", "1/255", "this engine scales pixels to 0..1")
    sizes: dict[str, int] = {}
    for key, default, maximum in (
        ("patch_size", _PATCH_SIZE, MAX_PATCH_SIZE),
        ("pooling_kernel_size", _POOLING, MAX_POOLING),
    ):
        sizes[key] = config.integer(key, default=default, maximum=maximum)
        if processor.integer(key, default=sizes[key]) != sizes[key]:
            raise processor.error(key, f"{sizes[key]} of the vision tower", "correct the file")
    soft_tokens = processor.integer(
        "max_soft_tokens", default=_MAX_SOFT_TOKENS, maximum=MAX_SOFT_TOKENS
    )
    limits = ImageLimits(**sizes, max_soft_tokens=soft_tokens)
    if limits.max_patches > MAX_PATCHES:
        raise BundleError(
            f"{processor.name}: images of {limits.max_patches} patches, wanted at most "
            f"{MAX_PATCHES}; lower max_soft_tokens."
        )
    return limits


def _tokens(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, int, int, int]:
    text = checkpoint.config.part("text_config")
    whole = checkpoint.config
    found = []
    for config, key in (
        (text, "bos_token_id"),
        (whole, "boi_token_id"),
        (whole, "eoi_token_id"),
        (text, "eos_token_id"),
    ):
        if config.integer(key, minimum=0) >= vocab_size:
            raise config.error(key, f"less than vocab_size {vocab_size}", "correct the file")
        found.append(config.integer(key, minimum=0))
    bos, boi, eoi, eos = found
    return bos, boi, eoi, eos
