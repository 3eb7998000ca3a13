"""Tests in both ways of computing: numpy alone, and compiled code where there is some."""

from __future__ import annotations

from types import ModuleType

import pytest

from npu_embed import jit
from npu_embed.emulator.llvm import machine


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what waits for the compiled kernels: seconds, or a minute the first time."""
    for item in items:
        if "compiled_kernels" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def compiled_kernels() -> ModuleType:
    """The compiled kernels, not in use yet."""
    pytest.importorskip("numba", reason="numba is not installed: nothing is compiled")
    from npu_embed.jit import compiled

    assert compiled.compile_all(lambda: False)
    return compiled


@pytest.fixture(params=["numpy", pytest.param("compiled", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute as this parameter says: "numpy" or "compiled"."""
    name: str = request.param
    found = request.getfixturevalue("compiled_kernels") if name == "compiled" else None
    monkeypatch.setattr(jit, "kernels", found)
    if name == "numpy":
        monkeypatch.setattr(machine, "load", lambda: None)
    return name
