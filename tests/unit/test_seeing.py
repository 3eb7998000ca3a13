"""Traces through the public commands and the settings; and that Perfetto itself reads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import run
from rigs import Slots
from traces import check_form, read, slices

from npu_embed import DeviceError, Embedder, events, seeing

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
            counts.update(record["args"])
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
@pytest.mark.filterwarnings("ignore")  # of another package's sockets and files
def test_perfetto_itself_loads_a_trace_and_answers_sql(
    tiny_bundle: Path, tmp_path: Path, slots: Slots
) -> None:
    processor = pytest.importorskip("perfetto.trace_processor")
    slots(1)
    file = tmp_path / "t.json"
    with seeing.traced(file), Embedder(tiny_bundle, "emulated") as embedder:
        embedder.embed(list(TEXTS))
        stats = embedder.stats
    try:
        loaded = processor.TraceProcessor(trace=str(file))
    except Exception as error:  # it downloads its binary at first use
        pytest.skip(f"perfetto's trace_processor cannot be had here: {type(error).__name__}")
    try:

        def ask(sql: str) -> list[Any]:
            return list(loaded.query(sql))

        (swaps,) = ask(
            "select max(value) as n from counter c join process_counter_track t "
            "on c.track_id = t.id where t.name = 'swaps'"
        )
        assert swaps.n == stats.swaps > 0
        (runs,) = ask(
            "select count(*) as n from slice s join thread_track t on s.track_id = t.id "
            "join thread using (utid) join process using (upid) "
            "where process.name = 'NPU' and s.dur > 0"
        )
        assert runs.n > 0
        (errors,) = ask("select sum(value) as n from stats where severity = 'error'")
        assert not errors.n
    finally:
        loaded.close()
