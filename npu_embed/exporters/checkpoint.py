"""A checkpoint folder as Hugging Face and sentence-transformers write it.

What is the same for every model family: which modules follow the transformer, how tokens are
pooled, the prompts, the token limit. Whatever this project would compute differently is refused by
name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from ..errors import BundleError, InputError
from ..records import shown
from .jsonfile import JsonFile, has_surrogate, load_json, one_of, quoted

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
POOLINGS = ("mean", "cls", "max")
MAX_PROMPT_BYTES = 16 << 10  # name and text, whose hex is a line of the manifest

# Weight files that are not one safetensors file, and what to do about each.
_OTHER_WEIGHTS = {
    "model.safetensors.index.json": "a sharded checkpoint; merge it into one model.safetensors",
    "pytorch_model.bin": "a pickle, which can run code; convert it to model.safetensors",
    "tf_model.h5": "TensorFlow weights; convert them to model.safetensors",
    "flax_model.msgpack": "Flax weights; convert them to model.safetensors",
}
# sentence-transformers' limit of a Transformer module; all but the first are names of old versions.
SETTINGS = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "xlm-roberta")
)
# sentence-transformers' flags, after "pooling_mode_".
_POOLING_FLAGS = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of modules.json: its kind ("Dense") and its folder, relative to the checkpoint."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint folder says, checked as far as every family needs it.

    model_folder holds config, weights and tokenizer. modules are those after Transformer and
    Pooling; pooled_width is the width Pooling expects, where its file says so. settings is the
    name of the file that max_seq_length comes from.
    """

    folder: Path
    model_folder: Path
    config: JsonFile
    modules: tuple[Module, ...]
    pooling: str
    pooled_width: int | None
    prompts: Mapping[str, str]
    default_prompt: str | None
    settings: str
    max_seq_length: int | None
    model_max_length: int | None

    @property
    def weights_path(self) -> Path:
        """The safetensors file."""
        return self.model_folder / WEIGHTS

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file."""
        return self.model_folder / TOKENIZER

    def max_tokens(self, max_position_embeddings: int, unused: int = 0) -> int:
        """The most tokens a text may have, special ones included.

        max_seq_length where the checkpoint gives it, else the smaller of what model and tokenizer
        allow. unused: positions before that of a text's first token.

        Raises:
            BundleError: max_seq_length is more than the model has positions for.
        """
        positions = max_position_embeddings - unused
        if self.max_seq_length is None:
            return min(positions, self.model_max_length or positions)
        if self.max_seq_length > positions:
            less = f" less {unused} that no token uses" if unused else ""
            raise BundleError(
                f"{self.settings}: max_seq_length {self.max_seq_length}, wanted at most "
                f"max_position_embeddings {max_position_embeddings} of {CONFIG}{less}; lower it."
            )
        return self.max_seq_length


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        InputError: no such folder.
        BundleError: a file is missing or says what this project does not do.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, wanted a checkpoint (config.json, ...).")
    modules = _modules(folder)
    model_folder = folder / modules[0].path
    config = JsonFile.read(model_folder, CONFIG)
    if config.has("quantization_config"):
        raise config.error("quantization_config", "float weights", "export the unquantised model")
    _check_weights(model_folder)

    settings = _settings(model_folder)
    tokenizer_config = JsonFile.read_if_there(model_folder, "tokenizer_config.json")
    _check_lower_case(model_folder, settings, tokenizer_config)
    pooling, pooled_width = _pooling(folder, modules[1])
    prompts, default_prompt = _prompts(folder)
    has_max = settings.has("max_seq_length")
    has_model_max = tokenizer_config.has("model_max_length")
    return Checkpoint(
        folder=folder,
        model_folder=model_folder,
        config=config,
        modules=modules[2:],
        pooling=pooling,
        pooled_width=pooled_width,
        prompts=prompts,
        default_prompt=default_prompt,
        settings=settings.name,
        max_seq_length=settings.integer("max_seq_length") if has_max else None,
        model_max_length=(
            tokenizer_config.integer("model_max_length", maximum=None) if has_model_max else None
        ),
    )


def _modules(folder: Path) -> tuple[Module, ...]:
    """The modules in order; Transformer and Pooling are certain to be the first two."""
    if not (folder / "modules.json").exists():
        logger.warning(
            "%s: no modules.json, so not a sentence-transformers folder; exporting mean pooling "
            "and unit length.",
            folder,
        )
        return (Module("Transformer", ""), Module("Pooling", ""), Module("Normalize", ""))
    entries = load_json(folder / "modules.json", "modules.json")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BundleError("modules.json: wanted a list of objects; download the checkpoint again.")
    modules = tuple(_module(JsonFile(f"modules.json[{i}]", e)) for i, e in enumerate(entries))
    kinds = [module.kind for module in modules]
    once = all(kinds.count(kind) <= 1 for kind in ("Transformer", "Pooling", "Normalize"))
    if kinds[:2] != ["Transformer", "Pooling"] or not once:
        raise BundleError(
            f"modules.json: {', '.join(kinds) or 'no modules'}, wanted Transformer, Pooling and "
            "then Dense or Normalize; this exporter knows no other order."
        )
    return modules


def _module(entry: JsonFile) -> Module:
    kind = entry.text("type").rpartition(".")[2]
    if kind not in MODULES or not entry.text("type").startswith("sentence_transformers."):
        raise entry.error(
            "type", f"sentence_transformers' {one_of(MODULES)}", "this exporter has no other module"
        )
    path = entry.text("path", default="")
    parts = PureWindowsPath(path)  # both separators, drives too
    if parts.anchor or ".." in parts.parts or "\0" in path or has_surrogate(path):
        raise entry.error("path", "a folder inside the checkpoint", "correct the file")
    return Module(kind, path)


def _check_weights(model_folder: Path) -> None:
    if not (model_folder / WEIGHTS).exists():
        for name, problem in _OTHER_WEIGHTS.items():
            if (model_folder / name).exists():
                raise BundleError(f"{name}: {problem} and export again.")
    for name in (WEIGHTS, TOKENIZER):
        if not (model_folder / name).is_file():
            raise BundleError(
                f"{name}: missing from {model_folder}, wanted it; download the whole checkpoint."
            )


def _settings(model_folder: Path) -> JsonFile:
    """The Transformer module's settings, under whichever name they are there."""
    found = (JsonFile.read_if_there(model_folder, name) for name in SETTINGS)
    return next((file for file in found if file.values), JsonFile(SETTINGS[0], {}))


def _check_lower_case(model_folder: Path, settings: JsonFile, tokenizer_config: JsonFile) -> None:
    """Refuse a lower-casing that only the Python side of the reference would do."""
    tokenizer = JsonFile.read(model_folder, TOKENIZER)
    normalizer = tokenizer.values.get("normalizer")
    lowercase = normalizer.get("lowercase") if isinstance(normalizer, dict) else None
    if settings.flag("do_lower_case", False) and lowercase is not True:
        raise settings.error(
            "do_lower_case", f"false, since {TOKENIZER} does not lower-case", "make the two agree"
        )
    declared = tokenizer_config.values.get("do_lower_case")
    if isinstance(declared, bool) and isinstance(lowercase, bool) and declared != lowercase:
        raise tokenizer_config.error(
            "do_lower_case", f"{lowercase} as in {TOKENIZER}", "make the two agree"
        )


def _pooling(folder: Path, module: Module) -> tuple[str, int | None]:
    """(mean, cls or max; the width pooled, where the file gives it)."""
    if not module.path:
        return "mean", None
    config = JsonFile.read(folder, f"{module.path}/config.json")
    if not config.flag("include_prompt", True):
        raise config.error("include_prompt", "true", "this engine pools the prompt's tokens too")
    has_width = config.has("word_embedding_dimension")
    width = config.integer("word_embedding_dimension") if has_width else None
    if config.has("pooling_mode"):
        return config.choice("pooling_mode", POOLINGS), width

    prefix = "pooling_mode_"
    flags = [key for key in config.values if key.startswith(prefix)]
    chosen = [key for key in flags if config.flag(key, False)]
    known = [prefix + flag for flag in _POOLING_FLAGS]
    for key in chosen:
        if key not in known:
            raise config.error(key, f"only {one_of(known)} true", "this engine pools no other way")
    if len(chosen) > 1 or (flags and not chosen):
        raise BundleError(
            f"{config.name}: {' and '.join(chosen) or 'no pooling mode'} true, wanted exactly "
            f"one of {one_of(known)}; this engine pools one way."
        )
    return (_POOLING_FLAGS[chosen[0].removeprefix(prefix)] if chosen else "mean"), width


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, in the file's order, and the default one's name."""
    config = JsonFile.read_if_there(folder, "config_sentence_transformers.json")
    prompts = config.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise config.error("prompts", "an object of strings", "correct the file")
    for name, prompt in prompts.items():
        # "-" is how a manifest says that a text has no prompt.
        if name.split() != [name] or name == "-" or has_surrogate(name + prompt):
            raise BundleError(
                f"{config.name}: prompt {shown(name)}: {shown(prompt)}, wanted a name without "
                "white space, which is not '-', and no lone surrogates; rename it."
            )
        size_bytes = len((name + prompt).encode("utf-8"))
        if size_bytes > MAX_PROMPT_BYTES:
            raise BundleError(
                f"{config.name}: prompt {shown(name)}: {size_bytes} bytes, wanted at most "
                f"{MAX_PROMPT_BYTES}; shorten it."
            )
    default = config.text("default_prompt_name", default="") or None
    if default is not None and default not in prompts:
        raise config.error(
            "default_prompt_name",
            f"one of {quoted(list(prompts)) if prompts else 'no prompts'}",
            "correct the file",
        )
    return prompts, default
