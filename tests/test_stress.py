"""More processes than slots: all get on, all get the same bits, and no slot is lost."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_embed import Embedder, settings
from npu_embed.emulator import slots

PROCESSES = 4
# Alone a call takes some 0.05 s. While waiting for three others' turns of 0.5 s, on a busy machine,
# it may take a few seconds; a process that is starved takes for ever.
FEWEST_CALLS = 3
LONGEST_S = 60.0

WORKER = """
import hashlib, sys, threading
from npu_embed import Embedder
texts = [f"{i} " + "two cats on a sofa " * (i % 9) for i in range(60)]
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
with Embedder(sys.argv[1], "emulated", pack_rows=512) as embedder:
    while not told.is_set():
        vectors = embedder.embed(texts)
        print(hashlib.sha256(vectors.tobytes()).hexdigest(), flush=True)
"""
TEXTS = [f"{i} " + "two cats on a sofa " * (i % 9) for i in range(60)]


class Worker:
    """A process that embeds in a loop until it is told to end, and what it has said so far."""

    def __init__(self, bundle: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(bundle)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.hashes: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.hashes.append(line.strip())

    def end(self) -> str:
        """What it said on stderr, told to end and waited for."""
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        with self.process:  # waits, and closes the pipes
            said = self.process.stderr.read()
            self._thread.join()
        return said


def wait_until(met: Callable[[], object], what: str) -> None:
    """Wait until something is true, but not for ever."""
    deadline = time.monotonic() + LONGEST_S
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.alone
@pytest.mark.parametrize("count", [1, 2, 3])
def test_four_processes_get_on_with_too_few_slots(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    with Embedder(tiny_bundle, "emulated", pack_rows=512) as embedder:
        vectors = embedder.embed(TEXTS)
        assert embedder.stats.packs > 2
    wanted = hashlib.sha256(vectors.tobytes()).hexdigest()
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(count))
    monkeypatch.setenv("NPU_EMBED_EMU_DIR", str(tmp_path / "machine"))
    workers = [Worker(tiny_bundle) for _ in range(PROCESSES)]
    table = slots.table(settings.emulator_dir())

    def all_get_on() -> None:
        """Wait until each has made some more calls from now on."""
        wanted = {worker: len(worker.hashes) + FEWEST_CALLS for worker in workers}
        wait_until(
            lambda: all(len(worker.hashes) >= calls for worker, calls in wanted.items()),
            f"calls: {[len(worker.hashes) for worker in workers]}",
        )

    def holding() -> list[Worker]:
        pids = set(table.holders(count).values())
        return [worker for worker in workers if worker.process.pid in pids]

    try:
        all_get_on()
        # One is killed while it holds a slot: the others share what it had, at once.
        wait_until(holding, "none holds a slot")
        victim = holding()[0]
        victim.process.kill()
        victim.process.wait()
        assert victim.process.pid not in table.holders(count).values()
        workers.remove(victim)
        victim.end()
        all_get_on()
        said = [worker.end() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
    for worker, words in zip(workers, said, strict=True):
        assert worker.process.returncode == 0, words
        assert set(worker.hashes) == {wanted}
    assert set(victim.hashes) == {wanted}
    assert table.holders(count) == {}, "leaked"
