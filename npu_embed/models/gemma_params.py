"""What a bundle's params say of a Gemma, and the attention of its types of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..bundle import Bundle
from ..errors import BundleError
from . import checks

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = (SLIDING, FULL)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one type of layer.

    Its GEMMs are qkv{suffix} and o{suffix}; bucket names its attention kernels, None where they
    need no name. scale is that of q k^T. window: the furthest key seen, None = all are.
    """

    suffix: str
    bucket: str | None
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    rope_theta: float
    window: int | None

    @property
    def q_width(self) -> int:
        """Columns of all query heads, and of what attention gives."""
        return self.num_attention_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of q | k | v."""
        return self.q_width + 2 * self.num_key_value_heads * self.head_dim

    def window_for(self, tokens: int) -> int | None:
        """The window of a text, None where no key is outside it."""
        return None if self.window is None or tokens <= self.window + 1 else self.window


@dataclass(frozen=True, slots=True)
class GemmaParams:
    """The params the Gemma families share: HF's config keys; attention by layer type."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    attention: Mapping[str, Attention]
    attention_on_npu: bool
    rms_norm_eps: float
    vocab_size: int
    normalize: bool
    dim: int


def read_params(bundle: Bundle, suffixes: Mapping[str, str], scale: float) -> GemmaParams:
    """The params of a bundle; suffixes: what the kernels of each type of layer end in.

    Raises:
        BundleError: one is missing, out of range, or nothing this engine computes.
    """
    manifest = bundle.manifest
    checks.choice(manifest, "pooling", ("mean",))
    checks.choice(manifest, "hidden_activation", ("gelu_pytorch_tanh",))
    layers = manifest.param_int("num_hidden_layers", minimum=1, maximum=1024)
    types = manifest.param_list("layer_types")
    if len(types) != layers or not set(types) <= set(KINDS):
        raise BundleError(
            f"manifest.txt: param layer_types has {len(types)} of {', '.join(sorted(set(types)))}, "
            f"wanted {layers} of {' or '.join(KINDS)}; re-export the bundle."
        )
    window = manifest.param_int("window", minimum=0, maximum=1 << 20)
    positions = {
        SLIDING: (checks.positive(manifest, "rope_local_base_freq"), window),
        FULL: (checks.positive(manifest, "rope_theta"), None),
    }
    return GemmaParams(
        hidden_size=manifest.param_int("hidden_size", minimum=1, maximum=1 << 16),
        intermediate_size=manifest.param_int("intermediate_size", minimum=1, maximum=1 << 20),
        layer_types=types,
        attention={
            kind: _attention(bundle, suffixes[kind], scale, *positions[kind])
            for kind in KINDS
            if kind in types
        },
        attention_on_npu=checks.choice(manifest, "attention", ("npu", "host")) == "npu",
        rms_norm_eps=checks.epsilon(manifest, "rms_norm_eps"),
        vocab_size=manifest.param_int("vocab_size", minimum=1, maximum=1 << 24),
        normalize=manifest.param_flag("normalize"),
        dim=manifest.param_int("dim", minimum=1, maximum=1 << 16),
    )


def _attention(
    bundle: Bundle, suffix: str, scale: float, rope_theta: float, window: int | None
) -> Attention:
    manifest = bundle.manifest
    heads, kv_heads, head_dim = (
        manifest.param_int(f"{name}{suffix}", minimum=1, maximum=1 << 12)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads or head_dim % 2:
        raise BundleError(
            f"manifest.txt: {heads} heads{suffix} of {head_dim} numbers, {kv_heads} of keys and "
            "values, wanted a multiple of the latter, and an even number; re-export the bundle."
        )
    bucket = suffix.removeprefix(".") or None
    return Attention(suffix, bucket, heads, kv_heads, head_dim, scale, rope_theta, window)
