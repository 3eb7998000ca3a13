"""More processes than slots: all get on, all get the same bits, and no slot is lost."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from npu_embed import Embedder, settings
from npu_embed.emulator import slots

SECONDS = 20.0
PROCESSES = 4
# Alone a call takes some 0.05 s. While waiting for three others' turns of 0.5 s, on a busy machine,
# it may take a few seconds; a process that is starved takes for ever.
FEWEST_CALLS = 3
LONGEST_CALL_S = 15.0

WORKER = """
import hashlib, sys, time
from npu_embed import Embedder
texts = [f"{i} " + "two cats on a sofa " * (i % 9) for i in range(60)]
end = time.monotonic() + float(sys.argv[2])
with Embedder(sys.argv[1], "emulated", pack_rows=512) as embedder:
    while time.monotonic() < end:
        vectors = embedder.embed(texts)
        print(time.monotonic(), hashlib.sha256(vectors.tobytes()).hexdigest(), flush=True)
"""
TEXTS = [f"{i} " + "two cats on a sofa " * (i % 9) for i in range(60)]


class Worker:
    """A process that embeds in a loop, and what it has told so far."""

    def __init__(self, bundle: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(bundle), str(SECONDS)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.times: list[float] = []
        self.hashes: set[str] = set()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            when, digest = line.split()
            self.times.append(float(when))
            self.hashes.add(digest)

    def end(self) -> str:
        """What it said on stderr, once it has ended."""
        assert self.process.stderr is not None
        with self.process:  # waits, and closes the pipes
            said = self.process.stderr.read()
            self._thread.join()
        return said


@pytest.mark.slow
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
    try:
        # One is killed once it holds a slot: the others share what it had, at once.
        deadline = time.monotonic() + SECONDS / 2
        time.sleep(SECONDS / 4)
        pids = {worker.process.pid: worker for worker in workers}
        held: set[int] = set()
        while not held and time.monotonic() < deadline:
            held = set(table.holders(count).values()) & set(pids)
        victim = pids[held.pop()]
        victim.process.kill()
        victim.process.wait()
        assert victim.process.pid not in table.holders(count).values()
        workers.remove(victim)
        victim.end()
        said = [worker.end() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
    for worker, words in zip(workers, said, strict=True):
        assert worker.process.returncode == 0, words
        assert worker.hashes == {wanted}
        assert len(worker.times) >= FEWEST_CALLS, [len(w.times) for w in workers]
        calls = [b - a for a, b in itertools.pairwise(worker.times)]
        assert max(calls) < LONGEST_CALL_S
    assert victim.hashes <= {wanted}
    assert table.holders(count) == {}, "leaked"
