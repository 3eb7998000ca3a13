"""What npu-embed on the emulated NPU should reach beside each peer, and whether a run did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from processes import OURS
from report import Spread

ST = "sentence-transformers"
ST_BEST = "sentence-transformers, best batch"
ORT = "onnxruntime float32"
ORT_INT8 = "onnxruntime int8"
HF = "transformers float32"
EGEMMA2 = "egemma2"

Measure = Literal["times as fast", "times as slow", "seconds later", "MiB at most"]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a measure of a workload, and why it stands where it does.

    "times as fast": the peer's seconds / ours, at least. The others are bounds from above: ours /
    the peer's ("times as slow"), ours - the peer's ("seconds later"), memory.
    """

    workload: str
    measure: Measure
    peer: str | None
    limit: float
    reason: str

    def met_by(self, found: Spread) -> bool:
        """Whether the median is on the right side of the limit."""
        if self.measure == "times as fast":
            return found.median >= self.limit
        return found.median <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.measure == "times as fast" else "<="
        whom = f", beside {self.peer}" if self.peer else ""
        return f"{sign} {self.limit:g} {self.measure}{whom}"


# One packed forward without padding does less work than padded batches: on many texts of all
# lengths it should beat what pads, and on few texts, where sorting helps less, by more.
TARGETS = (
    Target("mixed", "times as fast", ST, 1.6, "what most people run today, as it comes"),
    Target("mixed", "times as fast", ST_BEST, 1.3, "the same, tuned by somebody who knows it"),
    Target("mixed", "times as fast", ORT, 1.0, "the fastest float32 on a CPU that is widely used"),
    Target("mixed", "MiB at most", None, 450, "float32 weights and activations fit twice"),
    Target("few", "times as fast", ORT, 1.2, "padding costs most where texts are few"),
    Target("one", "times as slow", ORT, 1.5, "nothing to pack; runs cost what they cost"),
    Target("cold", "seconds later", ORT, 0.3, "a command line must not feel slow"),
    Target("gemma", "times as fast", HF, 1.1, "the reference's own code"),
    Target("gemma", "times as fast", EGEMMA2, 1.3, "the model's fastest other engine on a CPU"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was found; met is None where the peer could not run."""

    target: Target
    found: Spread | None
    met: bool | None

    def record(self) -> dict[str, Any]:
        """The verdict as it stands in a JSON line."""
        t = self.target
        return {
            "peer": t.peer,
            "measure": t.measure,
            "limit": t.limit,
            "reason": t.reason,
            "found": self.found,
            "met": self.met,
        }

    def row(self) -> tuple[str, str, str, str]:
        """The verdict as a row of a table: workload, target, found, pass or fail."""
        word = {True: "pass", False: "FAIL", None: "not run"}[self.met]
        return (self.target.workload, str(self.target), str(self.found or "-"), word)


def beside(
    measure: Measure, rounds: Mapping[str, Sequence[float]], peer: str | None
) -> Spread | None:
    """A measure of rounds by engine, taken round by round; None where an engine has none.

    rounds: seconds, or MiB for "MiB at most".
    """
    own = rounds.get(OURS)
    if measure == "MiB at most":
        return Spread.of(own, 1) if own else None
    theirs = rounds.get(peer or "")
    if not own or not theirs:
        return None
    pairs = list(zip(own, theirs, strict=True))
    if measure == "times as fast":
        return Spread.of(b / a for a, b in pairs)
    if measure == "times as slow":
        return Spread.of(a / b for a, b in pairs)
    return Spread.of(a - b for a, b in pairs)


def verdicts(
    workload: str,
    seconds: Mapping[str, Sequence[float]],
    mib: Mapping[str, Sequence[float]],
    targets: Sequence[Target] = TARGETS,
) -> list[Verdict]:
    """The verdicts on a workload's targets, of seconds and peak MiB by engine and round."""
    found = []
    for target in targets:
        if target.workload == workload:
            rounds = mib if target.measure == "MiB at most" else seconds
            spread = beside(target.measure, rounds, target.peer)
            met = None if spread is None else target.met_by(spread)
            found.append(Verdict(target, spread, met))
    return found
