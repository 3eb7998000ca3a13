"""The two models that are compared, and the engines that run each from the same weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import peers
from peers import Unavailable
from processes import OURS, Engine
from targets import EGEMMA2, HF, ORT, ORT_INT8, ST, ST_BEST

from npu_embed import fetch
from npu_embed.bundle import Bundle

RECIPE = fetch.DEFAULT_RECIPE
CHECKPOINT = peers.RESULTS / "checkpoint"

BATCH_SIZES = (4, 8, 16, 32)
PACK_ROWS = (256, 512, 1024, 2048, 4096)
HF_BATCH = 8  # its fastest of 4 to 32 on two cores; a sweep would take as long as the rest

ENGINES_OF: Mapping[str, tuple[str, ...]] = {
    "mixed": (ST, ST_BEST, ORT, ORT_INT8, OURS),
    "few": (ST, ST_BEST, ORT, ORT_INT8, OURS),
    "one": (ST, ORT, ORT_INT8, OURS),
    "cold": (ORT, OURS),
    "gemma": (HF, EGEMMA2, OURS),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A model's engines by name, those that are missing and why; texts and their tokens."""

    bundle: Bundle
    engines: Mapping[str, Engine]
    missing: Mapping[str, str]
    texts: Sequence[str]
    lengths: Sequence[int]

    def part(self, *names: str) -> tuple[list[Engine], dict[str, str]]:
        """The engines of these names, and of these those that are missing."""
        return (
            [self.engines[name] for name in names if name in self.engines],
            {name: self.missing[name] for name in names if name in self.missing},
        )

    def count(self, text: str) -> int:
        """The tokens of a text."""
        return count_tokens(self.bundle, [text])[0]


def python_of_peers(chosen: str | None) -> str:
    """The Python that runs the peers: the chosen one, else that of benchmarks/.venv."""
    return chosen or str(peers.peer_python())


def count_tokens(bundle: Bundle, texts: Sequence[str]) -> list[int]:
    """The tokens of each text as the engines see it: cut to the model's limit."""
    return [len(encoded.ids) for encoded in bundle.open_tokenizer().encode_batch(list(texts))]


def pack_settings(bundle: Bundle) -> tuple[int | None, ...]:
    """The pack sizes that a bundle takes: its own, and smaller ones."""
    smaller = [rows for rows in PACK_ROWS if bundle.max_tokens <= rows < bundle.max_rows]
    return (None, *smaller)


def as_it_comes(engine: Engine) -> Engine:
    """The engine without a choice of settings."""
    return replace(engine, settings=())


def minilm(
    texts: Sequence[str], python: str, bundle: str | None = None, checkpoint: str | None = None
) -> Setup:
    """The engines of a sentence-transformers checkpoint; all-MiniLM-L6-v2 by default."""
    opened = Bundle.open(Path(bundle) if bundle else fetch.get(RECIPE))
    weights = Path(checkpoint or CHECKPOINT)
    if not checkpoint and not weights.is_dir():
        fetch.checkpoint(RECIPE, weights)
    found = [
        Engine(ST, "sentence-transformers", python, str(weights)),
        Engine(ST_BEST, "sentence-transformers", python, str(weights), BATCH_SIZES),
        Engine(OURS, OURS, sys.executable, str(opened.path), pack_settings(opened)),
    ]
    missing = {}
    try:
        graphs = peers.onnx_graphs(weights, Path(python))
    except Unavailable as error:
        missing = {ORT: str(error), ORT_INT8: str(error)}
    else:
        for name, file in ((ORT, "float32.onnx"), (ORT_INT8, "int8.onnx")):
            found.append(Engine(name, "onnxruntime", python, str(graphs / file), BATCH_SIZES))
    engines = {engine.name: engine for engine in found}
    return Setup(opened, engines, missing, texts, count_tokens(opened, texts))


def gemma(texts: Sequence[str], python: str) -> Setup:
    """The engines of a full-size EmbeddingGemma 2 of random weights.

    Raises:
        Unavailable: its bundle cannot be made.
    """
    weights = peers.full_checkpoint()
    opened = Bundle.open(peers.full_bundle(weights))
    found = (
        Engine(HF, "transformers", python, str(weights), (HF_BATCH,)),
        Engine(EGEMMA2, "egemma2", python, str(weights)),
        Engine(OURS, OURS, sys.executable, str(opened.path), pack_settings(opened)),
    )
    engines = {engine.name: engine for engine in found}
    return Setup(opened, engines, {}, texts, count_tokens(opened, texts))
