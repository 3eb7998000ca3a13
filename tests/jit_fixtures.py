"""Tests in both ways of computing: numpy's, and the compiled kernels that give the same bits."""

from __future__ import annotations

from types import ModuleType

import pytest

from npu_embed import jit


@pytest.fixture(scope="session")
def compiled_kernels() -> ModuleType:
    """The compiled kernels, not in use yet."""
    pytest.importorskip("numba", reason="numba is not installed: nothing is compiled")
    from npu_embed.jit import compiled

    assert compiled.compile_all(lambda: False)
    return compiled


@pytest.fixture(params=["numpy", "compiled"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute as this parameter says: "numpy" or "compiled"."""
    name: str = request.param
    found = request.getfixturevalue("compiled_kernels") if name == "compiled" else None
    monkeypatch.setattr(jit, "kernels", found)
    return name
