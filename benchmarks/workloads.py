"""What is measured of the engines: many texts at once, one at a time, from a cold start.

Each engine has a process of its own and they take turns, the order rotating from round to round: a
machine that is busy for a while slows them all, and every ratio is taken within a round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import corpus
import numpy as np
import report
from processes import OURS, Answer, Engine, EngineFailed, Process
from report import Spread
from targets import Measure, Verdict, beside, verdicts

WARM_UP_S = 3.0
SWEEP_TEXTS = 320
SWEEP_BLOCK = 32
SWEEP_PASSES = 2
MS_IN_S = 1e3

Kind = Literal["run", "each", "cold"]
SPEED: Mapping[Kind, Measure] = {
    "run": "times as fast",
    "each": "times as slow",
    "cold": "seconds later",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts and the engines that embed them.

    kind: all texts in a call ("run"), a text a call ("each"), or the first vector of a process
    that has just been started ("cold"). lengths: tokens of each text. reference: the engine whose
    vectors the others' are compared with. missing: engines that cannot be tried, and why.
    """

    name: str
    kind: Kind
    texts: Sequence[str]
    lengths: Sequence[int]
    engines: Sequence[Engine]
    reference: str
    rounds: int
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two engines' vectors are: cosines of the same text's vectors, texts finite."""

    cosine_min: float
    cosine_mean: float
    finite: bool


@dataclass(slots=True)
class Measured:
    """What one engine did: its setting, its answers round by round, facts, agreement."""

    setting: int | None = None
    rounds: list[Answer] = field(default_factory=list)
    facts: Answer = field(default_factory=dict)
    agreement: Agreement | None = None

    def seconds(self) -> list[float]:
        """Seconds by round; of a text a call, the median text's."""
        return [
            r["seconds"] if "seconds" in r else statistics.median(r["ms"]) / MS_IN_S
            for r in self.rounds
        ]

    def mib(self) -> list[float]:
        """The most memory it had, by round."""
        return [r["peak_mib"] for r in self.rounds if "peak_mib" in r]


class Comparison:
    """A workload being measured; `measure` does it all."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.skipped = dict(workload.missing)
        self.found: dict[str, Measured] = {}

    def measure(self) -> dict[str, Any]:
        """The summary; a line a round is printed on the way.

        Raises:
            EngineFailed: npu-embed itself cannot run. A peer that cannot is left out.
        """
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            listed = scratch / "texts.jsonl"
            corpus.write(self.workload.texts, listed)
            if self.workload.kind == "cold":
                self._cold(listed)
            else:
                self._warm(listed, scratch)
        for name, reason in self.skipped.items():
            self._line(engine=name, skipped=reason)
        return self.summary()

    # -- engines that stay -------------------------------------------------------------------

    def _warm(self, listed: Path, scratch: Path) -> None:
        with ExitStack() as stack:
            live: dict[str, Process] = {}
            for engine in self.workload.engines:
                self._progress(f"starting {engine.name}")
                try:
                    setting = self._best_setting(engine, scratch)
                    process = stack.enter_context(Process(engine, listed, setting))
                    process.ready()
                    process.ask("warm", seconds=WARM_UP_S)
                    facts = process.ask("facts")
                except EngineFailed as error:
                    self._skip(engine, error)
                else:
                    live[engine.name] = process
                    self.found[engine.name] = Measured(setting, facts=facts)
            for number in range(self.workload.rounds):
                for name in rotated(live, number):
                    self._progress(f"round {number + 1} of {self.workload.rounds}, {name}")
                    try:
                        self._told(number, name, live[name].ask(self.workload.kind))
                    except EngineFailed as error:
                        self._skip(live.pop(name).engine, error)
            self._compare_vectors(live, scratch)

    def _best_setting(self, engine: Engine, scratch: Path) -> int | None:
        """The engine's fastest setting on some of the texts; its default where there is no choice.

        Raises:
            EngineFailed: it cannot run.
        """
        if len(engine.settings) < 2:
            return next(iter(engine.settings), None)
        some = scratch / "some.jsonl"
        corpus.write(sample(self.workload.texts, self.workload.lengths, SWEEP_TEXTS), some)
        # In a process of its own: the memory and the state of what was tried end with it.
        with Process(engine, some) as process:
            process.ready()
            told = process.ask("sweep", settings=engine.settings, passes=SWEEP_PASSES)["sweep"]
        best: int | None = min(told, key=lambda pair: pair[1])[0]
        self._line(engine=engine.name, sweep=told, setting=best)
        return best

    def _compare_vectors(self, live: Mapping[str, Process], scratch: Path) -> None:
        if self.workload.reference not in live:
            return
        saved = {name: scratch / f"{i}.npy" for i, name in enumerate(live)}
        for name, process in live.items():
            process.ask("save", path=str(saved[name]))
        for name in live:
            self.found[name].agreement = agreement(saved[name], saved[self.workload.reference])

    # -- engines that start ------------------------------------------------------------------

    def _cold(self, listed: Path) -> None:
        live = {engine.name: engine for engine in self.workload.engines}
        # One start more, not counted: what it reads from the disk stays in memory after it.
        for number in range(-1, self.workload.rounds):
            for name in rotated(live, number):
                self._progress(f"start {number + 1} of {self.workload.rounds}, {name}")
                try:
                    with Process(live[name], listed) as process:
                        process.ready()
                        process.ask("run")
                        seconds = time.perf_counter() - process.started
                        if number < 0:
                            self.found[name] = Measured(facts=process.ask("facts"))
                        else:
                            self._told(number, name, {"seconds": seconds})
                except EngineFailed as error:
                    self._skip(live.pop(name), error)

    # -- what is said ------------------------------------------------------------------------

    def _skip(self, engine: Engine, error: EngineFailed) -> None:
        if engine.name == OURS:
            raise EngineFailed(f"{OURS}: {error}") from error
        self.found.pop(engine.name, None)
        self.skipped[engine.name] = str(error)

    def _told(self, number: int, engine: str, answer: Answer) -> None:
        self.found[engine].rounds.append(answer)
        self._line(round=number + 1, engine=engine, **answer)

    def _line(self, **record: object) -> None:
        report.progress("")
        report.line({"benchmark": "compare", "workload": self.workload.name, **record})

    def _progress(self, text: str) -> None:
        report.progress(f"{self.workload.name}: {text}")

    def judged(self) -> list[Verdict]:
        """The verdicts on the workload's targets."""
        seconds = {name: m.seconds() for name, m in self.found.items()}
        mib = {name: m.mib() for name, m in self.found.items()}
        return verdicts(self.workload.name, seconds, mib)

    def summary(self) -> dict[str, Any]:
        """Medians and ranges by engine, how npu-embed stands to each, verdicts, texts, machine."""
        w = self.workload
        about = corpus.describe(w.texts, w.lengths)
        order = [engine.name for engine in w.engines if engine.name in self.found]
        seconds = {name: self.found[name].seconds() for name in order}
        return {
            "benchmark": "compare",
            "workload": w.name,
            "kind": w.kind,
            "summary": True,
            "rounds": w.rounds,
            "engines": {name: figures(self.found[name], about) for name in order},
            "npu_embed_is": SPEED[w.kind],
            "beside": {
                name: beside(SPEED[w.kind], seconds, name) for name in order if name != OURS
            },
            "reference": w.reference if w.reference in self.found else None,
            "skipped": self.skipped,
            "targets": [verdict.record() for verdict in self.judged()],
            "corpus": about,
            "machine": report.machine(),
        }


def figures(m: Measured, about: corpus.Description) -> dict[str, Any]:
    """One engine's medians and ranges over the rounds."""
    seconds = m.seconds()
    found: dict[str, Any] = {"setting": m.setting, "seconds": Spread.of(seconds, 5)}
    if all("ms" in r for r in m.rounds):
        found["ms"] = Spread.of((s * MS_IN_S for s in seconds), 3)
        found["ms_p90"] = Spread.of((float(np.quantile(r["ms"], 0.9)) for r in m.rounds), 3)
    elif about.texts > 1:
        found["texts_per_s"] = Spread.of((about.texts / s for s in seconds), 2)
        found["tokens_per_s"] = Spread.of((about.tokens / s for s in seconds), 1)
    if all("cpu_seconds" in r for r in m.rounds):
        found["cpu_seconds"] = Spread.of(r["cpu_seconds"] for r in m.rounds)
    if m.mib():
        found["peak_mib"] = Spread.of(m.mib(), 1)
    return {**found, "agreement": m.agreement, **m.facts}


def rotated(names: Iterable[str], number: int) -> list[str]:
    """The names, starting with another one in each round."""
    found = list(names)
    start = number % len(found) if found else 0
    return found[start:] + found[:start]


def sample(texts: Sequence[str], lengths: Sequence[int], count: int) -> list[str]:
    """About `count` texts in which batches pad as much as in all: whole runs of like lengths.

    Every n-th text would not do: its neighbours by length would be further apart.
    """
    if len(texts) <= count:
        return list(texts)
    order = sorted(range(len(texts)), key=lambda i: lengths[i])
    blocks = [order[i : i + SWEEP_BLOCK] for i in range(0, len(order), SWEEP_BLOCK)]
    taken = np.linspace(0, len(blocks) - 1, max(1, count // SWEEP_BLOCK)).round().astype(int)
    return [texts[i] for block in dict.fromkeys(taken.tolist()) for i in blocks[block]]


def agreement(ours: Path, reference: Path) -> Agreement:
    """The agreement of two files of vectors, float32 [texts, dim]."""
    a, b = (np.load(path).astype(np.float64) for path in (ours, reference))
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
    return Agreement(round(float(cosines.min()), 6), round(float(cosines.mean()), 7), finite)
