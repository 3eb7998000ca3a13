"""One engine in a process of its own, commanded by versus.py: a JSON line in, a JSON line out.

    worker.py ENGINE MODEL CORPUS.jsonl

It loads ENGINE's MODEL and says {"ready": ...}; then `{"run": true}` embeds the corpus and answers
{"seconds": ...}, `{"save": "FILE.npy"}` stores the last run's vectors. End of input ends it. This
file runs in the peer's environment too: it imports the standard library and the engine, no more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

WARM_UP_TEXTS = 64
Vectors = Any  # float32 [texts, dim]; numpy is the engine's to import
Embed = Callable[[Sequence[str]], Vectors]


def sentence_transformers(model: str) -> tuple[Embed, dict[str, Any]]:
    """sentence-transformers on the CPU with its defaults; normalised as the model's modules say."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model, device="cpu")

    def embed(texts: Sequence[str]) -> Vectors:
        return loaded.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)

    return embed, {
        "versions": _versions("sentence-transformers", "transformers", "torch", "numpy"),
        "batch_size": 32,  # encode's default
        "max_tokens": loaded.max_seq_length,
    }


def npu_embed(model: str) -> tuple[Embed, dict[str, Any]]:
    """This engine with its defaults, on the emulated NPU."""
    from npu_embed import Embedder, __version__

    loaded = Embedder(model, "emulated")
    return loaded.embed, {
        "versions": {"npu-embed": __version__, **_versions("numpy")},
        "pack_rows": loaded.bundle.max_rows,
        "max_tokens": loaded.max_tokens,
    }


ENGINES: dict[str, Callable[[str], tuple[Embed, dict[str, Any]]]] = {
    "sentence-transformers": sentence_transformers,
    "npu-embed": npu_embed,
}


def _versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


def serve(engine: str, model: str, corpus: str) -> None:
    """Answer commands until the input ends."""
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    start = time.perf_counter()
    embed, facts = ENGINES[engine](model)
    load_s = time.perf_counter() - start
    embed(texts[:WARM_UP_TEXTS])
    answer({"ready": engine, "load_s": round(load_s, 3), **facts})
    vectors: Vectors = None
    for line in sys.stdin:
        command = json.loads(line)
        if "save" in command:
            import numpy as np

            np.save(command["save"], np.asarray(vectors, dtype=np.float32))
            answer({"saved": command["save"]})
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            vectors = embed(texts)
            answer(
                {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            )


if __name__ == "__main__":
    serve(*sys.argv[1:])
