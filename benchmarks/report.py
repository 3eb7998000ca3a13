"""What every benchmark's output has in common: medians with their range, the machine, tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# They choose OpenBLAS' kernels and block sizes: a figure made under them holds for nobody else.
BLAS_OVERRIDES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
# They set how many threads compute; recorded, since a figure depends on them.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], digits: int = 4) -> Spread:
        """The spread of at least one value, rounded to `digits` places."""
        found = sorted(values)
        return cls(
            round(statistics.median(found), digits),
            round(found[0], digits),
            round(found[-1], digits),
        )

    def __str__(self) -> str:
        return f"{self.median:,.4g} ({self.low:,.4g} to {self.high:,.4g})"


def plain_environment() -> dict[str, str]:
    """This process's environment without what would change the BLAS under test."""
    return {k: v for k, v in os.environ.items() if k not in BLAS_OVERRIDES}


def machine() -> dict[str, Any]:
    """CPU, its cores for this process, Python, thread settings and the load at this moment."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "threads": {v: os.environ[v] for v in THREAD_VARIABLES if v in os.environ},
        "blas": {v: os.environ[v] for v in BLAS_OVERRIDES if v in os.environ},
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def line(record: Mapping[str, Any]) -> None:
    """One JSON line on stdout, at once; dataclasses among the values become objects."""
    sys.stdout.write(json.dumps(record, default=asdict, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """What is being done, in a line of its own on stderr that the next one replaces.

    Only where somebody watches; an empty text clears the line.
    """
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people, on stderr: stdout holds only JSON lines. Numbers stand to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        columns = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stderr.write("  ".join(columns).rstrip() + "\n")
