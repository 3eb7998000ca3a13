"""The checkpoints under tests/data, the float32 vectors stored with them, and how near is near.

MIN_COSINE: the lowest cosine between a vector of the engine and its float32 reference. Rounding
weights, inputs and outputs of every linear layer to bfloat16 alone leaves 0.99992 on these
checkpoints (1 - cos is the squared angle / 2); scores, probabilities and contexts are rounded as
often again, and a bound for all texts needs room for the unlucky one: 1 - cos may be four times
that.

NEAR_BITS: what a text's vector may move, element by element, with the company it has. Each of the
array's results is rounded to bfloat16 (2^-8 relative), so a last bit of a float32 sum that tips one
of them moves a hidden value by one part in 256; the mean over a row of values and a norm take it
down to about a tenth of that in a vector of unit length, whose elements are at most 1.

Some BLAS' sums depend on how many rows a product has and on a row's place among them (OpenBLAS' on
AVX2, not on AVX-512). There any rounding may fall otherwise in other company, so that two vectors
are as far apart as two of the angle that rounding leaves to the reference, sqrt(2 (1 - 0.99992)) =
0.0126: sqrt(2) 0.0126 / sqrt(384) an element, and four times that for the largest of many.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from npu_embed.manifest import Manifest
from npu_embed.tensors import open_tensors

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny-bert"
TINY_CLS = DATA / "tiny-bert-cls"
MINILM = DATA / "minilm"

MIN_COSINE = 0.9997


def sums_depend_on_place() -> bool:
    """Whether a row of a numpy product has other bits in other company."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((96, 384), (384, 192)))
    whole = a @ b
    parts = [a[start:stop] @ b for start, stop in ((0, 16), (16, 48), (48, 53), (53, 96))]
    return not np.array_equal(whole, np.concatenate(parts))


_AS_ROUNDED = 4 * np.sqrt(2) * np.sqrt(2 * (1 - 0.99992)) / np.sqrt(384)
NEAR_BITS = float(_AS_ROUNDED) if sums_depend_on_place() else 2.0**-8 / 10
UNIT_TOLERANCE = 1e-5  # a sum of squares of float32 numbers, each rounded to 2^-24

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class References:
    """Texts, their token ids and their float32 vectors [texts, dim]."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    embeddings: F32


def load_references(folder: Path) -> References:
    """The references stored in a folder of tests/data."""
    lines = (folder / "references.jsonl").read_text(encoding="utf-8").splitlines()
    texts = tuple(json.loads(line)["text"] for line in lines)
    arrays = load_file(folder / "references.safetensors")
    ids = tuple(tuple(arrays[f"ids.{i}"].tolist()) for i in range(len(texts)))
    return References(texts, ids, arrays["embeddings"])


def cosines(a: F32, b: F32) -> NDArray[np.float64]:
    """The cosine of each row of a with the same row of b."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
    found: NDArray[np.float64] = (a64 * b64).sum(axis=1) / norms
    return found


def check_vectors(found: F32, wanted: F32, lowest: float = MIN_COSINE) -> None:
    """Fail unless each row is finite, of unit length, and as near its reference as it must be."""
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < UNIT_TOLERANCE
    near = cosines(found, wanted)
    assert near.min() >= lowest, f"texts[{near.argmin()}]: cosine {near.min():.6f}"


# Widths of the tiny BERT -> what cut_checkpoint leaves of them; 48 is 3 heads of 16.
CUT_WIDTHS = {64: 48, 160: 100}


def cut_checkpoint(source: Path, out: Path) -> Path:
    """The first columns of a tiny BERT as a checkpoint of its own, without references."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("references*"))
    weights = load_file(source / "model.safetensors")
    cut = {
        name: np.ascontiguousarray(array[tuple(slice(CUT_WIDTHS.get(n, n)) for n in array.shape)])
        for name, array in weights.items()
    }
    save_file(cut, out / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.update(hidden_size=48, num_attention_heads=3, intermediate_size=100)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pooling = json.loads((source / "1_Pooling/config.json").read_text(encoding="utf-8"))
    pooling["word_embedding_dimension"] = 48
    (out / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return out


def stored_references(bundle: Path) -> References:
    """The references an exporter left in a bundle."""
    manifest, tensors = Manifest.read(bundle), open_tensors(bundle)
    records = manifest.tagged("tref")
    rows = range(len(records))
    return References(
        tuple(record.field_hex(2, "a text") for record in records),
        tuple(tuple(tensors.i32(f"tref.{j}.ids").tolist()) for j in rows),
        np.stack([tensors.f32(f"tref.{j}.embedding") for j in rows]),
    )
