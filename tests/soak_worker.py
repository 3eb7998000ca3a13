"""A process of the soak: `python soak_worker.py BUNDLE IMAGE_BUNDLE SECONDS SEED`.

Works for so long, prints what it found as one line of JSON, and works on until Ctrl-C. The work is
the same calls in an order of chance, so that each can be compared with its first.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_embed import DeviceBad, Embedder, jit
from npu_embed.emulator.faults import parse
from npu_embed.emulator.llvm import machine

FEWEST_ROUNDS = 3
PACK_ROWS = 256
WORDS = ("cats", "sofa", "red", "car", "the", "a", "password", "plants")
LENGTHS: tuple[Iterable[int], ...] = (
    *([1], [0], [5, 5, 5], [126], [200], [1] * 40, [3, 90, 20, 7, 110], range(0, 130, 6)),
)
FAULTS = ("timeout", "error", "abort", "lost", "suspend", "heap", "context=EBUSY", "context=+EIO")
NO_FAULT = (None, None)

IMAGES = [np.full((48, 48, 3), 40 * i, np.uint8) for i in range(1, 3)]


class Worker:
    """One process's engines, and the digests of what each call gave at first."""

    def __init__(self, bundle: str, images: str, seed: int) -> None:
        self.bundle = bundle
        self.choose = random.Random(seed)
        self.calls = [
            [" ".join(self.choose.choices(WORDS, k=n)) for n in lengths] for lengths in LENGTHS
        ]
        self.first: dict[str, str] = {}
        self.compared = 0
        self.faults: Counter[str] = Counter()  # that struck
        self.pictures = Embedder(images, "emulated")

    def plan_faults(self, engine: Embedder, faults: str) -> None:
        """Faults of an engine's own device, in the place of those that were planned."""
        device: Any = engine._session.device
        if device._npu.faults is not None:
            self.faults += device._npu.faults.struck
        device._npu.plan_faults(parse(faults) if faults else ())

    def check(self, key: str, vectors: NDArray[np.float32]) -> None:
        """The bits are those of the first time."""
        self.compared += 1
        digest = hashlib.sha256(vectors.tobytes()).hexdigest()
        if self.first.setdefault(key, digest) != digest:
            raise AssertionError(f"call {key}: other bits than at first")

    def work(self, engine: Embedder, key: int) -> None:
        """A call of texts; by the other model it is another one."""
        name = f"image model, texts {key}" if engine is self.pictures else f"texts {key}"
        self.check(name, engine.embed(self.calls[key]))

    def any_call(self) -> int:
        """A call's number."""
        return self.choose.randrange(len(self.calls))

    def with_faults(self, texts: Embedder) -> None:
        """Every call twice, images too, with a fault of chance in most of them."""
        jobs: list[tuple[Embedder, Any]] = [(texts, key) for key in range(len(self.calls))] * 2
        jobs += [(self.pictures, image) for image in range(len(IMAGES))] + [(self.pictures, None)]
        self.choose.shuffle(jobs)
        for engine, key in jobs:
            fault, at = self.choose.choice([*FAULTS, *NO_FAULT]), self.choose.randint(1, 9)
            self.plan_faults(engine, f"{fault}@{at}" if fault else "")
            if self.choose.random() < 0.1:
                engine.release()
            if engine is texts:
                self.work(engine, key)
            elif key is None:
                self.work(engine, 5)
            else:
                self.check(f"image {key}", engine.embed_image(IMAGES[key]))

    def with_a_bad_device(self, texts: Embedder) -> None:
        """A device that aborts everything is told, and released it is as before."""
        self.plan_faults(texts, "abort@3+")
        try:
            texts.embed(self.calls[6])
        except DeviceBad:
            texts.release()
        else:
            raise AssertionError("a device that always aborts gave vectors")

    def in_threads(self, texts: Embedder) -> None:
        """Calls of several threads at once, and a release in their midst."""
        failed: list[BaseException] = []

        def some(keys: list[int]) -> None:
            try:
                for key in keys:
                    self.work(texts, key)
            except BaseException as error:
                failed.append(error)

        threads = [
            threading.Thread(target=some, args=([self.any_call() for _ in range(3)],))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        texts.release()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def in_a_child(self) -> None:
        """A forked process with an engine of its own, beside copies of its parent's."""
        key = self.any_call()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with Embedder(self.bundle, "emulated", pack_rows=PACK_ROWS) as own:
                    self.work(own, key)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            raise AssertionError(f"a forked child ended with {code}")

    def without_close(self) -> None:
        """An engine that is dropped, and never closed."""
        self.work(Embedder(self.bundle, "emulated", pack_rows=PACK_ROWS), self.any_call())

    def round(self) -> int:
        """All of it, with an engine opened for it; how often that rebuilt its contexts."""
        with Embedder(self.bundle, "emulated", pack_rows=PACK_ROWS) as texts:
            self.with_faults(texts)
            self.with_a_bad_device(texts)
            for engine in (texts, self.pictures):
                self.plan_faults(engine, "")
            self.in_threads(texts)
            for engine in (texts, self.pictures):
                engine.release()  # what waits for a child gives no slot up to it
            self.in_a_child()
            self.without_close()
            return texts.stats.rebuilds


def memory_kib() -> int:
    """Resident memory of this process."""
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def main() -> None:
    """Work, say what was found, and work on."""
    # Whoever runs the tests in the background has it ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bundle, images, seconds, seed = sys.argv[1:]
    # Where compiled code is wanted, all of it is there from the first call on, and its memory.
    compiled = jit.load() and machine.load() is not None
    worker = Worker(bundle, images, int(seed))
    samples: list[tuple[int, int, int]] = []
    rebuilds = 0
    end = time.monotonic() + float(seconds)
    while len(samples) < FEWEST_ROUNDS or time.monotonic() < end:
        rebuilds += worker.round()
        memory = memory_kib()
        samples.append((memory, len(os.listdir("/proc/self/fd")), threading.active_count()))
    found = {
        "samples": samples,
        "rebuilds": rebuilds,
        "calls": len(worker.first),
        "compared": worker.compared,
        "faults": worker.faults,
        "compiled": compiled,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    while True:  # until Ctrl-C, with everything open
        worker.work(worker.pictures, 5)


if __name__ == "__main__":
    main()
