"""The whole story: a checkpoint becomes a bundle, the bundle embeds, the vectors are right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from references import TINY, TINY_CLS, check_vectors, load_references

import npu_embed
from npu_embed.bundle import Bundle
from npu_embed.manifest import verify_sha256

MAX_SECONDS = 2.0


@pytest.mark.parametrize("checkpoint", [TINY, TINY_CLS], ids=lambda path: path.name)
def test_checkpoint_to_vectors(checkpoint: Path, tmp_path: Path) -> None:
    begun = time.process_time()
    wanted = load_references(checkpoint)

    path = npu_embed.export(checkpoint, tmp_path / "bundle")

    bundle = Bundle.open(path)
    assert all(check.ok for check in verify_sha256(path, bundle.manifest))
    assert set(bundle.specs.gemms) == {"qkv", "o", "up", "down"}
    assert [mha.rows for mha in bundle.specs.mhas] == list(range(16, 129, 16))
    assert bundle.has_array_programs
    bundle.close()

    with npu_embed.Embedder(path, device="emulated") as embedder:
        assert [tuple(ids) for ids in embedder.tokenize(wanted.texts)] == list(wanted.ids)
        check_vectors(embedder.embed(wanted.texts), wanted.embeddings)
        stats = embedder.stats
    assert (stats.texts, stats.packs, stats.swaps) == (len(wanted.texts), 1, 0)
    assert stats.runs == 3 * (4 + len(wanted.texts))
    assert time.process_time() - begun < MAX_SECONDS
