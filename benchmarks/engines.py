"""The engines that are compared, as worker.py loads them: one each in a process of its own.

This file runs in the peers' environment too: it imports the standard library, and an engine only
where that engine is loaded. Every engine tokenizes by itself, runs in float32 on the CPU with its
own choice of threads (npu-embed on the emulated NPU), and puts texts of like length together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Vectors = Any  # float32 [texts, dim]; numpy is the engine's to import
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine with its model.

    embed: texts and a setting (texts a batch, tokens a pack; None is the engine's own default) ->
    vectors. facts: versions and limits, read when they are asked for: on the way to a first vector
    they would cost time. pid: the process that computes. close: ends what it started.
    """

    embed: Callable[[Sequence[str], int | None], Vectors]
    facts: Callable[[], Facts]
    pid: int
    close: Callable[[], None] = lambda: None


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages."""
    return {package: metadata.version(package) for package in packages}


def npu_embed(model: str) -> Loaded:
    """This engine on the emulated NPU; the setting is pack_rows."""
    from npu_embed import Embedder, __version__

    opened: dict[int | None, Embedder] = {}

    def embedder(setting: int | None) -> Embedder:
        if setting not in opened:
            close()  # one at a time: another pack size is another set of buffers
            opened[setting] = Embedder(model, "emulated", pack_rows=setting)
        return opened[setting]

    def close() -> None:
        while opened:
            opened.popitem()[1].close()

    def embed(texts: Sequence[str], setting: int | None) -> Vectors:
        return embedder(setting).embed(texts)

    def facts() -> Facts:
        (one,) = opened.values()
        return {
            "versions": {"npu-embed": __version__, **versions("numpy")},
            "max_tokens": one.max_tokens,
            "max_rows": one.bundle.max_rows,
        }

    return Loaded(embed, facts, os.getpid(), close)


def sentence_transformers(model: str) -> Loaded:
    """sentence-transformers; the setting is batch_size."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model, device="cpu")

    def embed(texts: Sequence[str], setting: int | None) -> Vectors:
        own = {} if setting is None else {"batch_size": setting}
        return loaded.encode(list(texts), show_progress_bar=False, convert_to_numpy=True, **own)

    def facts() -> Facts:
        return {
            "versions": versions("sentence-transformers", "transformers", "torch", "numpy"),
            "max_tokens": loaded.max_seq_length,
        }

    return Loaded(embed, facts, os.getpid())


def onnxruntime(model: str) -> Loaded:
    """A graph of export_onnx.py in onnxruntime, with `tokenizers`; the setting is texts a batch.

    model: the .onnx file; tokenizer.json stands beside it.
    """
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]
    tokenizer = Tokenizer.from_file(str(Path(model).with_name("tokenizer.json")))
    pad_id = (tokenizer.padding or {"pad_id": 0})["pad_id"]
    tokenizer.no_padding()  # each batch is padded below, to its own longest text

    def batch(encoded: Sequence[Any]) -> Vectors:
        shape = (len(encoded), max(len(e.ids) for e in encoded))
        filled = {
            "input_ids": np.full(shape, pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for row, e in enumerate(encoded):
            filled["input_ids"][row, : len(e.ids)] = e.ids
            filled["attention_mask"][row, : len(e.ids)] = 1
        return session.run(None, {name: filled[name] for name in inputs})[0]

    def embed(texts: Sequence[str], setting: int | None) -> Vectors:
        encoded = tokenizer.encode_batch(list(texts))
        order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i].ids))
        return in_order(order, setting or 32, lambda part: batch([encoded[i] for i in part]))

    def facts() -> Facts:
        return {"versions": versions("onnxruntime", "tokenizers", "numpy")}

    return Loaded(embed, facts, os.getpid())


def transformers(model: str) -> Loaded:
    """A Gemma encoder in Hugging Face's code, mean and unit length after it; texts a batch."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right")
    limits = Path(model, "sentence_bert_config.json").read_text(encoding="utf-8")
    max_tokens = json.loads(limits)["max_seq_length"]

    def batch(texts: Sequence[str]) -> Vectors:
        found = tokenizer(
            texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
        )
        mask = found["attention_mask"][..., None]
        hidden = encoder(**found).last_hidden_state
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=1).numpy()

    def embed(texts: Sequence[str], setting: int | None) -> Vectors:
        order = by_characters(texts)
        with torch.inference_mode():
            return in_order(order, setting or 8, lambda part: batch([texts[i] for i in part]))

    def facts() -> Facts:
        return {"versions": {**versions("transformers", "torch"), "numpy": np.__version__}}

    return Loaded(embed, facts, os.getpid())


def egemma2(model: str) -> Loaded:
    """EmbeddingGemma 2 in Rust, in its own child process; the setting is texts a request."""
    import numpy as np
    from egemma2 import Egemma2

    client = Egemma2(model_dir=model, device="cpu")

    def embed(texts: Sequence[str], setting: int | None) -> Vectors:
        order = by_characters(texts)
        return in_order(
            order,
            setting or len(texts),
            lambda part: client.embed_numpy([texts[i] for i in part]),
        )

    def facts() -> Facts:
        return {"versions": {**versions("egemma2"), "numpy": np.__version__}}

    return Loaded(embed, facts, client._proc.pid, client.close)


def by_characters(texts: Sequence[str]) -> list[int]:
    """The indices of texts, the longest first: an engine that tokenizes later sorts by this."""
    return sorted(range(len(texts)), key=lambda i: -len(texts[i]))


def in_order(order: Sequence[int], size: int, embed: Callable[[Sequence[int]], Vectors]) -> Vectors:
    """Vectors by index, of batches of `size` indices taken as `order` has them."""
    import numpy as np

    parts = [embed(order[start : start + size]) for start in range(0, len(order), size)]
    found = np.concatenate(parts)
    out = np.empty_like(found)
    out[list(order)] = found
    return out


ENGINES: dict[str, Callable[[str], Loaded]] = {
    "npu-embed": npu_embed,
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "transformers": transformers,
    "egemma2": egemma2,
}
