"""The trace's file: its form, its bound, and that it is written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from traces import check_form, read, slices

from npu_embed import events
from npu_embed.chrometrace import ChromeTrace

RUN = events.RunSeen("qkv", 3, 16)


def ended(begin: float, end: float, **more: Any) -> events.RunsEnded:  # noqa: ANN401
    """A run's end."""
    told = {"listed": False, "switched": False, "swapped": False, "failed": False, **more}
    runs = told.pop("runs", (RUN,))
    return events.RunsEnded("gemm.xclbin", runs, begin, end, **told)


def written(trace: ChromeTrace) -> dict[str, Any]:
    """What its file holds."""
    trace.write()
    return read(trace.path)


def test_every_event_has_its_place(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    t = trace._start
    for event in (
        events.Opened("b", "bert", "emulated", "NPU"),
        events.ContextMade("gemm.xclbin", t + 1, t + 2),
        events.StreamLoaded("qkv", "gemm.xclbin", bytes(40), t + 2, t + 3),
        events.WordsPatched("qkv", "gemm.xclbin", {7: 5}, t + 3),
        ended(t + 3, t + 4, switched=True),
        events.StageEnded("gemm", t + 0.5, t + 4, waits=True),
        events.ContextDropped("gemm.xclbin", "swap", t + 5),
        events.ContextDropped("gemm.xclbin", "release", t + 6),
        events.PacksEnded((events.PackSeen((4, 2), (9, 8)), events.PackSeen((0,), (3,))), t, t + 7),
    ):
        trace.note(event)
    found = written(trace)
    check_form(found)
    named = {(r["pid"], r["name"]) for r in found["traceEvents"] if r["ph"] in "Xi"}
    assert named == {
        (1, "open b"),
        (1, "context gemm.xclbin"),
        (1, "load qkv"),
        (1, "patch qkv"),
        (1, "gemm"),
        (2, "qkv"),
        (2, "switch"),
        (2, "swap"),
        (2, "dropped (release)"),
        (3, "pack of 2 texts"),
        (3, "pack of 1 texts"),
    }
    counted = {r["name"]: r["args"] for r in found["traceEvents"] if r["ph"] == "C"}
    assert counted == {
        "tokens": {"total": 20},
        "runs": {"total": 1},
        "switches": {"total": 1},
        "swaps": {"total": 1},
    }
    (run,) = slices(found, pid=2)
    assert run["ts"] == pytest.approx(3e6)
    assert run["dur"] == pytest.approx(1e6)
    assert run["args"]["runs"] == [["qkv", 3, 16]]
    first = slices(found, pid=3)[0]["args"]
    assert (first["texts"], first["tokens"]) == ([4, 2], [9, 8])


def test_a_list_is_one_slice_marked_so(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    runs = (events.RunSeen("up", 3, 16), events.RunSeen("down", 3, 16), events.RunSeen("up", 1, 16))
    trace.note(ended(trace._start, trace._start + 1, runs=runs, listed=True))
    (one,) = slices(written(trace), pid=2)
    assert one["name"] == "list of 3: up, down"
    assert one["args"]["list"] is True
    assert len(one["args"]["runs"]) == 3


def test_what_began_before_the_trace_is_cut_to_it(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.note(events.StageEnded("open", trace._start - 5, trace._start + 1, waits=False))
    (stage,) = slices(written(trace), pid=1)
    assert stage["ts"] == 0
    assert stage["dur"] == pytest.approx(1e6)


def test_each_thread_has_a_track(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")

    def note() -> None:
        trace.note(events.StageEnded("host", trace._start, trace._start + 1, waits=False))

    note()
    other = threading.Thread(target=note, name="other")
    other.start()
    other.join()
    found = written(trace)
    assert len({stage["tid"] for stage in slices(found, pid=1)}) == 2
    check_form(found)


def test_it_is_bounded_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = ChromeTrace(tmp_path / "t.json", max_records=20)
    with caplog.at_level(logging.WARNING, "npu_embed"):
        for _ in range(30):
            trace.note(events.StageEnded("host", trace._start, trace._start + 1, waits=False))
        trace.note(ended(trace._start, trace._start + 1))
    (record,) = caplog.records
    assert "the trace is full with 20 events" in record.getMessage()
    found = written(trace)
    check_form(found)
    assert sum(r["ph"] != "M" for r in found["traceEvents"]) + 4 == 20  # three processes, a thread
    assert found["otherData"]["dropped"] == trace.dropped == 30 - 16 + 2


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.write()
    before = trace.path.read_bytes()

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    trace.note(events.StageEnded("host", trace._start, trace._start + 1, waits=False))
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        trace.write()
    assert trace.path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.json"]


def test_the_file_is_as_open_as_any_other(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.write()
    (tmp_path / "other").write_text("")
    assert trace.path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    trace.write()
    assert not trace.path.exists()


def test_names_from_strangers_stay_json(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.note(events.Opened('"},\n{"ph": "\udcff\0', "bert", "npu", "é"))
    trace.write()
    assert json.loads(trace.path.read_text(encoding="ascii"))["traceEvents"][-1]["ph"] == "i"
