"""What all tests share: an emulated NPU of their own, no user's settings, options, plugins."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# Before numpy is imported: on matrices this small threads only wait for each other, and for ever
# on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from npu_embed import settings
from npu_embed.emulator import slots

pytest_plugins = ["device_fixtures", "jit_fixtures", "made_bundles", "rigs"]
MOST_SLOTS = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of tests on a real NPU."""
    group = parser.getgroup("npu", "tests on a real NPU")
    group.addoption("--require-npu", action="store_true", help="fail where no NPU can be used")
    group.addoption("--npu-xclbin", help="a kernel compiled for this NPU that copies bo0 to bo1")
    group.addoption("--npu-insts", help="its instruction stream, in binary")
    group.addoption("--npu-bytes", type=int, default=4096, help="how much it copies")


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what runs alone, so that each test is in one of `make test`'s three parts."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was made by importing and collecting out of every later search for cycles."""
    gc.freeze()


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
