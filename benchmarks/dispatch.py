"""What a run costs beside its arithmetic: engine, pyxrt API and emulated array, microseconds a run.

    python benchmarks/dispatch.py
    python benchmarks/dispatch.py --bundle BUNDLE --json

On kernels of a tiny checkpoint, whose arithmetic is next to nothing. What there is of it is done
once more by hand, in plain numpy, and subtracted; what the emulated array says it was busy stands
beside it. JSON lines on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before numpy is imported: on matrices this small threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import corpus
import report
from dispatch_cases import Case, Kernels, cases
from report import Spread

from npu_embed import NpuEmbedError, jit
from npu_embed.exporters import export_checkpoint

TINY = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny-bert"
ROUNDS, SUBMITS = 5, 100
WARM_UP_SUBMITS = 20
US = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one submit and its wait: whole, in the submit alone, of the array, by hand."""

    whole: float
    submit: float
    array: float
    by_hand: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a case costs, in microseconds a run: medians of each round, and their range.

    whole: from the submit to the end of the wait, of which `submit` in the submit. array: what the
    emulated array says it was busy. by_hand: the same arithmetic in plain numpy. cost: whole less
    by_hand. target: the most it should cost.
    """

    case: str
    runs: int
    whole: Spread
    submit: Spread
    array: Spread
    by_hand: Spread
    cost: Spread
    target: float | None

    @classmethod
    def of(cls, case: Case, rounds: Sequence[Sequence[Sample]]) -> Found:
        """The medians of some rounds of samples."""

        def each(seconds: str) -> list[float]:
            return [
                Spread.of((getattr(s, seconds) * US / case.runs for s in samples), 3).median
                for samples in rounds
            ]

        whole, by_hand = each("whole"), each("by_hand")
        return cls(
            case.name,
            case.runs,
            Spread.of(whole, 2),
            Spread.of(each("submit"), 2),
            Spread.of(each("array"), 2),
            Spread.of(by_hand, 2),
            Spread.of((w - h for w, h in zip(whole, by_hand, strict=True)), 2),
            case.target_us,
        )

    @property
    def verdict(self) -> str:
        """Whether the target was met, by the median."""
        if self.target is None:
            return ""
        return "met" if self.cost.median <= self.target else "missed"


def sample(kernels: Kernels, case: Case, number: int) -> Sample:
    """One submit of a case, waited for, and its arithmetic by hand."""
    runs = case.make(number)
    busy = kernels.busy_seconds()
    start = time.perf_counter()
    flight = kernels.npu.submit(runs)
    submitted = time.perf_counter()
    flight.wait()
    end = time.perf_counter()
    busy = kernels.busy_seconds() - busy
    hand = time.perf_counter()
    case.by_hand(number)
    by_hand = time.perf_counter() - hand
    return Sample(end - start, submitted - start, busy, by_hand)


def measure(kernels: Kernels, rounds: int, submits: int) -> list[Found]:
    """Every case, the cases taking turns in each round."""
    found = cases(kernels)
    samples: list[list[list[Sample]]] = [[] for _ in found]
    for case in found:
        for number in range(WARM_UP_SUBMITS):
            sample(kernels, case, number)
    for round_ in range(rounds):
        first = WARM_UP_SUBMITS + round_ * submits
        for case, done in zip(found, samples, strict=True):
            done.append([sample(kernels, case, n) for n in range(first, first + submits)])
    return [Found.of(case, done) for case, done in zip(found, samples, strict=True)]


def show(found: Sequence[Found]) -> None:
    """The table, on stderr."""
    rows = [
        (
            f.case,
            str(f.runs),
            *(f"{s.median:.1f}" for s in (f.whole, f.submit, f.array, f.by_hand)),
            f"{f.cost.median:.1f} ({f.cost.low:.1f} to {f.cost.high:.1f})",
            "" if f.target is None else f"{f.target:g}",
            f.verdict,
        )
        for f in found
    ]
    header = ("us a run", "runs", "whole", "submit", "array", "by hand", "cost", "target", "")
    sys.stderr.write("\n")
    report.table(header, rows)


def run(bundle: Path, rounds: int, submits: int) -> list[Found]:
    """Measure a bundle's kernels on the emulated NPU; print a line a case, then the machine."""
    compiled = jit.load()  # as in a process that has been at work for a second
    with Kernels(bundle) as kernels:
        found = measure(kernels, rounds, submits)
        about: dict[str, Any] = {"bundle": kernels.bundle.name, "rounds": rounds}
        about["compiled"] = compiled
    for f in found:
        told = {name: getattr(f, name) for name in Found.__slots__}
        report.line({"benchmark": "dispatch", **about, "submits": submits, **told})
    report.line({"benchmark": "dispatch", "machine": report.machine()})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, help="of the bert family; default: a tiny one, made")
    parser.add_argument("--rounds", type=corpus.positive, default=ROUNDS, metavar="N")
    parser.add_argument(
        "--submits", type=corpus.positive, default=SUBMITS, metavar="N", help="in each round"
    )
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="npu-embed-dispatch-") as folder:
            bundle = args.bundle or export_checkpoint(TINY, Path(folder) / "bundle")
            found = run(bundle, args.rounds, args.submits)
    except (NpuEmbedError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if not args.json:
        show(found)


if __name__ == "__main__":
    main()
