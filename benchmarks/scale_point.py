"""One point of scale.py in a process of its own: embeds a file of texts, says one JSON line.

    scale_point.py '{"bundle": ..., "texts": FILE.jsonl, "pack_rows": null, "call_texts": null,
                     "cores": null}'

cores: how many of this process's CPUs to use, null for all. call_texts: texts of a call, their
vectors forgotten after it; null for one call.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_embed import Embedder

WARM_UP_TEXTS = 8
STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def peak_bytes() -> int:
    """The most memory this process had in use so far.

    Not ru_maxrss where there is better: it also counts what the parent had when it forked.
    """
    if STATUS.exists():
        found = _PEAK.search(STATUS.read_text(encoding="ascii", errors="replace"))
        if found:
            return int(found[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def take_cores(count: int | None) -> None:
    """Keep to the first so many CPUs; before numpy is imported, which counts them once."""
    if count is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def calls(path: str, call_texts: int | None) -> Iterator[list[str]]:
    """The texts of each call; the file is read as far as a call needs it."""
    with open(path, encoding="utf-8") as lines:
        texts = (json.loads(line) for line in lines)
        while some := list(islice(texts, call_texts)):
            yield some


def measure(embedder: Embedder, path: str, call_texts: int | None) -> dict[str, Any]:
    """Embed the file's texts, timed."""
    import host_floor

    with open(path, encoding="utf-8") as lines:
        embedder.embed([json.loads(line) for line in islice(lines, WARM_UP_TEXTS)])
    ready_bytes = peak_bytes()
    before, busy_before = embedder.stats, host_floor.busy_seconds(embedder)
    start = time.perf_counter()
    vector_bytes = 0
    for some in calls(path, call_texts):
        vector_bytes = max(vector_bytes, embedder.embed(some).nbytes)
    seconds = time.perf_counter() - start
    peak = peak_bytes()
    after, busy = embedder.stats, host_floor.busy_seconds(embedder)
    stages = host_floor.since(after.seconds, before.seconds)
    stages.pop("open", None)
    waited = None if busy is None else host_floor.since(busy, busy_before or {})
    parts = host_floor.split(seconds, stages, waited)
    return {
        "seconds": seconds,
        "texts": after.texts - before.texts,
        "tokens": after.tokens - before.tokens,
        "packs": after.packs - before.packs,
        "host_seconds": host_floor.host_seconds(parts),
        "ready_bytes": ready_bytes,
        "peak_bytes": peak,
        "vector_bytes": vector_bytes,
    }


def main(argument: str) -> None:
    """Measure the point that a JSON object describes."""
    point = json.loads(argument)
    take_cores(point["cores"])
    logging.getLogger("npu_embed").setLevel(logging.ERROR)  # a cut text is no news here
    from npu_embed import Embedder, NpuEmbedError

    try:
        with Embedder(point["bundle"], "emulated", pack_rows=point["pack_rows"]) as embedder:
            found = measure(embedder, point["texts"], point["call_texts"])
    except NpuEmbedError as error:
        raise SystemExit(str(error)) from error
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
