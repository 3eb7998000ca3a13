"""Tests in every way of computing: by numpy alone, and by compiled code where there is some."""

from __future__ import annotations

from types import ModuleType

import array_code
import pytest

from npu_embed import jit
from npu_embed.emulator.llvm import machine
from npu_embed.emulator.llvm.registers import REGISTERS

# "fma" is the slowest, and differs from "avx512f" in how many registers it uses alone.
SLOW_REGISTERS = ("fma",)
ARRAYS = [
    "numpy",
    pytest.param("numba", marks=pytest.mark.slow),
    *(
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_REGISTERS else name
        for name in REGISTERS
    ),
]


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
    """Compute as this parameter says: "numpy" or, the host and the array too, "compiled"."""
    name: str = request.param
    compiled = name == "compiled"
    found = request.getfixturevalue("compiled_kernels") if compiled else None
    code = array_code.best() if compiled else None
    monkeypatch.setattr(jit, "kernels", found)
    monkeypatch.setattr(machine, "load", lambda: code)
    return name


@pytest.fixture(params=ARRAYS)
def array(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the emulated array computes: machine code for registers of this name, or else numpy.

    "numba": numpy for products, and compiled loops for what is element by element.
    """
    name: str = request.param
    code = array_code.built(name) if name in REGISTERS else None
    found = request.getfixturevalue("compiled_kernels") if name == "numba" else None
    monkeypatch.setattr(jit, "kernels", found)
    monkeypatch.setattr(machine, "load", lambda: code)
    return name
