"""The swap benchmark: its counts, its cost model against published times, and that it runs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import cost_model  # noqa: E402
import recorder  # noqa: E402
import reference_runtime  # noqa: E402
import report  # noqa: E402
import swap_points  # noqa: E402
import swap_tables  # noqa: E402
import swaps  # noqa: E402
from cost_model import Cost, Gemm, Mha, Shape, Work  # noqa: E402
from recorder import Order, emulate  # noqa: E402
from variants import one_context_a_gemm  # noqa: E402

from npu_embed import Embedder  # noqa: E402
from npu_embed.bundle import Bundle  # noqa: E402
from npu_embed.manifest import verify_sha256  # noqa: E402

# How near the model must come to every published time of the reference runtime.
MODEL_TOLERANCE = 0.25
FITTED = ("MHA_FLOP_PER_MS", "HOST_NS_PER_ELEM", "HOST_ATTENTION_FLOP_PER_MS")
FIGURES = {figure.name: figure for figure in reference_runtime.figures()}
TEXTS = swaps.sentences(6)
LAYERS = 3  # of the tiny BERT; with two contexts a layer switches twice


# -- the cost model ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_the_model_reproduces_the_reference_runtimes_published_times(name: str) -> None:
    assert abs(FIGURES[name].deviation) < MODEL_TOLERANCE


def test_every_figure_says_which_constant_was_fitted_to_it() -> None:
    fitted = {name: figure.fitted for name, figure in FIGURES.items()}
    assert fitted["short text"] is None
    assert fitted["image, on the NPU"] is None
    assert sorted(f for f in fitted.values() if f) == sorted(FITTED)


def test_a_short_texts_time_hardly_depends_on_what_was_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Cost.of(reference_runtime.text(16)).total
    for name in FITTED:
        monkeypatch.setattr(cost_model, name, 1.5 * getattr(cost_model, name))
    assert Cost.of(reference_runtime.text(16)).total == pytest.approx(before, rel=0.05)


def test_the_reference_runs_what_its_source_says() -> None:
    text, image = reference_runtime.text(16), reference_runtime.image()
    assert sum(text.runs.values()) == text.submissions == 249
    assert sum(image.runs.values()) == image.submissions == 379
    assert (text.switches, image.switches) == (0, 32)


@pytest.mark.parametrize(("tokens", "window"), [(5, 8), (9, 3), (40, 3), (7, 3)])
def test_visible_pairs_are_counted_as_the_mask_has_them(
    tokens: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_runtime, "WINDOW", window)
    at = np.arange(tokens)
    near = np.abs(at[:, None] - at[None]) <= window
    wanted = near.sum() if tokens > window + 1 else tokens**2
    assert reference_runtime.visible_pairs(tokens) == wanted


def test_the_constants_give_back_the_measurements_they_come_from() -> None:
    one, many = (Cost.of(Work({Gemm(1, 0, 0, 0): n}, submissions=1)) for n in (1, 64))
    assert one.submit == pytest.approx(0.1698)
    assert many.submit / 64 == pytest.approx(0.0363)
    # Measured with weights of one part; the reference's have two.
    gemm = Gemm(1024, 1536, 6144, 6144).ms / cost_model.WEIGHT_PARTS
    assert gemm + cost_model.GEMM_FLOOR_MS == pytest.approx(1.143)


def test_a_gemm_costs_whole_blocks_and_a_short_one_what_its_weights_take_to_move() -> None:
    assert Gemm(1, 512, 512, 512).ms == Gemm(256, 512, 512, 512).ms < Gemm(257, 512, 512, 512).ms
    thin = Gemm(1, 4096, 4096, 4096)
    assert thin.ms >= cost_model.WEIGHT_BYTES * 4096 * 4096 / cost_model.GEMM_BYTES_PER_MS


def test_a_total_is_the_sum_of_its_parts() -> None:
    runs: dict[Shape, int] = {Gemm(64, 512, 512, 512): 3, Mha(64, 12, 32): 2}
    cost = Cost.of(Work(runs, 4, 5, 6, host_elems=7_000_000, host_attention_flop=8_000_000))
    assert cost.create == 6 * cost_model.CREATE_MS
    assert cost.switch == 5 * cost_model.SWITCH_MS
    parts = cost.each(1)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, abs=1e-3)
    assert all(ms > 0 for ms in parts.values())
    assert cost.npu == pytest.approx(total - cost.host, abs=1e-3)
    assert cost.each(2)["total"] == pytest.approx(total / 2, abs=1e-3)


# -- bundles with more contexts ---------------------------------------------------------------


@pytest.fixture(scope="module")
def split_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_context_a_gemm(tiny_bundle, tmp_path_factory.mktemp("split") / "bundle")


def test_each_gemm_gets_a_context_and_the_source_stays_as_it_was(
    tiny_copy: Path, tmp_path: Path
) -> None:
    def hashes() -> dict[str, str]:
        files = sorted(p for p in tiny_copy.rglob("*") if p.is_file())
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    before = hashes()
    bundle = Bundle.open(one_context_a_gemm(tiny_copy, tmp_path / "out"))
    assert hashes() == before
    used = {g.ctx for g in bundle.specs.gemms.values()} | {m.ctx for m in bundle.specs.all_mhas}
    assert used == set(bundle.manifest.xclbins)
    assert len({x.file for x in bundle.manifest.xclbins.values()}) == len(used) == 5
    assert all(found.ok for found in verify_sha256(bundle.path, bundle.manifest))
    bundle.close()


def test_a_split_bundle_gives_the_same_vectors(tiny_bundle: Path, split_bundle: Path) -> None:
    found = []
    for path in (tiny_bundle, split_bundle):
        with Embedder(path, "emulated") as e:
            found.append(e.embed(TEXTS))
    np.testing.assert_array_equal(found[0], found[1])


# -- recording --------------------------------------------------------------------------------


def test_a_recording_counts_what_the_reference_order_does(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    found = emulate(tiny_bundle, TEXTS, Order(None), slots=1, policy="all", folder=tmp_path / "e")
    n = len(TEXTS)
    assert found.counters.swaps == 2 * LAYERS * n
    assert found.counters.runs == found.submissions == 5 * LAYERS * n
    assert (found.gemm_runs, found.counters.runlists) == (4 * LAYERS * n, 0)
    assert (found.texts, found.packs, found.contexts) == (n, n, 2)
    assert found.work(7).creations == 7


def test_a_recording_of_a_pack_counts_lists(tiny_bundle: Path, tmp_path: Path) -> None:
    found = emulate(tiny_bundle, TEXTS, Order(512), slots=2, policy="lru", folder=tmp_path / "e")
    assert found.packs == 1
    assert found.counters.swaps == 0
    assert found.gemm_runs == 4 * LAYERS
    assert found.counters.runs == (4 + len(TEXTS)) * LAYERS
    # A layer: qkv; the attention of all texts; o; up and down.
    assert found.submissions == 4 * LAYERS
    assert found.counters.runlists == 2 * LAYERS


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_EVICTION", "lru")
    with recorder.variables(NPU_EMBED_EVICTION="all", NPU_EMBED_EMU_SLOTS="3"):
        assert os.environ["NPU_EMBED_EVICTION"] == "all"
    assert os.environ["NPU_EMBED_EVICTION"] == "lru"
    assert "NPU_EMBED_EMU_SLOTS" not in os.environ


def test_made_up_texts_are_always_the_same_and_of_many_lengths() -> None:
    texts = swaps.sentences(64)
    assert texts == swaps.sentences(128)[:64]
    lengths = {len(text.split()) for text in texts}
    assert (min(lengths), max(lengths), len(lengths)) == (4, 51, 48)


# -- the benchmark ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tiny_bundle: Path) -> list[dict[str, Any]]:
    """The JSON lines of one run."""
    lines: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "line", lambda record: lines.append(json.loads(json.dumps(record))))
        swaps.main(
            [
                *("--bundle", str(tiny_bundle), "--texts", "3", "--json"),
                *("--slots", "1", "2", "3", "5", "16", "--pack-rows", "128", "256"),
            ]
        )
    return lines


def points_of(told: list[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    """The points of a run with these values."""
    return [p for p in told if "slots" in p and all(p[k] == v for k, v in wanted.items())]


@pytest.mark.slow
def test_every_combination_has_a_line(told: list[dict[str, Any]]) -> None:
    axes = ("contexts", "pack_rows", "slots", "policy")
    found = [tuple(p[axis] for axis in axes) for p in points_of(told)]
    assert len(set(found)) == len(found) == 2 * 3 * 5 * 3
    assert {p["how"] for p in points_of(told)} == {"emulated", "replayed"}
    assert all(p["ms"] == "modelled, not measured" for p in told if "summary" not in p)


@pytest.mark.slow
def test_some_of_every_kind_are_emulated(told: list[dict[str, Any]]) -> None:
    found = points_of(told, how="emulated", contexts=5, pack_rows=None)
    asked = {(p["slots"], p["policy"]) for p in found}
    three = {(3, policy) for policy in ("all", "lru", "next-use")}
    assert asked == {(1, "next-use"), *three, (5, "next-use"), (16, "next-use")}


@pytest.mark.slow
def test_next_use_is_the_floor_and_others_are_not_below(told: list[dict[str, Any]]) -> None:
    for p in points_of(told):
        assert p["swaps"] >= p["floor"]
        assert p["swaps"] == p["floor"] or p["policy"] != "next-use"
    worse = points_of(told, contexts=5, slots=3, policy="lru")
    assert all(p["swaps"] > p["floor"] > 0 for p in worse)


@pytest.mark.slow
def test_a_pack_divides_swaps_switches_and_gemm_runs_by_its_texts(
    told: list[dict[str, Any]],
) -> None:
    (one,) = points_of(told, contexts=2, pack_rows=None, slots=1, policy="all")
    (packed,) = points_of(told, contexts=2, pack_rows=256, slots=1, policy="next-use")
    assert one["per_text"]["swaps"] == 2 * LAYERS
    for name in ("swaps", "switches", "gemm_runs"):
        assert one[name] == 3 * packed[name]
    assert one["modelled_ms_per_text"]["total"] > 2 * packed["modelled_ms_per_text"]["total"]
    assert all(p["swaps"] == 0 for p in points_of(told, contexts=2) if p["slots"] > 1)


@pytest.mark.slow
def test_the_summary_says_what_was_compared_and_checked(told: list[dict[str, Any]]) -> None:
    two, five = told[-1]["compared"]
    assert (two["contexts"], five["contexts"]) == (2, 5)
    assert two["swaps_per_text_by_slots"]["one"]["1"] == 2 * LAYERS
    assert two["times_fewer_gemm_runs"] == two["times_fewer_switches"] == 3
    assert told[-1]["next_use_equals_floor"] == 2 * 3 * 5
    assert told[-1]["emulated"] == len(points_of(told, how="emulated"))


@pytest.mark.slow
def test_the_reproductions_come_first(told: list[dict[str, Any]]) -> None:
    assert [p["reproduction"] for p in told[: len(FIGURES)]] == list(FIGURES)


@pytest.fixture
def some_points(tiny_bundle: Path) -> list[swap_points.Point]:
    """Of both orders, with one slot and with enough."""
    orders = (Order(None), Order(256))
    measured = (
        swap_points.measure(tiny_bundle, TEXTS[:2], order, [1, 16], really=False)
        for order in orders
    )
    return [point for of_order in measured for point in of_order]


def test_the_tables_say_that_milliseconds_are_modelled(
    some_points: list[swap_points.Point], capsys: pytest.CaptureFixture[str]
) -> None:
    figures = list(FIGURES.values())
    swap_tables.show(some_points, figures, markdown=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("modelled, not measured") == 2
    assert "| one at a time |     1 |" in told.err
    assert "HOST_NS_PER_ELEM" in told.err


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra, [bench]"
)
def test_a_plot_is_drawn(some_points: list[swap_points.Point], tmp_path: Path) -> None:
    import plots

    plots.swaps(some_points, str(tmp_path / "swaps.png"))
    assert (tmp_path / "swaps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("swaps", "13 swaps on the emulated NPU, 12 replayed"),
        ("sequence", "another order of contexts"),
        ("switches", "another order of contexts"),
        ("sha256", "other vectors"),
    ],
)
def test_a_run_that_does_not_do_what_was_recorded_ends_the_benchmark(
    some_points: list[swap_points.Point], change: str, words: str
) -> None:
    base = some_points[0].recording
    counters = replace(base.counters, swaps=12)
    swap_points.check_same("here", 12, replace(base, counters=counters), base)
    changed = {
        "swaps": replace(base, counters=replace(counters, swaps=13)),
        "switches": replace(base, counters=replace(counters, switches=1)),
        "sequence": replace(base, counters=counters, sequence=base.sequence[1:]),
        "sha256": replace(base, counters=counters, sha256="0"),
    }
    with pytest.raises(SystemExit, match=f"here: .*{words}"):
        swap_points.check_same("here", 12, changed[change], base)


def test_a_policy_above_the_floor_ends_the_benchmark(some_points: list[swap_points.Point]) -> None:
    assert swap_points.check_floor(some_points) == 4
    found = [replace(p, floor=p.floor - 1) for p in some_points]
    with pytest.raises(SystemExit, match="next-use has 12 swaps, wanted 11"):
        swap_points.check_floor(found)


def test_a_bundle_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="none"):
        swaps.main(["--bundle", str(tmp_path / "none")])


@pytest.mark.slow
def test_minilm_swaps_a_sixty_fourth_of_what_one_text_at_a_time_does(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    texts = swaps.sentences(64)

    def found(texts: list[str], order: Order, slots: int) -> recorder.Recording:
        folder = tmp_path / "e"
        return emulate(minilm_bundle, texts, order, slots=slots, policy="next-use", folder=folder)

    one, packed = found(texts[:4], Order(None), 1), found(texts, Order(2048), 1)
    assert packed.packs == 1
    assert one.counters.swaps / 4 == 12
    assert packed.counters.swaps / 64 <= 0.19
    assert found(texts, Order(2048), 2).counters.swaps == 0
    assert one.gemm_runs / 4 >= 8 * packed.gemm_runs / 64
