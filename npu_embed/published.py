"""The layout of taconite's published EmbeddingGemma 2 bundles, said in this project's words.

Such a bundle has no `family` param. Its params, GEMM keys and tensors have short names of their
own (docs/bundle-format.md, "The published layout"); here they get the names that the models read,
beside their own, so that one forward runs both layouts. Errors keep to the names in the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from .errors import BundleError
from .manifest import Manifest
from .specs import DEFAULT_MHA, GemmSpec, Specs
from .tensors import Tensors

FAMILY = "embedding_gemma2_published"
VISION = "v_"  # beginning of the vision tower's GEMM keys, whose rows are another number

# The lowest cosine with a float32 reference that the bundle's makers ask of a vector.
MIN_COSINE = 0.999

KINDS = {"s": "sliding", "g": "full"}  # letters of layer_types
_TYPICAL = ("D", "layers", "layer_types", "hd", "kv_heads", "ple")

_PARAMS = {
    "hidden_size": "D",
    "intermediate_size": "I",
    "num_hidden_layers": "layers",
    "hidden_size_per_layer_input": "ple",
    "embedding_dim": "out",
    "dim": "out",
    "rope_theta": "theta_g",
    "rope_local_base_freq": "theta_s",
    "rms_norm_eps": "eps",
    "max_rows": "t.rows",
}
# What the layout has no params for, since nothing else is published in it.
_FIXED = {
    "family": FAMILY,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling": "mean",
    "normalize": "1",
    "attention": "host",
    "stages": "embeddings,per_layer_inputs,layers,norm,pooling,embedding_projection,normalize",
}
_VISION_PARAMS = {
    "hidden_size": "v.D",
    "intermediate_size": "v.I",
    "num_hidden_layers": "v.layers",
    "num_attention_heads": "v.heads",
    "num_key_value_heads": "v.heads",
    "head_dim": "v.hd",
    "rope_theta": "v.theta",
    "rms_norm_eps": "v.eps",
    "patch_size": "v.patch",
    "pooling_kernel_size": "v.pool",
    "max_rows": "v.rows",
}
_VISION_GEMMS = {
    "patch": "v_patch",
    "qkv": "v_qkv",
    "o": "v_o",
    "gate_up": "v_gu",
    "down": "v_down",
    "projection": "v_ev",
}
_VISION_TENSORS = {
    "vision_tower.patch_embedder.input_proj.packed": "v.patch",
    "vision_tower.patch_embedder.position_embedding_table": "v.pos",
    "embed_vision.embedding_projection.packed": "v.ev",
}
_GEMMS = {
    "ple": "t_ple",
    "gate_up": "t_gu",
    "down": "t_down",
    "ple_gate": "t_pleg",
    "ple_proj": "t_plep",
}
_TENSORS = {
    "embed_tokens.weight": "t.embed",
    "norm.weight": "t.norm",
    "embedding_projection.weight": "t.proj",
    "ple.per_layer_projection_norm.weight": "t.ple_norm",
    "ple.packed": "t.ple",
}
_LAYER_TENSORS = {
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "post_attn",
    "post_feedforward_layernorm.weight": "post_ff",
    "ple_block.post_per_layer_input_norm.weight": "post_ple",
    "qkv.packed": "qkv",
    "o.packed": "o",  # the vision tower's, which is whole
    "gate_up.packed": "gu",
    "ple_gate.packed": "pleg",
    "ple_proj.packed": "plep",
}


def is_published(manifest: Manifest) -> bool:
    """Whether a manifest is one of the published layout, as far as its params tell."""
    return "family" not in manifest.params and all(p in manifest.params for p in _TYPICAL)


def translate(
    manifest: Manifest, specs: Specs, tensors: Tensors
) -> tuple[Manifest, Specs, Tensors]:
    """The parts of a published bundle, with the names beside them that the models read.

    Raises:
        BundleError: a param is missing or contradicts another, or a GEMM of the text encoder is
            missing.
    """
    layers = manifest.param_int("layers", minimum=1, maximum=1024)
    heads = _heads(manifest, layers)
    params = {ours: manifest.param_str(theirs) for ours, theirs in _PARAMS.items()}
    lines = {ours: manifest.param_lines.get(theirs, 0) for ours, theirs in _PARAMS.items()}
    for kind, (head_dim, kv_heads) in heads.items():
        params |= {
            f"num_attention_heads.{kind}": manifest.param_str("heads"),
            f"num_key_value_heads.{kind}": str(kv_heads),
            f"head_dim.{kind}": str(head_dim),
        }
    letters = manifest.param_list("layer_types")
    params["layer_types"] = ",".join(f"{KINDS[letter]}_attention" for letter in letters)
    params["max_tokens"] = str(manifest.param_int("max_text_tokens", 0, minimum=1))
    params["vocab_size"] = str(_vocab_size(manifest, tensors))
    vision_layers = 0
    if has_images(manifest):
        vision_layers = manifest.param_int("v.layers", minimum=1, maximum=1024)
        for ours, theirs in _VISION_PARAMS.items():
            params[f"{ours}.vision"] = manifest.param_str(theirs)
            lines[f"{ours}.vision"] = manifest.param_lines.get(theirs, 0)
        tensors.bf16("v.pos", (2, None, None))
        params["position_embedding_size.vision"] = str(tensors.shape("v.pos")[1])
        params["attention.vision"] = "npu"
    translated = replace(
        manifest,
        params={**manifest.params, **_FIXED, **params},
        param_lines={**manifest.param_lines, **lines},
    )
    aliases = _aliases(tensors, layers) | _vision_aliases(tensors, vision_layers)
    return translated, _specs(manifest, specs, heads), tensors.aliased(aliases)


def has_images(manifest: Manifest) -> bool:
    """Whether a published bundle has a vision tower."""
    return "v.D" in manifest.params


def _heads(manifest: Manifest, layers: int) -> dict[str, tuple[int, int]]:
    """(head_dim, kv heads) by type of layer, which all layers of the type must have."""
    letters = manifest.param_list("layer_types")
    head_dims = manifest.param_ints("hd", minimum=1, maximum=1 << 12)
    kv_heads = manifest.param_ints("kv_heads", minimum=1, maximum=1 << 12)
    for name, values in (("layer_types", letters), ("hd", head_dims), ("kv_heads", kv_heads)):
        if len(values) != layers:
            raise _error(manifest, name, f"has {len(values)} items", f"{layers}, one a layer")
    found: dict[str, tuple[int, int]] = {}
    for i, (letter, *heads) in enumerate(zip(letters, head_dims, kv_heads, strict=True)):
        if letter not in KINDS:
            raise _error(manifest, "layer_types", f"has {letter!r}", f"{' or '.join(KINDS)}")
        head_dim, kv = heads
        first = found.setdefault(KINDS[letter], (head_dim, kv))
        for name, value, wanted in (("hd", head_dim, first[0]), ("kv_heads", kv, first[1])):
            if value != wanted:
                others = f"{wanted} as in the other {KINDS[letter]} layers"
                raise _error(manifest, name, f"is {value} in layer {i}", others)
    return found


def _vocab_size(manifest: Manifest, tensors: Tensors) -> int:
    """Rows of the table of embeddings; a bundle for images only has no table, and needs no row."""
    if not tensors.has("t.embed"):
        return 1
    tensors.bf16("t.embed", (None, None))
    rows, width = tensors.shape("t.embed")
    if width != manifest.param_int("D"):
        raise _error(manifest, "D", f"is {manifest.param_str('D')}", f"{width} as t.embed has")
    return rows


def _specs(manifest: Manifest, specs: Specs, heads: Mapping[str, tuple[int, int]]) -> Specs:
    """The specs with the keys that the models ask for; each spec keeps the key of its record."""
    names = dict(_GEMMS)
    for kind, (head_dim, kv_heads) in heads.items():
        width = (manifest.param_int("heads", minimum=1, maximum=1 << 12) + 2 * kv_heads) * head_dim
        names[f"qkv.{kind}"] = f"t_qkv{width}"
        names[f"o.{kind}"] = "t_o"
    buckets = dict(specs.buckets)
    if has_images(manifest):
        names |= {f"{ours}.vision": theirs for ours, theirs in _VISION_GEMMS.items()}
        if DEFAULT_MHA in buckets:
            buckets["vision"] = buckets.pop(DEFAULT_MHA)
    gemms: dict[str, GemmSpec] = dict(specs.gemms)
    for ours, theirs in names.items():
        if theirs not in specs.gemms:
            raise BundleError(
                f"{manifest.name}: no gemm {theirs} record, wanted {', '.join(names.values())}; "
                "re-export the bundle."
            )
        gemms[ours] = specs.gemms[theirs]
    return Specs(gemms, buckets)


def _aliases(tensors: Tensors, layers: int) -> dict[str, str]:
    """Name that the models ask for -> name in the file."""
    found = dict(_TENSORS)
    for i in range(layers):
        found |= _layer_aliases(tensors, f"layers.{i}", f"t{i}", ("o", "down"))
    return {f"language_model.{ours}": theirs for ours, theirs in found.items()}


def _vision_aliases(tensors: Tensors, layers: int) -> dict[str, str]:
    found = dict(_VISION_TENSORS)
    for i in range(layers):
        layer = f"vision_tower.encoder.layers.{i}"
        found |= _layer_aliases(tensors, layer, f"v{i}", ("down",))
    return found


def _layer_aliases(
    tensors: Tensors, ours: str, theirs: str, sliced: Sequence[str]
) -> dict[str, str]:
    """The aliases of a layer, some of whose weights are a tensor a slice of K: t3.o0, t3.o1 ..."""
    found = {f"{ours}.{name}": f"{theirs}.{name2}" for name, name2 in _LAYER_TENSORS.items()}
    for key in sliced:
        found[f"{ours}.{key}.packed"] = f"{theirs}.{key}0"
        for s in count():
            # One too many, so that an error over a missing slice has the file's name.
            found[f"{ours}.{key}.{s}.packed"] = f"{theirs}.{key}{s}"
            if not tensors.has(f"{theirs}.{key}{s}"):
                break
    return found


def _error(manifest: Manifest, name: str, found: str, wanted: str) -> BundleError:
    line = manifest.param_lines.get(name, 0)
    return BundleError(
        f"{manifest.name}:{line}: param {name} {found}, wanted {wanted}; re-export the bundle."
    )
