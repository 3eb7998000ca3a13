"""The comparison: its sums, its targets, its processes; never how fast anything is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import compare  # noqa: E402
import contenders  # noqa: E402
import corpus  # noqa: E402
import engines  # noqa: E402
import peers  # noqa: E402
import plots  # noqa: E402
import targets  # noqa: E402
import worker  # noqa: E402
import workloads  # noqa: E402
from processes import OURS, Engine, EngineFailed, Process  # noqa: E402
from report import Spread  # noqa: E402
from targets import ST, Target  # noqa: E402

from npu_embed.bundle import Bundle  # noqa: E402

TEXTS = ["two cats sleeping", "a red car parked outside", "the quick brown fox jumps", "hello"]
LENGTHS = [5, 7, 8, 3]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "WARM_UP_S", 0.0)
    monkeypatch.setattr(compare, "COLD_LEAST_ROUNDS", 1)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    corpus.write(TEXTS, tmp_path / "c.jsonl")
    return tmp_path / "c.jsonl"


def ours(bundle: Path, *settings: int | None) -> Engine:
    return Engine(OURS, OURS, sys.executable, str(bundle), settings)


# -- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "found"),
    [
        ("times as fast", Spread(2.0, 2.0, 2.0)),
        ("times as slow", Spread(0.5, 0.5, 0.5)),
        ("seconds later", Spread(-2.2, -4.0, -2.0)),
    ],
)
def test_engines_are_compared_round_by_round(measure: targets.Measure, found: Spread) -> None:
    # The machine was twice as slow in the second round: a ratio of medians would not be 2.
    rounds = {OURS: [2.0, 4.0, 2.2], ST: [4.0, 8.0, 4.4]}
    assert targets.beside(measure, rounds, ST) == found
    assert targets.beside(measure, rounds, "not run") is None


@pytest.mark.parametrize(
    ("measure", "limit", "median", "met"),
    [
        ("times as fast", 1.6, 1.6, True),
        ("times as fast", 1.6, 1.59, False),
        ("times as slow", 1.5, 1.5, True),
        ("times as slow", 1.5, 1.51, False),
        ("seconds later", 0.3, -0.1, True),
        ("seconds later", 0.3, 0.31, False),
        ("MiB at most", 450.0, 449.0, True),
        ("MiB at most", 450.0, 451.0, False),
    ],
)
def test_a_target_is_met_by_the_median_on_its_side(
    measure: targets.Measure, limit: float, median: float, met: bool
) -> None:
    target = Target("mixed", measure, ST, limit, "a reason")
    assert target.met_by(Spread(median, 0.0, 9.0)) is met


def test_a_workload_is_judged_by_its_own_targets() -> None:
    wanted = (
        Target("mixed", "times as fast", ST, 1.6, "r"),
        Target("mixed", "MiB at most", None, 450, "r"),
        Target("mixed", "times as fast", "absent", 1.0, "r"),
        Target("few", "times as fast", ST, 9.9, "r"),
    )
    seconds = {OURS: [1.0, 1.0], ST: [2.0, 1.5]}
    found = targets.verdicts("mixed", seconds, {OURS: [100.0, 500.0]}, wanted)
    assert [v.met for v in found] == [True, True, None]
    assert found[1].found == Spread(300.0, 100.0, 500.0)
    assert found[2].row()[-1] == "not run"
    assert found[0].record()["found"] == Spread(1.75, 1.5, 2.0)


def test_every_target_names_a_workload_and_a_peer_that_run_in_it() -> None:
    for target in targets.TARGETS:
        engines_of = contenders.ENGINES_OF[target.workload]
        assert OURS in engines_of
        assert target.peer is None or target.peer in engines_of
        assert target.reason


def test_agreement_is_the_cosine_text_by_text(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 0], [0, 2]], np.float32))
    np.save(tmp_path / "b.npy", np.array([[3, 0], [1, 1]], np.float32))
    found = workloads.agreement(tmp_path / "a.npy", tmp_path / "b.npy")
    assert found == workloads.Agreement(round(0.5**0.5, 6), round((1 + 0.5**0.5) / 2, 7), True)


def test_a_vector_that_is_no_number_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, np.nan]], np.float32))
    np.save(tmp_path / "b.npy", np.array([[1, 1]], np.float32))
    assert not workloads.agreement(tmp_path / "a.npy", tmp_path / "b.npy").finite


def test_the_order_rotates_from_round_to_round() -> None:
    orders = [workloads.rotated(["a", "b", "c"], i) for i in range(-1, 3)]
    assert orders == [list("cab"), list("abc"), list("bca"), list("cab")]
    assert workloads.rotated([], 1) == []


def test_a_sample_pads_as_all_the_texts_do() -> None:
    lengths = [(i * 7919) % 1024 for i in range(1024)]
    texts = [str(length) for length in lengths]
    found = [int(text) for text in workloads.sample(texts, lengths, 320)]
    assert len(found) == 10 * workloads.SWEEP_BLOCK
    for start in range(0, len(found), workloads.SWEEP_BLOCK):
        block = found[start : start + workloads.SWEEP_BLOCK]
        assert block == list(range(block[0], block[0] + len(block)))
    assert found[0] == 0  # the shortest and the longest are among them
    assert found[-1] == 1023
    assert workloads.sample(texts[:9], lengths[:9], 320) == texts[:9]


def test_figures_are_of_all_rounds() -> None:
    about = corpus.describe(["a"] * 10, [10] * 10)
    rounds: list[dict[str, Any]] = [
        {"seconds": s, "cpu_seconds": 2 * s, "peak_mib": 100 * s} for s in (4.0, 2.0, 2.2)
    ]
    found = workloads.figures(workloads.Measured(8, rounds, {"versions": {}}), about)
    assert found["setting"] == 8
    assert found["seconds"] == Spread(2.2, 2.0, 4.0)
    assert found["tokens_per_s"] == Spread(45.5, 25.0, 50.0)
    assert found["cpu_seconds"] == Spread(4.4, 4.0, 8.0)
    assert found["peak_mib"].high == 400.0
    assert found["versions"] == {}


def test_one_text_at_a_time_is_the_median_text_of_each_round() -> None:
    about = corpus.describe(["a"] * 3, [5] * 3)
    measured = workloads.Measured(rounds=[{"ms": [1.0, 2.0, 9.0]}, {"ms": [3.0, 4.0, 5.0]}])
    assert measured.seconds() == [0.002, 0.004]
    assert workloads.figures(measured, about)["ms"] == Spread(3.0, 2.0, 4.0)


def test_one_runs_the_shortest_twentieth_in_its_order() -> None:
    assert compare.shortest(["t"] * 1000, list(range(1000, 0, -1))) == list(range(950, 1000))
    assert len(compare.shortest(["t"] * 9999, [1] * 9999)) == compare.ONE_MOST
    assert compare.shortest(["a", "b"], [2, 1]) == [0, 1]


# -- in a process of its own -------------------------------------------------------------------


def test_batches_come_back_in_the_callers_order() -> None:
    batches: list[list[int]] = []

    def embed(part: Sequence[int]) -> np.ndarray[Any, Any]:
        batches.append(list(part))
        return np.array([[float(i)] for i in part], np.float32)

    found = engines.in_order([3, 0, 2, 1], 3, embed)
    assert found.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert batches == [[3, 0, 2], [1]]
    assert engines.by_characters(["a", "ccc", "bb"]) == [1, 2, 0]


@pytest.mark.slow
def test_a_process_warms_runs_and_saves(tiny_bundle: Path, listed: Path, tmp_path: Path) -> None:
    with Process(ours(tiny_bundle), listed) as process:
        assert process.ready()["ready"] == OURS
        process.ask("warm", seconds=0)
        told = process.ask("run")
        assert told["seconds"] > 0
        assert told["cpu_seconds"] > 0
        assert told["peak_mib"] > 1
        process.ask("save", path=str(tmp_path / "run.npy"))
        assert len(process.ask("each")["ms"]) == len(TEXTS)
        process.ask("save", path=str(tmp_path / "each.npy"))
        assert "numpy" in process.ask("facts")["versions"]
        sweep = process.ask("sweep", settings=[None, 128], passes=1)["sweep"]
        assert [setting for setting, _ in sweep] == [None, 128]
    assert np.load(tmp_path / "run.npy").shape == (len(TEXTS), 64)
    found = workloads.agreement(tmp_path / "run.npy", tmp_path / "each.npy")
    assert found.cosine_min > 0.999


@pytest.mark.slow
def test_a_process_that_ends_gives_its_last_words(listed: Path, tmp_path: Path) -> None:
    with Process(ours(tmp_path / "none"), listed) as process:
        process.ready()
        for _ in range(2):  # the second question finds it gone
            with pytest.raises(EngineFailed, match="no such folder"):
                process.ask("run")


def test_a_python_that_is_not_there_is_a_reason(listed: Path) -> None:
    with pytest.raises(EngineFailed, match="No such file"):
        Process(Engine(ST, "sentence-transformers", "/no/python", "m"), listed)


def test_the_memory_of_a_process_is_its_own_peak() -> None:
    before = worker.peak_mib(os.getpid())
    taken = np.ones(64 << 20, np.uint8)
    assert worker.peak_mib(os.getpid()) >= before
    assert worker.peak_mib(os.getpid()) > len(taken) / (1 << 20)


def test_the_tried_setting_that_takes_the_least_is_the_best() -> None:
    seconds = {None: 0.2, 8: 0.1, 32: 0.3}
    tried: list[int | None] = []
    clock = [0.0]

    def embed(texts: Sequence[str], setting: int | None) -> list[list[float]]:
        tried.append(setting)
        first = len(tried) <= 6  # the first pass meets cold kernels
        clock[0] += (2 if first else 1) * seconds[setting] * len(texts)
        return [[1.0]] * len(texts)

    loaded = engines.Loaded(embed, dict, os.getpid())
    told = worker.Worker(loaded, TEXTS, None, clock=lambda: clock[0])
    found = told.answer({"do": "sweep", "settings": [None, 8, 32], "passes": 2})["sweep"]
    assert [pair[0] for pair in found] == [None, 8, 32]
    assert [pair[1] for pair in found] == pytest.approx([0.8, 0.4, 1.2])
    assert tried == [None, None, 8, 8, 32, 32] * 2


# -- the whole ---------------------------------------------------------------------------------

NOISY_PEER = """
import numpy

print("a library that talks")

class SentenceTransformer:
    max_seq_length = 256

    def __init__(self, model, device):
        assert device == "cpu"

    def encode(self, texts, show_progress_bar, convert_to_numpy, batch_size=32):
        print("while it works")
        return numpy.ones((len(texts), 64), numpy.float32)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint and the packages of a peer, found before installed ones."""
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "sentence_transformers.py").write_text(NOISY_PEER)
    (folder / "onnxruntime.py").write_text("raise ImportError('no onnxruntime in this test')")
    for package in ("sentence_transformers", "transformers", "torch"):
        (folder / f"{package}-1.0.dist-info").mkdir()
        (folder / f"{package}-1.0.dist-info" / "METADATA").write_text("Version: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.slow
def test_the_engines_are_compared_on_the_same_texts(
    tiny_bundle: Path,
    peer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphs = tmp_path / "graphs"
    monkeypatch.setattr(peers, "onnx_graphs", lambda *_: graphs)
    corpus.write(TEXTS, tmp_path / "c.txt")
    compare.main(
        [
            *("--bundle", str(tiny_bundle), "--checkpoint", str(peer), "--rounds", "2"),
            *("--corpus", str(tmp_path / "c.txt"), "--peer-python", sys.executable),
            *("--workload", "mixed", "one", "cold", "--plot", str(tmp_path / "plot.png")),
        ]
    )
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    mixed, one, cold = [line for line in lines if line.get("summary")]
    assert (tmp_path / "plot.png").stat().st_size > 1000

    rounds = [line for line in lines if "round" in line and line["workload"] == "mixed"]
    names = [line["engine"] for line in rounds]
    assert names[:3] == [ST, targets.ST_BEST, OURS]
    assert names[3:] == [targets.ST_BEST, OURS, ST]
    assert list(mixed["engines"]) == [ST, targets.ST_BEST, OURS]
    assert mixed["engines"][ST]["versions"]["torch"] == "1.0"
    assert mixed["engines"][ST]["setting"] is None
    assert mixed["engines"][targets.ST_BEST]["setting"] in contenders.BATCH_SIZES
    assert mixed["corpus"]["texts"] == len(TEXTS)
    alike = mixed["engines"][OURS]["agreement"]
    assert -1 < alike["cosine_min"] <= alike["cosine_mean"] < 0.9
    assert mixed["engines"][ST]["agreement"]["cosine_min"] == 1.0
    assert mixed["beside"][ST]["median"] > 0
    assert mixed["skipped"][targets.ORT] == "ImportError: no onnxruntime in this test"
    assert {t["peer"]: t["met"] for t in mixed["targets"]}[targets.ORT] is None

    assert one["engines"][OURS]["ms"]["median"] > 0
    assert list(cold["engines"]) == [OURS]
    assert cold["engines"][OURS]["seconds"]["median"] > 0
    assert "not run" in told.err
    assert "npu-embed is times as fast" in told.err
    assert "skipped, ImportError" in told.err


@pytest.mark.slow
def test_the_comparison_ends_where_npu_embed_fails(tmp_path: Path) -> None:
    workload = workloads.Workload("mixed", "run", TEXTS, LENGTHS, [ours(tmp_path / "none")], ST, 1)
    with pytest.raises(EngineFailed, match=r"npu-embed: .*no such folder"):
        workloads.Comparison(workload).measure()


def test_a_bundle_is_compared_only_with_its_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--bundle", "x"])
    assert "--bundle and --checkpoint go together" in capsys.readouterr().err


def test_gemma_takes_texts_as_long_as_documents(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    texts = [f"text {i}" for i in range(300)]
    found = contenders.Setup(bundle, {}, {}, texts, list(range(300)))
    workload = compare.gemma_workload(found, None, 1)
    assert list(workload.lengths) == list(range(59, 59 + 64))
    assert len(compare.gemma_workload(found, 3, 1).texts) == 3
    short = contenders.Setup(bundle, {}, {}, ["short"], [3])
    with pytest.raises(SystemExit, match="no text of 59 to 221 tokens"):
        compare.gemma_workload(short, None, 1)
    bundle.close()


def test_the_plot_needs_nothing_but_the_summaries(tmp_path: Path) -> None:
    about = corpus.describe(TEXTS, LENGTHS)
    engine = {"tokens_per_s": Spread(2.0, 1.0, 3.0)}
    found = {
        "workload": "mixed",
        "kind": "run",
        "rounds": 3,
        "corpus": about,
        "engines": {ST: engine, OURS: engine},
        "machine": {"cpu": "a CPU"},
    }
    plots.comparison([found], str(tmp_path / "one.png"))
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
