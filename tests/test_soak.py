"""A long life, compressed: two processes with mixed work and faults, whose memory stays flat.

One computes with numpy alone, the other in compiled code.

Texts of all lengths and images, by two models; every kind of fault; release and reload; threads,
forked children, engines that nobody closes; and Ctrl-C at the end.

NPU_SOAK_SECONDS sets how long; `make soak` takes some minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npu_embed import settings
from npu_embed.emulator import slots

SECONDS = float(os.environ.get("NPU_SOAK_SECONDS", "30"))
WORKER = Path(__file__).with_name("soak_worker.py")
COMPILED = ("off", "auto")  # of each process
SLOTS = 3  # fewer than both want: they take turns
FEWEST_ROUNDS = 3
HAS_NUMBA = importlib.util.find_spec("numba") is not None
KINDS_OF_FAULTS = 5  # of the 7 there are: which strike in a short run is left to chance
CALLS = 11  # that are compared with their first: 8 of texts, one by another model, 2 of images
MAX_EXIT_SECONDS = 60.0

# Python's and numpy's arenas and caches fill in the first rounds; what leaks goes on. One buffer
# of rows that is not freed in each round is more than this after a few.
MAX_GROWTH_KIB = 8 * 1024


@pytest.mark.slow
@pytest.mark.alone
def test_two_processes_of_mixed_work_and_faults_stay_flat(
    tiny_bundle: Path, eg2_bundle: Path, tmp_path: Path
) -> None:
    machine = tmp_path / "machine"
    environment = {
        **os.environ,
        "NPU_EMBED_EMU_SLOTS": str(SLOTS),
        "NPU_EMBED_EMU_DIR": str(machine),
        "NPU_EMBED_SLOT_WAIT_MS": "120000",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(WORKER)]
    arguments = [str(tiny_bundle), str(eg2_bundle), str(SECONDS)]
    logs = [tmp_path / f"{n}.log" for n in range(len(COMPILED))]
    workers = []
    for n, (log, compiled) in enumerate(zip(logs, COMPILED, strict=True)):
        with log.open("wb") as stderr:  # a pipe that nobody reads meanwhile would fill
            workers.append(
                subprocess.Popen(
                    [*command, *arguments, str(n)],
                    env={**environment, "NPU_EMBED_COMPILED": compiled},
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
    try:
        said = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
        for worker, line in zip(workers, said, strict=True):
            if line:
                worker.send_signal(signal.SIGINT)
            worker.communicate(timeout=MAX_EXIT_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for n, (worker, line, log) in enumerate(zip(workers, said, logs, strict=True)):
        logged = log.read_text()[-3000:]
        assert worker.returncode == -signal.SIGINT, logged
        assert logged.rstrip().endswith("KeyboardInterrupt"), logged
        found = json.loads(line)
        sys.stdout.write(line)  # the figures, for whoever asks pytest for them
        assert len(found["samples"]) >= FEWEST_ROUNDS
        assert found["rebuilds"] > 0
        assert len(found["faults"]) >= KINDS_OF_FAULTS
        assert found["calls"] == CALLS
        assert found["compiled"] == (COMPILED[n] != "off" and HAS_NUMBA)
        memory, files, threads = zip(*found["samples"], strict=True)
        assert len(set(files[1:])) == 1, files
        assert len(set(threads[1:])) == 1, threads
        half = len(memory) // 2
        assert min(memory[half:]) - min(memory[1 : half + 1]) < MAX_GROWTH_KIB, memory
    assert settings.emulator_dir() != machine
    assert slots.table(machine).holders(SLOTS) == {}, "leaked"
