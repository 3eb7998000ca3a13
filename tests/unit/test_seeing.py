"""Traces through the public commands and the settings; and that Perfetto itself reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import run
from perfetto_engine import Engine, NoEngineError, perfetto
from rigs import Slots
from traces import check_form, read, slices

from npu_embed import DeviceError, Embedder, events, seeing
from npu_embed.stats import Stats

TEXTS = ("a", "two cats on a sofa", "a red car " * 6)


@pytest.fixture(autouse=True)
def _ends_with_the_test() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NPU_EMBED_TRACE", raising=False)
        seeing.start_from_settings()
    assert events.listeners == ()


def last_counts(trace: dict[str, Any]) -> dict[str, int]:
    """What each counter ended at."""
    counts: dict[str, int] = {}
    for record in trace["traceEvents"]:
        if record["ph"] == "C":
            counts[record["name"]] = record["args"]["total"]
    return counts


def test_embed_writes_a_trace_that_agrees_with_its_statistics(
    tiny_bundle: Path, tmp_path: Path, slots: Slots
) -> None:
    slots(1)
    file = tmp_path / "t.json"
    done = run("embed", "--bundle", tiny_bundle, "--trace", file, "--json", "--stats", *TEXTS)
    assert done.code == 0, done.err
    stats = done.json_lines[-1]["stats"]
    trace = read(file)
    check_form(trace)
    wanted = {name: stats[name] for name in ("tokens", "runs", "switches", "swaps")}
    assert last_counts(trace) == wanted
    assert sum(len(one["args"]["runs"]) for one in slices(trace, pid=2)) == stats["runs"]
    (pack,) = slices(trace, pid=3)
    assert sorted(pack["args"]["texts"]) == [0, 1, 2]
    assert {s["name"] for s in slices(trace, pid=1)} >= {"open", "tokenize", "gemm", "mha", "host"}
    assert events.listeners == ()


def test_packs_in_step_have_a_slot_each_and_name_all_texts(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    texts = [f"text number {n} " + "and more " * (n % 7) for n in range(60)]
    with seeing.traced(file), Embedder(tiny_bundle, "emulated", pack_rows=128) as embedder:
        embedder.embed(texts)
        packs = embedder.stats.packs
    trace = read(file)
    check_form(trace)
    found = slices(trace, pid=3)
    assert len(found) == packs > 2
    assert {pack["tid"] for pack in found} == {1, 2}
    assert sorted(i for pack in found for i in pack["args"]["texts"]) == list(range(60))


def test_batch_writes_a_trace(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    file = tmp_path / "t.json"
    out = tmp_path / "o.npy"
    done = run("batch", tmp_path / "in.txt", "-o", out, "--bundle", tiny_bundle, "--trace", file)
    assert done.code == 0, done.err
    check_form(read(file))
    assert last_counts(read(file))["runs"] > 0


def test_check_writes_a_trace(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    assert run("check", tiny_bundle, "--trace", file).code == 0
    check_form(read(file))
    assert last_counts(read(file))["runs"] > 0


def test_an_error_ends_the_trace_and_leaves_it_whole(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "error@2+")
    file = tmp_path / "t.json"
    done = run("embed", "--bundle", tiny_bundle, "--trace", file, *TEXTS)
    assert done.code == 1
    trace = read(file)
    check_form(trace)
    failed = [one["args"]["failed"] for one in slices(trace, pid=2)]
    assert failed[0] is False
    assert failed[-1] is True


@pytest.mark.parametrize("name", ["no/such/folder.json", "."])
def test_a_trace_that_cannot_be_is_refused_before_anything_runs(
    name: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    done = run("embed", "--bundle", tiny_bundle, "--trace", tmp_path / name, "a")
    assert done.code == 1
    assert "no file can be made there" in done.err
    assert done.out == ""


def test_the_setting_traces_the_process_and_close_writes(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    monkeypatch.setenv("NPU_EMBED_TRACE", str(file))
    for _ in range(2):
        with Embedder(tiny_bundle, "emulated") as embedder:
            embedder.embed(list(TEXTS))
        runs = embedder.stats.runs
    check_form(read(file))
    assert last_counts(read(file))["runs"] == 2 * runs


def test_another_setting_begins_another_trace(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for name in ("one.json", "two.json"):
        monkeypatch.setenv("NPU_EMBED_TRACE", str(tmp_path / name))
        with Embedder(tiny_bundle, "emulated") as embedder:
            embedder.embed("a")
        counts.append(last_counts(read(tmp_path / name)))
    assert counts[0] == counts[1]


def test_a_trace_that_cannot_be_written_costs_no_vector(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setenv("NPU_EMBED_TRACE", str(folder / "t.json"))
    with Embedder(tiny_bundle, "emulated") as embedder:
        assert embedder.embed("a").shape == (64,)
        folder.rmdir()
    assert "t.json: not written (No such file or directory)" in caplog.text
    monkeypatch.delenv("NPU_EMBED_TRACE")
    folder.mkdir()  # it is tried once more where the trace ends


SCRIPT = """
import npu_embed
embedder = npu_embed.Embedder({bundle!r}, "emulated")
embedder.embed(["a", "b c d"])
raise SystemExit("an error, and nobody has closed anything")
"""


@pytest.mark.slow
def test_a_process_that_ends_without_close_leaves_its_trace(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_TRACE", str(tmp_path / "t-%p.json"))
    ended = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(bundle=str(tiny_bundle))],
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    _, err = ended.communicate(timeout=120)
    assert ended.returncode == 1, err
    trace = read(tmp_path / f"t-{ended.pid}.json")
    check_form(trace)
    assert last_counts(trace)["runs"] > 0


def test_a_device_that_cannot_be_opened_ends_nothing_badly(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    with seeing.traced(file), pytest.raises(DeviceError):
        Embedder(tiny_bundle, "npu")
    check_form(read(file))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of another package's files
def test_perfetto_itself_loads_a_trace_and_answers_sql(
    tiny_bundle: Path, tmp_path: Path, slots: Slots
) -> None:
    slots(1)
    file = tmp_path / "t.json"
    with seeing.traced(file), Embedder(tiny_bundle, "emulated") as embedder:
        embedder.embed(list(TEXTS))
        stats = embedder.stats
    trace = read(file)
    try:
        with perfetto(file) as loaded:
            _check_loaded(loaded, trace, stats)
    except NoEngineError as error:
        pytest.skip(str(error))


def _check_loaded(loaded: Engine, trace: dict[str, Any], stats: Stats) -> None:
    """Check that what Perfetto has is what the file has, and that it complained of nothing."""
    complaints = loaded.query(
        "select name, value from stats where severity in ('error', 'data_loss') and value != 0"
    )
    assert [(row.name, row.value) for row in complaints] == []

    counters = loaded.query(
        "select t.name, max(c.value) as last, count(*) as points from counter c "
        "join process_counter_track t on c.track_id = t.id join process using (upid) "
        "where process.name = 'NPU' group by t.name"
    )
    last = {row.name: row.last for row in counters}
    assert last == {f"{name} total": getattr(stats, name) for name in last_counts(trace)}
    assert last["swaps total"] > 0
    assert sum(row.points for row in counters) == sum(r["ph"] == "C" for r in trace["traceEvents"])

    tracks = loaded.query(
        "select process.name as process, thread.name as thread, s.name, s.dur, s.depth "
        "from slice s join thread_track t on s.track_id = t.id join thread using (utid) "
        "join process using (upid)"
    )
    marks = [r for r in trace["traceEvents"] if r["ph"] == "i"]
    for pid, process in ((1, "host"), (2, "NPU"), (3, "packs")):
        found = [row for row in tracks if row.process == process]
        wanted = slices(trace, pid=pid) + [r for r in marks if r["pid"] == pid]
        assert sorted(row.name for row in found) == sorted(r["name"] for r in wanted)
        total_ns = sum(round(r.get("dur", 0) * 1000) for r in wanted)
        assert abs(sum(row.dur for row in found) - total_ns) <= len(found)
    assert {row.thread for row in tracks if row.process == "NPU"} == {"gemm.xclbin", "mha.xclbin"}
    assert all(row.depth == 0 for row in tracks if row.process == "NPU" and row.dur > 0)
    (runs,) = loaded.query(
        "select sum(extract_arg(arg_set_id, 'args.rows')) as n from slice where name like 'qkv%' "
        "and dur > 0"
    )
    assert runs.n == sum(r["args"]["rows"] for r in slices(trace, pid=2) if r["name"][:3] == "qkv")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_perfetto_complains_of_a_trace_that_is_none(tmp_path: Path) -> None:
    """So that its silence about ours says something."""
    file = tmp_path / "t.json"
    of = {"ph": "X", "name": "a", "pid": 1, "tid": 1}
    overlapping = [{**of, "ts": 10, "dur": 20}, {**of, "ts": 15, "dur": 200}]
    file.write_text(json.dumps({"traceEvents": overlapping}))
    try:
        with perfetto(file) as loaded:
            found = loaded.query("select name from stats where severity = 'error' and value != 0")
    except NoEngineError as error:
        pytest.skip(str(error))
    assert [row.name for row in found] == ["slice_drop_overlapping_complete_event"]
