"""Traces read back, and checked against the form that Perfetto's importer wants."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

# By kind of event, the keys beside ph, name, pid, tid, ts and args.
PHASES = {"M": set(), "X": {"dur"}, "i": {"s"}, "C": set()}
COMMON = {"ph", "name", "pid", "tid", "ts", "args"}
METADATA = {"process_name", "thread_name"}
EPSILON_US = 0.002  # times are rounded to a thousandth


def read(path: Path) -> dict[str, Any]:
    """What a trace's file holds."""

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def slices(trace: dict[str, Any], *, pid: int) -> list[dict[str, Any]]:
    """A process's slices, in the order they begin."""
    found = [r for r in trace["traceEvents"] if r["ph"] == "X" and r["pid"] == pid]
    return sorted(found, key=lambda r: r["ts"])


def check_form(trace: dict[str, Any]) -> None:
    """Check fields and names, that slices of a track nest, and that counters only grow."""
    tracks, processes = set(), set()
    nested = defaultdict(list)
    counters: dict[str, int] = defaultdict(int)
    for record in trace["traceEvents"]:
        assert record.keys() == COMMON | PHASES[record["ph"]]
        assert isinstance(record["name"], str)
        assert record["name"]
        assert all(type(record[key]) is int for key in ("pid", "tid"))
        assert all(type(record[key]) in (int, float) for key in ("ts", "dur") if key in record)
        assert isinstance(record["args"], dict)
        assert record["ts"] >= 0
        if record["ph"] == "M":
            assert record["name"] in METADATA
            assert isinstance(record["args"]["name"], str)
        if record["name"] == "process_name":
            processes.add(record["pid"])
        elif record["name"] == "thread_name":
            tracks.add((record["pid"], record["tid"]))
        elif record["ph"] == "X":
            assert record["dur"] >= 0
            nested[record["pid"], record["tid"]].append(record)
        elif record["ph"] == "i":
            assert record["s"] == "t"
        elif record["ph"] == "C":
            assert record["args"].keys() == {"total"}
            value = record["args"]["total"]
            assert type(value) is int
            assert value > counters[record["name"]]
            counters[record["name"]] = value
    assert set(nested) <= tracks
    assert {pid for pid, _ in nested} <= processes
    for track in nested.values():
        _check_nested(track)


def _check_nested(track: list[dict[str, Any]]) -> None:
    """No two slices of a track overlap without one holding the other."""
    open_ends: list[float] = []
    for record in sorted(track, key=lambda r: (r["ts"], -r["dur"])):
        begin, end = record["ts"], record["ts"] + record["dur"]
        while open_ends and open_ends[-1] <= begin + EPSILON_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + EPSILON_US, record
        open_ends.append(end)
