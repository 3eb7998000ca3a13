"""Bundles made once for all of pytest-xdist's workers, only to be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from gemma_checkpoints import TINY_EG2, TINY_GEMMA3
from references import TINY, TINY_CLS, cut_checkpoint

from npu_embed import fetch
from npu_embed.exporters import export_checkpoint

MakeBundle = Callable[[str, Callable[[Path], Path]], Path]


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """Makes a bundle by its name, once for all of pytest-xdist's workers."""
    temporary = tmp_path_factory.getbasetemp()
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "bundles"

    def once(name: str, make: Callable[[Path], Path]) -> Path:
        out = folder / name / "bundle"
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(out.parent / "lock"):
            return out if out.is_dir() else make(out)

    return once


@pytest.fixture(scope="session")
def tiny_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny BERT's bundle (mean pooling)."""
    return make_bundle("tiny-bert", partial(export_checkpoint, TINY, name="tiny-bert"))


@pytest.fixture(scope="session")
def tiny_cls_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny BERT's bundle with [CLS] pooling."""
    return make_bundle("tiny-bert-cls", partial(export_checkpoint, TINY_CLS, name="tiny-bert-cls"))


@pytest.fixture(scope="session")
def minilm_bundle() -> Path:
    """The default bundle in the user's own cache; made now, with a network, if it is not there."""
    return fetch.get()


@pytest.fixture
def tiny_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT's bundle, to be changed."""
    return shutil.copytree(tiny_bundle, tmp_path / "tiny-copy")


@pytest.fixture(scope="session")
def narrow_bundle(make_bundle: MakeBundle) -> Path:
    """A BERT cut out of the tiny one: none of its widths is a multiple of the array's tiles."""

    def make(out: Path) -> Path:
        checkpoint = cut_checkpoint(TINY, out.parent / "checkpoint")
        return export_checkpoint(checkpoint, out, name="narrow-bert")

    return make_bundle("narrow-bert", make)


@pytest.fixture(scope="session")
def gemma3_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny gemma3_text's bundle, attention on the NPU."""
    return make_bundle("gemma3", partial(export_checkpoint, TINY_GEMMA3, name="tiny-gemma3"))


@pytest.fixture(scope="session")
def eg2_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny embedding_gemma2's bundle, attention on the NPU."""
    return make_bundle("eg2", partial(export_checkpoint, TINY_EG2, name="tiny-eg2"))


@pytest.fixture(scope="session")
def gemma3_host_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny gemma3_text's bundle, attention on the host."""
    made = partial(export_checkpoint, TINY_GEMMA3, name="tiny-gemma3", attention="host")
    return make_bundle("gemma3-host", made)


@pytest.fixture(scope="session")
def eg2_host_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny embedding_gemma2's bundle, attention on the host."""
    made = partial(export_checkpoint, TINY_EG2, name="tiny-eg2", attention="host")
    return make_bundle("eg2-host", made)


@pytest.fixture(scope="session")
def published_bundle(make_bundle: MakeBundle) -> Path:
    """The tiny embedding_gemma2's bundle in the published layout."""
    made = partial(export_checkpoint, TINY_EG2, name="tiny-eg2", layout="published")
    return make_bundle("published", made)
