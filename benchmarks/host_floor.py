"""The host's time a token, beside the least it could be: its memory traffic at copy speed.

Host time is everything an NPU would not do: tokenizer, packs, put, get, norms, residuals, pooling,
and submitting runs. It is what the emulated array's own compute leaves of the wall time, and so the
figure that holds on hardware. This is the only file that decides which second is whose.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import Spread

from npu_embed import Embedder

# Stages of the engine whose runs the emulated array computes, by the array program's name.
DEVICE_STAGES = ("gemm", "mha")
STAGES = ("gemm", "mha", "dispatch", "host", "tokenize", "embeddings", "pooling", "other")

CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES = 32 << 20  # where the machine does not say
CACHES_COPIED = 4  # a buffer this many times the cache is not in it
COPIES = 7
_SIZE = re.compile(r"(\d+)([KM]?)")


def busy_seconds(embedder: Embedder) -> dict[str, float] | None:
    """Seconds the emulated array computed so far, by array program; None on hardware."""
    busy: dict[str, float] | None = getattr(embedder._session.device, "busy_seconds", None)
    return busy


def since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What was added to each value after `before`."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def split(
    seconds: float, stages: Mapping[str, float], busy: Mapping[str, float] | None
) -> dict[str, float]:
    """Seconds by stage, which add up to `seconds`: STAGES in their order, then unknown ones.

    stages: the engine's own, in which gemm and mha are the time from a submit to the end of its
    wait. busy: the array's; None on hardware, where nobody can tell the two apart and dispatch is
    absent. gemm and mha become what the array made the caller wait, dispatch what else their runs
    took. Where the array computes while the caller does something else, busy may be more than the
    caller waited: then all of the wait is the array's, and dispatch is 0, which is too little.
    """
    parts = dict(stages)
    if busy is not None:
        waited = sum(parts.get(stage, 0.0) for stage in DEVICE_STAGES)
        computed = sum(busy.get(stage, 0.0) for stage in DEVICE_STAGES)
        seen = min(1.0, waited / computed) if computed else 0.0
        for stage in DEVICE_STAGES:
            parts[stage] = busy.get(stage, 0.0) * seen
        parts["dispatch"] = waited - computed * seen
    parts["other"] = seconds - sum(parts.values())
    order = [stage for stage in STAGES if stage in parts]
    return {stage: parts[stage] for stage in dict.fromkeys([*order, *parts])}


def host_seconds(parts: Mapping[str, float]) -> float:
    """The host's part of `split`'s seconds; on hardware without the cost of submitting runs."""
    return sum(seconds for stage, seconds in parts.items() if stage not in DEVICE_STAGES)


@dataclass(frozen=True, slots=True)
class CopyRate:
    """How fast one thread copies: bytes read plus written a second, by `numpy.copyto`.

    buffer_bytes: what is copied, more than the last cache holds.
    """

    buffer_bytes: int
    bytes_per_s: Spread

    @classmethod
    def measure(cls, cache_bytes: int | None = None, copies: int = COPIES) -> CopyRate:
        """Copy a buffer CACHES_COPIED times the size of the last cache, so often.

        cache_bytes: that cache's size, None for this machine's.
        """
        cache = last_cache_bytes() if cache_bytes is None else cache_bytes
        elems = CACHES_COPIED * cache // 8
        source = np.ones(elems, np.float64)  # written, so that every page is its own
        target = np.zeros(elems, np.float64)
        np.copyto(target, source)
        rates = []
        for _ in range(copies):
            start = time.perf_counter()
            np.copyto(target, source)
            rates.append(2 * source.nbytes / (time.perf_counter() - start))
        return cls(source.nbytes, Spread.of(rates, 0))


def last_cache_bytes(folder: Path = CACHE_FOLDER) -> int:
    """The size of the largest cache of the first CPU, USUAL_CACHE_BYTES where it is not told."""
    found = [0]
    for file in folder.glob("index*/size"):
        size = _SIZE.fullmatch(file.read_text(encoding="ascii").strip())
        if size:
            found.append(int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]])
    return max(found) or USUAL_CACHE_BYTES


def summary(
    parts: Sequence[Mapping[str, float]],
    tokens: int,
    traffic: Mapping[str, float] | None,
    rate: CopyRate,
) -> dict[str, Any]:
    """The host's microseconds a token over some rounds, its share of the time, and the floor.

    parts: `split` of each round, all of so many tokens. traffic: bytes a token by step, None for a
    model whose floor is not known.
    """
    each = [host_seconds(p) for p in parts]
    stages = [stage for stage in parts[0] if stage not in DEVICE_STAGES]
    us = {stage: Spread.of(1e6 * p[stage] / tokens for p in parts) for stage in stages}
    found: dict[str, Any] = {
        "us_per_token": Spread.of(1e6 * host / tokens for host in each),
        "share": Spread.of(h / sum(p.values()) for h, p in zip(each, parts, strict=True)),
        "stages_us_per_token": us,
        "copy_gb_per_s": round(rate.bytes_per_s.median / 1e9, 2),
        "copy_buffer_bytes": rate.buffer_bytes,
        "floor": None,
    }
    if traffic is not None:
        floor_us = 1e6 * sum(traffic.values()) / rate.bytes_per_s.median
        found["floor"] = {
            "bytes_per_token": {step: round(size, 1) for step, size in traffic.items()},
            "us_per_token": round(floor_us, 4),
        }
        found["times_floor"] = Spread.of((1e6 * h / tokens / floor_us for h in each), 2)
    return found
