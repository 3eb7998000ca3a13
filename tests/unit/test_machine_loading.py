"""When the emulated array's machine code is made, by whom, and what a fork finds of it."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from npu_embed.emulator.llvm import machine

MADE: Any = SimpleNamespace()


@pytest.fixture(autouse=True)
def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_COMPILED", "auto")
    monkeypatch.setattr(machine, "_loader", machine._Loader())


def test_threads_that_ask_at_once_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    both = threading.Barrier(2, timeout=30)

    def compiled() -> object:
        calls.append(1)
        return MADE

    def ask() -> None:
        both.wait()
        assert machine.load() is MADE

    monkeypatch.setattr(machine, "_compile", compiled)
    other = threading.Thread(target=ask)
    other.start()
    ask()
    other.join()
    assert len(calls) == 1


def test_a_fork_in_the_middle_of_loading_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, forking = threading.Event(), threading.Event()
    of_llvm = threading.Lock()

    def compiled() -> object:
        with of_llvm:
            loading.set()
            forking.wait(0.3)  # never set: a fork in the middle would find the lock taken
        return MADE

    monkeypatch.setattr(machine, "_compile", compiled)
    thread = threading.Thread(target=machine.load)
    thread.start()
    assert loading.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is ended
        os._exit(0 if machine.load() is MADE and of_llvm.acquire(timeout=5) else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert machine.load() is MADE


def test_a_child_may_load_what_its_parent_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_compile", lambda: MADE)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if machine.load() is MADE else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_memory_nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed")

    def exhausted() -> dict[str, bool]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(binding, "get_host_cpu_features", exhausted)
        with pytest.raises(MemoryError):
            machine.load()
    monkeypatch.setattr(machine, "build", lambda registers: MADE)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"fma": True})
    assert machine.load() is MADE


def test_where_llvm_fails_numpy_computes_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed")

    def fails(registers: object) -> object:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(machine, "build", fails)
    assert machine.load() is None
    assert "LLVM cannot compile here; computing with numpy" in caplog.text
