"""benchmarks/dispatch.py: its sums, its arithmetic by hand, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from npu_embed.bf16 import to_f32

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import dispatch  # noqa: E402
import dispatch_cases  # noqa: E402
from dispatch import Found, Sample  # noqa: E402
from dispatch_cases import Case, Kernels  # noqa: E402
from report import Spread  # noqa: E402

BF16_STEP = 2.0**-7  # results are rounded to 8 bits, probabilities before them


def case(runs: int = 10, target_us: float | None = 40.0) -> Case:
    return Case("a case", runs, lambda _: [], lambda _: None, target_us)


def samples(*whole_us: float) -> list[Sample]:
    return [Sample(us / 1e6, us / 2e6, us / 4e6, us / 10e6) for us in whole_us]


def test_the_cost_is_the_whole_less_the_arithmetic_a_run() -> None:
    found = Found.of(case(), [samples(100, 300, 200), samples(400, 400, 400)])
    assert found.whole == Spread(30.0, 20.0, 40.0)  # of round medians 200 and 400, ten runs each
    assert found.by_hand == Spread(3.0, 2.0, 4.0)
    assert found.submit.median == 15.0
    assert found.array.median == 7.5
    assert found.cost == Spread(27.0, 18.0, 36.0)


@pytest.mark.parametrize(("target", "verdict"), [(27.0, "met"), (26.9, "missed"), (None, "")])
def test_a_target_is_met_or_missed_by_the_median(target: float | None, verdict: str) -> None:
    rounds = [samples(200), samples(400)]
    assert Found.of(case(target_us=target), rounds).verdict == verdict


def test_a_packs_lengths_descend_and_another_pack_has_others() -> None:
    first = dispatch_cases.pack_lengths(0)
    assert first == sorted(first, reverse=True)
    assert len(first) == dispatch_cases.TEXTS
    assert dispatch_cases.SHORTEST <= min(first) < max(first) <= dispatch_cases.LONGEST
    assert first == dispatch_cases.pack_lengths(0) != dispatch_cases.pack_lengths(1)


def test_attention_by_hand_is_what_the_array_computes(tiny_bundle: Path) -> None:
    with Kernels(tiny_bundle) as kernels:
        runs = kernels.attention(dispatch_cases.pack_lengths(3))
        kernels.npu.submit(runs).wait()
        computed = kernels.buffers["attended"].get(sum(run.rows for run in runs))
        by_hand = dispatch_cases.AttentionByHand(kernels)(runs)
    rows = [to_f32(g).transpose(0, 2, 1, 3).reshape(-1, computed.shape[1]) for g in by_hand]
    assert np.abs(np.concatenate(rows) - computed).max() <= BF16_STEP * np.abs(computed).max()


def test_a_bundle_without_attention_heads_of_berts_kind_is_refused(eg2_bundle: Path) -> None:
    with pytest.raises(ValueError, match="a bundle of embedding_gemma2, wanted one of the bert"):
        Kernels(eg2_bundle)


def test_dispatch_prints_a_line_a_case(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch.main(["--bundle", str(tiny_bundle), "--rounds", "1", "--submits", "2"])
    told = capsys.readouterr()
    *found, last = [json.loads(line) for line in told.out.splitlines()]
    assert [f["case"] for f in found][::2] == ["GEMM", "MHA, in a list", "MHA, alone"]
    assert [f["target"] for f in found] == [60.0, None, 40.0, None, None]
    for f in found:
        assert f["whole"]["median"] > f["submit"]["median"] > 0
        assert f["array"]["median"] > 0
        assert f["cost"]["median"] == pytest.approx(
            f["whole"]["median"] - f["by_hand"]["median"], abs=0.02
        )
    assert last["machine"]["cpus"] >= 1
    assert "in a new list" in told.err


def test_dispatch_names_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        dispatch.main(["--bundle", str(tmp_path / "none")])
