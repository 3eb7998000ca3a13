"""Events added up: a line a kernel, a line a stage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .. import events

_SIZE = re.compile(r"_[xr]?\d+$")  # of a kernel's name: qkv_x3, qkv_r16, mha_64


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A kernel's runs alone; or, where listed, all lists of the same GEMMs or attentions.

    Of a list only the whole is timed. seconds: of all its submits.
    """

    kernel: str
    listed: bool
    submits: int
    runs: int
    rows: int
    padded_rows: int
    seconds: float

    @property
    def submit_us(self) -> float:
        """Microseconds of a submit: of a run, or of a list of runs."""
        return 1e6 * self.seconds / self.submits


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage of the host's time. On the device: the time spent submitting and waiting."""

    stage: str
    times: int
    seconds: float

    @property
    def mean_us(self) -> float:
        """Microseconds each time."""
        return 1e6 * self.seconds / self.times


def kernel_lines(seen: Iterable[events.Event]) -> list[KernelLine]:
    """A line a kernel or kind of list, the one that took longest first."""
    found: dict[tuple[str, bool], list[events.RunsEnded]] = {}
    for event in seen:
        if isinstance(event, events.RunsEnded):
            found.setdefault((_called(event), event.listed), []).append(event)
    lines = [
        KernelLine(
            kernel,
            listed,
            len(submits),
            sum(len(s.runs) for s in submits),
            sum(run.rows for s in submits for run in s.runs),
            sum(run.padded_rows for s in submits for run in s.runs),
            sum(s.end - s.begin for s in submits),
        )
        for (kernel, listed), submits in found.items()
    ]
    return sorted(lines, key=lambda line: -line.seconds)


def stage_lines(seen: Iterable[events.Event]) -> list[StageLine]:
    """A line a stage, in the order they first ended."""
    found: dict[str, list[float]] = {}
    for event in seen:
        if isinstance(event, events.StageEnded):
            found.setdefault(event.stage, []).append(event.end - event.begin)
    return [StageLine(stage, len(times), sum(times)) for stage, times in found.items()]


def _called(event: events.RunsEnded) -> str:
    """The kernel's name; of a list, those of its kernels without their sizes."""
    if not event.listed:
        return event.runs[0].kernel
    return ", ".join(dict.fromkeys(stem(run.kernel) for run in event.runs))


def stem(kernel: str) -> str:
    """A kernel's name without its size: `qkv` of qkv_x3, `mha` of mha_64."""
    return _SIZE.sub("", kernel)
