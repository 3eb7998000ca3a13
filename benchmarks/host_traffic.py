"""The bytes the host must at least move a token, from a model's shapes.

What happens on the host between two runs is taken as one pass: each of its inputs is read once,
each of its outputs written once, and what does not outlive the pass stays in registers. Weights of
norms, tables of positions' angles and what a text costs beside its tokens stay in the cache and are
left out, and so are syncs: on hardware they flush cache lines that the pass has written anyway.
"""

from __future__ import annotations

from npu_embed.bundle import Bundle
from npu_embed.manifest import Manifest
from npu_embed.models.checks import slices

F32_BYTES = 4
BF16_BYTES = 2
ID_BYTES = 4

BERT = ("bert", "roberta", "xlm-roberta", "distilbert")
GEMMA3_TEXT = "gemma3_text"
EMBEDDING_GEMMA2 = "embedding_gemma2"


def traffic(bundle: Bundle, tokens: int, texts: int) -> dict[str, float] | None:
    """Bytes a token by step, of so many tokens in so many texts; None where it is not known."""
    each_text = texts / tokens
    if bundle.family in BERT:
        return _bert(bundle, each_text)
    if bundle.family in (GEMMA3_TEXT, EMBEDDING_GEMMA2):
        return _gemma(bundle, each_text)
    return None


def between_runs(width: int, products: int = 1) -> int:
    """Bytes of a row between two GEMMs: x += C in float32, and the next A made of it.

    products: how many C are added up.
    """
    return products * BF16_BYTES * width + 2 * F32_BYTES * width + BF16_BYTES * width


def _last(width: int) -> int:
    """What of between_runs is not needed where pooling follows: writing x and A."""
    return F32_BYTES * width + BF16_BYTES * width


def _bert(bundle: Bundle, each_text: float) -> dict[str, float]:
    d = bundle.manifest.param_int("hidden_size", minimum=1)
    layers = bundle.manifest.param_int("num_hidden_layers", minimum=1)
    return {
        # A word's row and a position's row; x and the first A.
        "embeddings": ID_BYTES + 2 * F32_BYTES * d + F32_BYTES * d + BF16_BYTES * d,
        # After o and after down.
        "residuals": 2 * layers * between_runs(d) - _last(d),
        "vectors": each_text * F32_BYTES * d,
    }


def _gemma(bundle: Bundle, each_text: float) -> dict[str, float]:
    manifest, gemms = bundle.manifest, bundle.specs.gemms
    own_heads = bundle.family == EMBEDDING_GEMMA2
    d = manifest.param_int("hidden_size", minimum=1)
    inner = manifest.param_int("intermediate_size", minimum=1)
    dim = manifest.param_int("dim", minimum=1)
    kinds = manifest.param_list("layer_types")
    table = "embed_tokens.weight"
    table = f"language_model.{table}" if own_heads else table
    row_bytes = BF16_BYTES if bundle.tensors.dtype(table) == "bf16" else F32_BYTES
    on_npu = manifest.param_str("attention") == "npu"
    heads = residuals = 0
    for kind in kinds:
        suffix = f".{kind.removesuffix('_attention')}" if own_heads else ""
        q, kv = _head_widths(manifest, suffix)
        # EmbeddingGemma 2 norms v too; in the other v may stay where it is.
        turned = q + (2 * kv if own_heads else kv)
        heads += BF16_BYTES * (2 * turned if on_npu else q + 2 * kv + q)
        residuals += between_runs(d, slices(gemms[f"o{suffix}"], q))
        residuals += between_runs(d, slices(gemms["down"], inner))
    found: dict[str, float] = {
        "embeddings": ID_BYTES + (row_bytes + F32_BYTES + BF16_BYTES) * d,
        "heads": heads,
    }
    if own_heads:
        width = manifest.param_int("hidden_size_per_layer_input", minimum=1)
        # Two factors and their product a layer; then its projection is added to x.
        found["per_layer_inputs"] = 3 * BF16_BYTES * width * len(kinds)
        residuals += between_runs(d) * len(kinds)
    found["residuals"] = residuals - _last(d)
    dense = sum(key.startswith("dense.") for key in gemms)
    pooled = BF16_BYTES * (d + dim) if dense else 0
    found["vectors"] = each_text * (pooled + F32_BYTES * dim)
    return found


def _head_widths(manifest: Manifest, suffix: str) -> tuple[int, int]:
    """Columns of q, and of k (as many of v), in the layers of a suffix."""
    heads, kv_heads, head_dim = (
        manifest.param_int(f"{name}{suffix}", minimum=1)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return heads * head_dim, kv_heads * head_dim
