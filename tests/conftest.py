"""What all tests share: bundles made once, an emulated NPU of their own, no user's settings."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before numpy is imported: on matrices this small threads only wait for each other, and for ever
# on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gemma_checkpoints import TINY_EG2, TINY_GEMMA3
from references import TINY, TINY_CLS, cut_checkpoint

from npu_embed import fetch, settings
from npu_embed.emulator import slots
from npu_embed.exporters import export_checkpoint

pytest_plugins = ["device_fixtures", "jit_fixtures", "rigs"]
MOST_SLOTS = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of tests on a real NPU."""
    group = parser.getgroup("npu", "tests on a real NPU")
    group.addoption("--require-npu", action="store_true", help="fail where no NPU can be used")
    group.addoption("--npu-xclbin", help="a kernel compiled for this NPU that copies bo0 to bo1")
    group.addoption("--npu-insts", help="its instruction stream, in binary")
    group.addoption("--npu-bytes", type=int, default=4096, help="how much it copies")


@pytest.fixture(scope="session", autouse=True)
def _own_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No NPU_EMBED_* variable of the user's, slots that no other program shares, numpy alone."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in settings.VARIABLES:
            patch.delenv(variable, raising=False)
        patch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
        patch.setenv("NPU_EMBED_EMU_DIR", str(tmp_path_factory.mktemp("emulator")))
        patch.setenv("NPU_EMBED_COMPILED", "off")  # tests that want it say so: jit_fixtures
        yield


@pytest.fixture(scope="session")
def _slots_in_use() -> list[int]:
    """The slots that fixtures of a wider scope hold, as last seen."""
    return []


@pytest.fixture(autouse=True)
def _slots_of_earlier_tests(_slots_in_use: list[int]) -> None:
    """Free the contexts of earlier tests: those that an exception's frames name live in cycles."""
    table = slots.table(settings.emulator_dir())
    if len(table.holders(MOST_SLOTS)) > len(_slots_in_use):
        gc.collect()
        _slots_in_use[:] = table.holders(MOST_SLOTS)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT's bundle (mean pooling), only to be read."""
    return export_checkpoint(TINY, tmp_path_factory.mktemp("tiny") / "bundle", name="tiny-bert")


@pytest.fixture(scope="session")
def tiny_cls_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT's bundle with [CLS] pooling, only to be read."""
    out = tmp_path_factory.mktemp("tiny-cls") / "bundle"
    return export_checkpoint(TINY_CLS, out, name="tiny-bert-cls")


@pytest.fixture(scope="session")
def minilm_bundle() -> Path:
    """The default bundle in the user's own cache; made now, with a network, if it is not there."""
    return fetch.get()


@pytest.fixture
def tiny_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT's bundle, to be changed."""
    return shutil.copytree(tiny_bundle, tmp_path / "tiny-copy")


@pytest.fixture(scope="session")
def narrow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT cut out of the tiny one: none of its widths is a multiple of the array's tiles."""
    folder = tmp_path_factory.mktemp("narrow")
    checkpoint = cut_checkpoint(TINY, folder / "checkpoint")
    return export_checkpoint(checkpoint, folder / "bundle", name="narrow-bert")


@pytest.fixture(scope="session")
def gemma3_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny gemma3_text's bundle, attention on the NPU, only to be read."""
    out = tmp_path_factory.mktemp("gemma3") / "bundle"
    return export_checkpoint(TINY_GEMMA3, out, name="tiny-gemma3")


@pytest.fixture(scope="session")
def eg2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny embedding_gemma2's bundle, attention on the NPU, only to be read."""
    out = tmp_path_factory.mktemp("eg2") / "bundle"
    return export_checkpoint(TINY_EG2, out, name="tiny-eg2")


@pytest.fixture(scope="session")
def gemma3_host_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny gemma3_text's bundle, attention on the host, only to be read."""
    out = tmp_path_factory.mktemp("gemma3-host") / "bundle"
    return export_checkpoint(TINY_GEMMA3, out, name="tiny-gemma3", attention="host")


@pytest.fixture(scope="session")
def eg2_host_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny embedding_gemma2's bundle, attention on the host, only to be read."""
    out = tmp_path_factory.mktemp("eg2-host") / "bundle"
    return export_checkpoint(TINY_EG2, out, name="tiny-eg2", attention="host")


@pytest.fixture(scope="session")
def published_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny embedding_gemma2's bundle in the published layout, only to be read."""
    out = tmp_path_factory.mktemp("published") / "bundle"
    return export_checkpoint(TINY_EG2, out, name="tiny-eg2", layout="published")
