"""Forwards in step: which stretch is submitted when, and what becomes of them after an error."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs import Rig

from npu_embed import Embedder
from npu_embed.errors import RunFailed
from npu_embed.flights import Flight
from npu_embed.schedule import Stretch, run_together, stretches
from npu_embed.trace import Timing

Log = list[str]


class FakeNpu:
    """Notes what is submitted and waited for."""

    def __init__(self, log: Log, fails: str = "", refuses: str = "") -> None:
        self.log, self.fails, self.refuses = log, fails, refuses

    def submit(self, runs: Sequence[Any]) -> Flight:
        (run,) = runs
        self.log.append(f"submit {run}")
        if run == self.refuses:
            raise RunFailed(f"{run} refused")

        def finish() -> None:
            self.log.append(f"end {run}")
            if run == self.fails:
                raise RunFailed(f"{run} failed")

        return Flight(finish)


def forward(log: Log, name: str, count: int) -> Generator[Stretch, None, Any]:
    """A forward of so many stretches that gives its name."""
    try:
        for i in range(count):
            log.append(f"host {name}{i}")
            runs: Any = [f"{name}{i}"]
            yield Stretch("gemm", runs)
        log.append(f"host {name} end")
    finally:
        log.append(f"close {name}")
    return name


def together(npu: FakeNpu, *forwards: Generator[Stretch, None, Any]) -> list[Any]:
    fake: Any = npu
    return run_together(fake, forwards, Timing())


def test_the_host_works_for_one_while_the_device_works_for_the_other() -> None:
    log: Log = []
    assert together(FakeNpu(log), forward(log, "a", 2), forward(log, "b", 2)) == ["a", "b"]
    assert [entry for entry in log if "close" not in entry] == [
        "host a0",
        "submit a0",
        "host b0",
        "submit b0",
        "end a0",
        "host a1",
        "submit a1",
        "end b0",
        "host b1",
        "submit b1",
        "end a1",
        "host a end",
        "end b1",
        "host b end",
    ]


@pytest.mark.parametrize("counts", [(0, 0), (1, 3), (3, 1), (0, 2)])
def test_forwards_of_unequal_length_end_each_with_its_own(counts: tuple[int, int]) -> None:
    log: Log = []
    found = together(FakeNpu(log), forward(log, "a", counts[0]), forward(log, "b", counts[1]))
    assert found == ["a", "b"]
    assert sum(entry.startswith("end") for entry in log) == sum(counts)


@pytest.mark.parametrize("how", ["fails", "refuses"])
@pytest.mark.parametrize("which", ["a0", "b0", "a1", "b1"])
def test_after_a_failure_everything_has_landed_and_every_forward_is_given_up(
    which: str, how: str
) -> None:
    log: Log = []
    with pytest.raises(RunFailed, match=f"{which} (failed|refused)"):
        together(FakeNpu(log, **{how: which}), forward(log, "a", 3), forward(log, "b", 3))
    begun = {entry[7:] for entry in log if entry.startswith("submit")}
    ended = {entry[4:] for entry in log if entry.startswith("end")}
    assert begun - ended == ({which} if how == "refuses" else set())
    assert "close a" in log
    assert ("close b" in log) or "host b0" not in log


def test_time_of_submit_and_wait_is_the_stages() -> None:
    timing = Timing()
    fake: Any = FakeNpu([])
    run_together(fake, [forward([], "a", 2)], timing)
    assert set(timing.seconds) == {"gemm"}


def test_runs_are_split_where_their_context_changes(rig: Rig) -> None:
    up, down, (mha,) = rig.gemm_run("up"), rig.gemm_run("down"), rig.mha_runs(3)
    found = list(stretches(rig.npu, "x", [up, down, mha, up]))
    assert [list(s.runs) for s in found] == [[up, down], [mha], [up]]
    assert {s.stage for s in found} == {"x"}


@pytest.mark.parametrize("count", [1, 2, 16])
def test_two_packs_in_step_share_switches_and_swaps(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(count))
    texts = ["cats " * 60, "dogs " * 60]
    with Embedder(tiny_bundle, "emulated", pack_rows=128) as embedder:
        alone = [embedder.embed(text) for text in texts]
        embedder.embed(texts)
        stats = embedder.last_stats
        np.testing.assert_array_equal(embedder.embed(texts), np.stack(alone))
    assert stats.packs == 2
    assert stats.switches == 2 * 3, "as many as for one pack"
    assert stats.swaps == (2 * 3 if count == 1 else 0)
