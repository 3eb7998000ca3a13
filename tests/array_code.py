"""The emulated array's machine code in tests: for registers by name, and whether it was called."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest

from npu_embed.bf16 import RowBuffer
from npu_embed.cores import Scratch
from npu_embed.emulator.llvm import machine, tile_permission
from npu_embed.emulator.llvm.machine import Attention, Machine
from npu_embed.emulator.llvm.registers import REGISTERS


def missing(name: str) -> str:
    """Why there is no machine code for such registers here; empty where there is."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed: nothing is compiled"
    if not llvm.get_host_cpu_features().get(name):
        return f"this machine has no {name}"
    if REGISTERS[name].tiles and not tile_permission.granted():
        return "the kernel lets nobody use the tile registers"
    return ""


@functools.cache
def built(name: str) -> Machine:
    """The code for such registers; skips the test, with the reason, where there is none."""
    reason = missing(name)
    if reason:
        pytest.skip(reason)
    return machine.build(REGISTERS[name])


def best() -> Machine | None:
    """What machine.load() gives here where nobody forbids it."""
    return next((built(name) for name in REGISTERS if not missing(name)), None)


@dataclass
class Calls:
    """The machine code's calls: rows of each product, and of each attention."""

    gemm: list[int] = field(default_factory=list)
    attend: list[int] = field(default_factory=list)


def recorded(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls from now on."""
    calls = Calls()
    gemm, attend = Machine.gemm, Machine.attend

    def recorded_gemm(self: Machine, a: RowBuffer, rows: int, *others: object) -> None:
        gemm(self, a, rows, *others)  # type: ignore[arg-type]
        calls.gemm.append(rows)

    def recorded_attend(self: Machine, of: Attention, scratch: Scratch) -> None:
        attend(self, of, scratch)
        calls.attend.append(of.rows)

    monkeypatch.setattr(Machine, "gemm", recorded_gemm)
    monkeypatch.setattr(Machine, "attend", recorded_attend)
    return calls
