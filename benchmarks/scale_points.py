"""The points of scale.py: what is varied, what is held, and what was found of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from report import Spread

import npu_embed

POINT = Path(__file__).resolve().parent / "scale_point.py"
AXES = ("pack", "length", "corpus", "threads")
UNITS = {
    "pack": "tokens of a pack at most",
    "length": "tokens of a text",
    "corpus": "texts",
    "threads": "threads",
}
DEFAULT, ONE_CALL, CORES, BLAS_THREADS = "default", "one call", "cores", "BLAS threads"
MIB = 1 << 20
US = 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """One combination, measured in a process of its own.

    axis, series, value: where it stands in the plot. bundle, texts (a .jsonl file), pack_rows,
    call_texts, cores: as scale_point.py takes them. threads: what OPENBLAS_NUM_THREADS says, None
    for nothing.
    """

    axis: str
    series: str
    value: int
    bundle: Path
    texts: Path
    pack_rows: int | None = None
    call_texts: int | None = None
    cores: int | None = None
    threads: int | None = None

    @property
    def name(self) -> dict[str, Any]:
        """What tells it apart in the output."""
        return {"axis": self.axis, "series": self.series, "value": self.value}

    def run(self) -> dict[str, Any]:
        """Measure it once.

        Raises:
            SystemExit: its process ended otherwise than with a result.
        """
        environment = report.plain_environment()
        # The npu_embed of this process, wherever it was imported from.
        paths = [str(Path(npu_embed.__file__).parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.threads is not None:
            environment["OPENBLAS_NUM_THREADS"] = str(self.threads)
        elif self.axis == "threads":
            environment.pop("OPENBLAS_NUM_THREADS", None)
        fields = ("bundle", "texts", "pack_rows", "call_texts", "cores")
        told = json.dumps({name: getattr(self, name) for name in fields}, default=str)
        done = subprocess.run(
            [sys.executable, str(POINT), told],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        if done.returncode:
            where = f"{self.axis} {self.value} ({self.series})"
            raise SystemExit(f"{where}: its process ended with code {done.returncode}.")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """What some rounds of a point found: medians and ranges.

    peak_mib: the most memory of the process, of which ready_mib before the first timed text.
    vectors_mib: of the vectors that one call gives. host_us_per_token: host_floor.host_seconds.
    """

    axis: str
    series: str
    value: int
    texts: int
    tokens: int
    packs: int
    seconds: Spread
    tokens_per_s: Spread
    texts_per_s: Spread
    host_us_per_token: Spread
    peak_mib: Spread
    ready_mib: float
    vectors_mib: float

    @classmethod
    def of(cls, point: Point, rounds: Sequence[Mapping[str, Any]]) -> Result:
        """The spread of some rounds of a point."""
        last = rounds[-1]
        return cls(
            **point.name,
            texts=last["texts"],
            tokens=last["tokens"],
            packs=last["packs"],
            seconds=Spread.of(r["seconds"] for r in rounds),
            tokens_per_s=Spread.of((r["tokens"] / r["seconds"] for r in rounds), 1),
            texts_per_s=Spread.of((r["texts"] / r["seconds"] for r in rounds), 2),
            host_us_per_token=Spread.of((US * r["host_seconds"] / r["tokens"] for r in rounds), 3),
            peak_mib=Spread.of((r["peak_bytes"] / MIB for r in rounds), 1),
            ready_mib=Spread.of((r["ready_bytes"] / MIB for r in rounds), 1).median,
            vectors_mib=round(last["vector_bytes"] / MIB, 2),
        )


def measure(points: Sequence[Point], rounds: int) -> list[Result]:
    """Every point once a round, every second round in the other order; print a line a run."""
    found: list[list[dict[str, Any]]] = [[] for _ in points]
    for number in range(rounds):
        order = list(zip(points, found, strict=True))
        for point, done in order if number % 2 == 0 else reversed(order):
            done.append(point.run())
            report.line({"benchmark": "scale", "round": number + 1, **point.name, **done[-1]})
    return [Result.of(point, done) for point, done in zip(points, found, strict=True)]


def summaries(results: Iterable[Result]) -> list[dict[str, Any]]:
    """A record a point, for its JSON line."""
    return [{"benchmark": "scale", "summary": True, **asdict(r)} for r in results]


def show(results: Sequence[Result]) -> None:
    """A table an axis, on stderr."""
    for axis in dict.fromkeys(r.axis for r in results):
        rows = [
            (
                f"{r.value:,}",
                r.series,
                f"{r.texts:,}",
                f"{r.tokens:,}",
                str(r.packs),
                f"{r.tokens_per_s.median:,.0f} ({r.tokens_per_s.low:,.0f} to "
                f"{r.tokens_per_s.high:,.0f})",
                f"{r.texts_per_s.median:,.1f}",
                f"{r.host_us_per_token.median:.1f}",
                f"{r.peak_mib.median:,.0f}",
                f"{r.vectors_mib:,.1f}",
            )
            for r in results
            if r.axis == axis
        ]
        header = (
            *(UNITS[axis], "", "texts", "tokens", "packs", "tokens/s", "texts/s"),
            *("host us/token", "peak MiB", "vectors MiB"),
        )
        sys.stderr.write("\n")
        report.table(header, rows)


def thread_points(counts: Sequence[int], bundle: Path, texts: Path) -> list[Point]:
    """As it comes, and with so many threads in two ways: that many CPUs, or that many of BLAS."""
    points = [Point("threads", DEFAULT, _cpus(), bundle, texts)]
    for count in counts:
        if count <= _cpus() and hasattr(os, "sched_setaffinity"):
            points.append(Point("threads", CORES, count, bundle, texts, cores=count))
        points.append(Point("threads", BLAS_THREADS, count, bundle, texts, threads=count))
    return points


def _cpus() -> int:
    found = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return len(found) if found else os.cpu_count() or 1
