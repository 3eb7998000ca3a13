"""One engine in a process of its own, commanded by processes.py: a JSON line in, a JSON line out.

    worker.py ENGINE MODEL CORPUS.jsonl SETTING

It loads ENGINE's MODEL, says {"ready": ...} and then answers commands on the corpus' texts:

    {"do": "warm", "seconds": S}   embed a few texts again and again, for S seconds
    {"do": "run"}                  all texts in one call: {"seconds": ..., "peak_mib": ...}
    {"do": "each"}                 one text a call, in turn: {"ms": [...], "peak_mib": ...}
    {"do": "sweep", "settings": [8, ...], "passes": N}   [[setting, the fewest seconds], ...]
    {"do": "facts"}                versions and limits
    {"do": "save", "path": "FILE.npy"}   the vectors of the last run

End of input ends it. This file runs in the peers' environment too: it imports the standard library
and engines.py, no more.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines import ENGINES, Loaded, Vectors

WARM_UP_TEXTS = 64
WARM_UP_SHARE = 8  # of few texts, an eighth: the warm-up must not become the measurement
KIB_IN_MIB = 1024
Answer = dict[str, Any]


class Worker:
    """An engine and its texts; answers a command at a time. clock: seconds of wall time."""

    def __init__(
        self,
        loaded: Loaded,
        texts: Sequence[str],
        setting: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loaded = loaded
        self._clock = clock
        self._texts = texts
        self._setting = setting
        self._vectors: Vectors = None
        self._commands: dict[str, Callable[..., Answer]] = {
            "warm": self.warm,
            "run": self.run,
            "each": self.each,
            "sweep": self.sweep,
            "facts": lambda: self._loaded.facts(),
            "save": self.save,
        }

    def answer(self, command: dict[str, Any]) -> Answer:
        """The answer to {"do": name, ...}, the rest its arguments."""
        name = command.pop("do")
        return self._commands[name](**command)

    def warm(self, seconds: float) -> Answer:
        """Embed some texts until the time is over, at least once.

        For seconds, not once: an engine may compile its kernels beside its first calls.
        """
        until = self._clock() + seconds
        texts = self._texts[: max(1, min(WARM_UP_TEXTS, len(self._texts) // WARM_UP_SHARE))]
        while True:
            self._embed(texts)
            self._embed(texts[:1])
            if self._clock() >= until:
                return {}

    def run(self) -> Answer:
        """Wall and CPU seconds of all texts in one call, and the memory it took at most so far."""
        gc.collect()  # of what was before, not in the timed part
        wall, cpu = self._clock(), time.process_time()
        self._vectors = self._embed(self._texts)
        seconds, cpu_seconds = self._clock() - wall, time.process_time() - cpu
        told: Answer = {"seconds": seconds, "peak_mib": peak_mib(self._loaded.pid)}
        if self._loaded.pid == os.getpid():
            told["cpu_seconds"] = cpu_seconds
        return told

    def each(self) -> Answer:
        """Milliseconds of each text in a call of its own."""
        gc.collect()
        found, ms = [], []
        for text in self._texts:
            start = self._clock()
            found.append(self._embed([text])[0])
            ms.append((self._clock() - start) * 1e3)
        self._vectors = found
        return {"ms": ms, "peak_mib": peak_mib(self._loaded.pid)}

    def sweep(self, settings: Sequence[int | None], passes: int) -> Answer:
        """The fewest seconds all texts take with each setting; they take turns in every pass."""
        fewest: dict[int | None, float] = {}
        for _ in range(passes):
            for setting in settings:
                self._loaded.embed(self._texts[:1], setting)
                start = self._clock()
                self._loaded.embed(self._texts, setting)
                seconds = self._clock() - start
                fewest[setting] = min(seconds, fewest.get(setting, seconds))
        return {"sweep": [[setting, seconds] for setting, seconds in fewest.items()]}

    def save(self, path: str) -> Answer:
        """Write the vectors of the last run, float32 [texts, dim]."""
        import numpy as np

        np.save(path, np.asarray(self._vectors, dtype=np.float32))
        return {"saved": path}

    def _embed(self, texts: Sequence[str]) -> Vectors:
        return self._loaded.embed(texts, self._setting)


def peak_mib(pid: int) -> float:
    """The most memory a process had resident so far, in MiB.

    getrusage's ru_maxrss would do, but Linux lets a process inherit its parent's.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / KIB_IN_MIB / (KIB_IN_MIB if sys.platform == "darwin" else 1)
    (kib,) = (row.split()[1] for row in status.splitlines() if row.startswith("VmHWM"))
    return int(kib) / KIB_IN_MIB


def serve(engine: str, model: str, corpus: str, setting: str) -> None:
    """Answer commands until the input ends."""
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(record: Answer) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    loaded = ENGINES[engine](model)
    answer({"ready": engine})
    worker = Worker(loaded, texts, json.loads(setting))
    for line in sys.stdin:
        answer(worker.answer(json.loads(line)))
    loaded.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
