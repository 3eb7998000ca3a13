"""What a bundle's params say of its vision tower, and its GEMMs checked against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..bundle import MAX_ROWS, Bundle
from ..errors import BundleError
from ..images import ImageLimits
from ..specs import GemmSpec
from . import checks

VISION = "vision"  # names its attention kernels; its GEMMs and params end in it
GEMMS = ("patch", "qkv", "o", "gate_up", "down", "projection")


@dataclass(frozen=True, slots=True)
class VisionParams:
    """HF's config keys; max_rows: the most patches of a pack of images."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    position_embedding_size: int
    rope_theta: float
    rms_norm_eps: float
    attention_on_npu: bool
    limits: ImageLimits
    max_rows: int

    @property
    def q_width(self) -> int:
        """Columns of all query heads, and of what attention gives."""
        return self.num_attention_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of q | k | v."""
        return self.q_width + 2 * self.num_key_value_heads * self.head_dim

    @property
    def longest_side(self) -> int:
        """The most patches side by side."""
        return self.limits.max_soft_tokens * self.limits.pooling_kernel_size


def has_vision(bundle: Bundle) -> bool:
    """Whether a bundle embeds images too."""
    return f"hidden_size.{VISION}" in bundle.manifest.params


def read_vision_params(bundle: Bundle) -> VisionParams:
    """The vision tower's params.

    Raises:
        BundleError: one is missing, out of range, or contradicts another.
    """
    manifest = bundle.manifest

    def integer(name: str, maximum: int) -> int:
        return manifest.param_int(f"{name}.{VISION}", minimum=1, maximum=maximum)

    # It may run elsewhere than that of texts.
    own = f"attention.{VISION}"
    attention = own if own in manifest.params else "attention"
    params = VisionParams(
        hidden_size=integer("hidden_size", 1 << 16),
        intermediate_size=integer("intermediate_size", 1 << 20),
        num_hidden_layers=integer("num_hidden_layers", 1024),
        num_attention_heads=integer("num_attention_heads", 1 << 12),
        num_key_value_heads=integer("num_key_value_heads", 1 << 12),
        head_dim=integer("head_dim", 1 << 12),
        position_embedding_size=integer("position_embedding_size", 1 << 20),
        rope_theta=checks.positive(manifest, f"rope_theta.{VISION}"),
        rms_norm_eps=checks.epsilon(manifest, f"rms_norm_eps.{VISION}"),
        attention_on_npu=checks.choice(manifest, attention, ("npu", "host")) == "npu",
        limits=ImageLimits(
            integer("patch_size", 256),
            integer("pooling_kernel_size", 64),
            manifest.param_int("max_soft_tokens", minimum=1, maximum=1 << 16),
        ),
        max_rows=integer("max_rows", MAX_ROWS),
    )
    for name, found, wanted in (
        ("position_embedding_size", params.position_embedding_size, params.longest_side),
        ("max_rows", params.max_rows, params.limits.max_patches),
    ):
        if found < wanted:
            raise BundleError(
                f"manifest.txt: param {name}.{VISION} {found}, wanted at least {wanted} for "
                f"{params.limits.max_soft_tokens} soft tokens; re-export the bundle."
            )
    if params.num_attention_heads % params.num_key_value_heads or params.head_dim % 4:
        raise BundleError(
            f"manifest.txt: {params.num_attention_heads} heads.{VISION} of {params.head_dim} "
            f"numbers, {params.num_key_value_heads} of keys and values, wanted a multiple of the "
            "latter, and of 4 numbers; re-export the bundle."
        )
    return params


def vision_gemms(
    bundle: Bundle, params: VisionParams, text_hidden_size: int
) -> Mapping[str, GemmSpec]:
    """The tower's GEMMs by key without suffix, fit for each other's buffers and the params.

    Raises:
        BundleError: one is missing, or its sizes or those of the attention do not fit.
    """
    mha = (VISION,) if params.attention_on_npu else ()
    checks.kernels(bundle, [f"{key}.{VISION}" for key in GEMMS], mha=mha)
    gemms = {key: bundle.specs.gemms[f"{key}.{VISION}"] for key in GEMMS}
    checks.gemm_views(gemms.values())
    d, out, x = params.hidden_size, gemms["down"].c_stride, gemms["qkv"].lda
    patch_values = 3 * params.limits.patch_size**2
    wanted: dict[str, tuple[int, int, int | None]] = {
        "patch K": (gemms["patch"].K, patch_values, None),
        "patch n_out": (gemms["patch"].n_out, d, None),
        "patch c_stride": (gemms["patch"].c_stride, out, out),
        "qkv K": (gemms["qkv"].K, d, None),
        "qkv n_out": (gemms["qkv"].n_out, params.qkv_width, None),
        "o K": (gemms["o"].K, params.q_width, None),
        "o n_out": (gemms["o"].n_out, d, None),
        "o c_stride": (gemms["o"].c_stride, out, out),
        "gate_up K": (gemms["gate_up"].K, d, None),
        "gate_up lda": (gemms["gate_up"].lda, x, x),
        "gate_up n_out": (gemms["gate_up"].n_out, params.intermediate_size, None),
        **checks.slice_sizes("down", gemms["down"], params.intermediate_size),
        "down lda": (gemms["down"].lda, gemms["gate_up"].c_stride, gemms["gate_up"].c_stride),
        "down n_out": (gemms["down"].n_out, d, None),
        "projection K": (gemms["projection"].K, d, None),
        "projection lda": (gemms["projection"].lda, x, x),
        "projection n_out": (gemms["projection"].n_out, text_hidden_size, None),
    }
    for key, gemm in gemms.items():
        if key != "projection":  # of soft tokens, which are fewer
            wanted[f"{key} rows"] = (gemm.max_rows, params.max_rows, None)
    blocks = params.limits.pooling_kernel_size**2
    wanted["projection rows"] = (gemms["projection"].max_rows, params.max_rows // blocks, None)
    checks.sizes({f"{name}.{VISION}": size for name, size in wanted.items()})
    if params.attention_on_npu:
        buckets = checks.buckets_of(bundle, VISION)
        checks.mha_views(buckets, gemms["qkv"].c_stride, gemms["o"].lda)
        heads = {"heads": params.num_attention_heads, "kv_heads": params.num_key_value_heads}
        checks.bucket_heads(bundle, VISION, {**heads, "head_dim": params.head_dim})
        if buckets[-1].rows < params.limits.max_patches:
            raise BundleError(
                f"manifest.txt: longest mha bucket name={VISION} has {buckets[-1].rows} rows, "
                f"wanted {params.limits.max_patches}, the patches of an image; re-export the "
                "bundle."
            )
    return gemms
