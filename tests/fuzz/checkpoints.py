"""Checkpoint folders with one file changed: exported to a bundle that opens, or refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from npu_embed.bundle import Bundle
from npu_embed.errors import BundleError
from npu_embed.exporters import (
    bert,
    embedding_gemma2,
    export_checkpoint,
    gemma3_text,
    kernels,
    published,
    selfcheck,
)

DATA = Path(__file__).parent.parent / "data"
WEIGHTS = "model.safetensors"

# A model of each family's exporter; the last is exported in the published layout as well.
MODELS = ("tiny-bert", "tiny-distilbert", "tiny-roberta", "tiny-gemma3", "tiny-eg2")
PUBLISHED = ("tiny-eg2",)

# What makes an export a matter of milliseconds.
VOCABULARY = 320
MAX_TOKENS = 16
MAX_SOFT_TOKENS = 4
MAX_CHUNKS = 1
SHORT_TEXTS = ("hello", "")


@dataclass(frozen=True, slots=True)
class Place:
    """A file of a checkpoint, and what of it stays: the numbers after a safetensors header."""

    model: str
    file: str
    stays: bytes

    @property
    def name(self) -> str:
        """The seed's name."""
        return f"{self.model}_{self.file.replace('/', '_')}"


def small_tokenizer(text: str, size: int = VOCABULARY) -> str:
    """A tokenizer.json with the first words of its vocabulary, and what can be merged of them."""
    tokenizer = json.loads(text)
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):  # Unigram's words and their scores
        model["vocab"] = model["vocab"][:size]
    else:
        model["vocab"] = {word: i for word, i in model["vocab"].items() if i < size}
    if "merges" in model:
        words = model["vocab"]
        model["merges"] = [m for m in model["merges"] if {*m, "".join(m)} <= words.keys()]
    return json.dumps(tokenizer, ensure_ascii=False)


def small_checkpoint(model: str, folder: Path) -> None:
    """A checkpoint of the tests with a short vocabulary, short texts and small images."""
    shutil.copytree(DATA / model, folder, ignore=shutil.ignore_patterns("references.*"))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(small_tokenizer(tokenizer.read_text("utf-8")), "utf-8")
    for file, key, value in (
        ("sentence_bert_config.json", "max_seq_length", MAX_TOKENS),
        ("tokenizer_config.json", "model_max_length", MAX_TOKENS),
        ("preprocessor_config.json", "max_soft_tokens", MAX_SOFT_TOKENS),
    ):
        if (folder / file).exists():
            values = json.loads((folder / file).read_text("utf-8"))
            (folder / file).write_text(json.dumps({**values, key: value}), "utf-8")


def header_bytes(content: bytes) -> int:
    """How long the header of a safetensors file is, with its own length."""
    return 8 + int.from_bytes(content[:8], "little")


@cache
def places(folder: Path) -> tuple[Place, ...]:
    """Every file of every model, which are written into folder."""
    found = []
    for model in MODELS:
        small_checkpoint(model, folder / model)
        for path in sorted((folder / model).rglob("*")):
            if path.is_file():
                content = path.read_bytes() if path.name == WEIGHTS else b""
                file = path.relative_to(folder / model).as_posix()
                found.append(Place(model, file, content[header_bytes(content) :]))
    return tuple(found)


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Few streams and few references, while it lasts."""
    with contextlib.ExitStack() as changed:
        for module in (bert, gemma3_text, embedding_gemma2, published):
            changed.enter_context(mock.patch.object(module, "MAX_CHUNKS", MAX_CHUNKS))
        changed.enter_context(mock.patch.object(kernels, "ROWS_BETWEEN", {}))
        changed.enter_context(mock.patch.object(selfcheck, "SHORT_TEXTS", SHORT_TEXTS))
        yield


def export(folder: Path, data: bytes) -> int:
    """Export a model with a file changed: which, and its bytes. How many bundles came of it."""
    known = places(folder)
    place = known[data[0] % len(known)] if data else known[0]
    path, out = folder / place.model / place.file, folder / "bundle"
    content = path.read_bytes()
    path.unlink()  # not written to: it may still be mapped
    path.write_bytes(data[1:] + place.stays)
    made = 0
    try:
        for layout in ("npu-embed", "published")[: 1 + (place.model in PUBLISHED)]:
            with contextlib.suppress(BundleError), _quick():
                export_checkpoint(folder / place.model, out, force=True, layout=layout)
                Bundle.open(out).close()
                made += 1
    finally:
        path.unlink()
        path.write_bytes(content)
    return made


def seeds(folder: Path) -> dict[str, bytes]:
    """Every file as `export` takes it, by name."""
    made = {}
    for i, place in enumerate(places(folder)):
        content = (folder / place.model / place.file).read_bytes()
        made[place.name] = bytes([i]) + content[: len(content) - len(place.stays)]
    return made
