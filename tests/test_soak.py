"""A long life, compressed: two processes with mixed work and faults, whose memory stays flat.

NPU_SOAK_SECONDS sets how long; `make soak` takes some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_embed import settings
from npu_embed.emulator import slots

SECONDS = float(os.environ.get("NPU_SOAK_SECONDS", "30"))
PROCESSES = 2
SLOTS = 3  # fewer than both want: they take turns
FEWEST_ROUNDS = 3

# Python's and numpy's arenas and caches fill in the first rounds; what leaks goes on. One buffer
# of rows that is not freed in each round is more than this after a few.
MAX_GROWTH_KIB = 8 * 1024

# Work is the same calls in an order of chance, so that each can be compared with its first.
WORKER = """
import gc, hashlib, json, os, random, sys, time
import numpy as np
from npu_embed import DeviceBad, Embedder
from npu_embed.emulator.faults import parse

bundle, images, seconds, seed = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
choose = random.Random(seed)
words = ["cats", "sofa", "red", "car", "the", "a", "password", "plants"]
CALLS = [[" ".join(choose.choices(words, k=n)) for n in lengths] for lengths in
         ([1], [0], [5, 5, 5], [126], [200], [1] * 40, [3, 90, 20, 7, 110], range(0, 130, 6))]
IMAGES = [np.full((48, 48, 3), 40 * i, np.uint8) for i in range(1, 3)]
FAULTS = ["timeout", "error", "abort", "lost", "suspend", "heap", "context=EBUSY", "context=+EIO"]
first = {}

def device(engine):
    return engine._session.device._npu

def check(key, vectors):
    digest = hashlib.sha256(vectors.tobytes()).hexdigest()
    assert first.setdefault(key, digest) == digest, f"call {key}: other bits than at first"

def memory_kib():
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def work(engine, key):
    if isinstance(key, int):
        check(key, engine.embed(CALLS[key]))
    else:
        check(key, engine.embed_image(IMAGES[int(key[-1])]))

def round_of(texts, pictures):
    keys = [(texts, key) for key in range(len(CALLS))] * 2
    keys += [(pictures, f"image {i}") for i in range(len(IMAGES))]
    choose.shuffle(keys)
    for engine, key in keys:
        fault, at = choose.choice([*FAULTS, None, None]), choose.randint(1, 9)
        device(engine).plan_faults(parse(f"{fault}@{at}") if fault else ())
        if choose.random() < 0.1:
            engine.release()
        work(engine, key)
    device(texts).plan_faults(parse("abort@3+"))
    try:
        texts.embed(CALLS[6])
    except DeviceBad:
        texts.release()
    else:
        raise AssertionError("a device that always aborts gave vectors")
    device(texts).plan_faults(())

rounds, samples = 0, []
end = time.monotonic() + seconds
with Embedder(images, "emulated") as pictures:
    while rounds < 3 or time.monotonic() < end:
        with Embedder(bundle, "emulated", pack_rows=256) as texts:  # a reload in each round
            round_of(texts, pictures)
            rebuilds = texts.stats.rebuilds
        rounds += 1
        samples.append((memory_kib(), len(os.listdir("/proc/self/fd"))))
print(json.dumps({"rounds": rounds, "samples": samples, "rebuilds": rebuilds, "calls": len(first)}))
"""


@pytest.mark.slow
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
        # Compiled kernels come when they are ready, and their memory with them.
        "NPU_EMBED_COMPILED": "off",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tiny_bundle), str(eg2_bundle), str(SECONDS), str(n)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    try:
        ended = [worker.communicate() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (said, logged) in zip(workers, ended, strict=True):
        assert worker.returncode == 0, logged[-3000:]
        found = json.loads(said)
        assert found["rounds"] >= FEWEST_ROUNDS
        assert found["rebuilds"] > 0
        assert found["calls"] == 10
        memory, files = zip(*found["samples"], strict=True)
        assert len(set(files[1:])) == 1, files
        half = len(memory) // 2
        assert min(memory[half:]) - min(memory[1 : half + 1]) < MAX_GROWTH_KIB, memory
    assert settings.emulator_dir() != machine
    assert slots.table(machine).holders(SLOTS) == {}, "leaked"
