"""The benchmarks' host time and its floor: whose second is whose, and the bytes of a token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npu_embed.bundle import Bundle

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import host_floor  # noqa: E402
import host_traffic  # noqa: E402
from host_floor import CopyRate  # noqa: E402
from report import Spread  # noqa: E402

ENGINE = {"gemm": 5.0, "mha": 3.0, "host": 1.0, "tokenize": 0.5}
RATE = CopyRate(1 << 20, Spread(2e9, 1e9, 3e9))


def test_the_host_has_what_the_array_leaves() -> None:
    parts = host_floor.split(10.0, ENGINE, {"gemm": 4.5, "mha": 2.0})
    # 1.5 of dispatch, 1 of host, 0.5 of tokenize and 0.5 that no stage has.
    assert host_floor.host_seconds(parts) == pytest.approx(3.5)


def test_where_the_array_works_beside_the_caller_the_wait_is_the_arrays() -> None:
    parts = host_floor.split(10.0, ENGINE, {"gemm": 12.0, "mha": 4.0})
    assert parts["gemm"] == pytest.approx(6.0)
    assert parts["mha"] == pytest.approx(2.0)
    assert parts["dispatch"] == pytest.approx(0.0)
    assert sum(parts.values()) == pytest.approx(10.0)


def test_a_stage_of_a_later_engine_is_the_hosts() -> None:
    parts = host_floor.split(10.0, {**ENGINE, "new": 0.25}, {"gemm": 5.0, "mha": 3.0})
    assert list(parts)[-1] == "new"
    assert sum(parts.values()) == pytest.approx(10.0)
    assert host_floor.host_seconds(parts) == pytest.approx(2.0)


def test_on_hardware_whole_runs_are_the_devices() -> None:
    assert host_floor.host_seconds(host_floor.split(10.0, ENGINE, None)) == pytest.approx(2.0)


def test_an_idle_array_leaves_everything_to_the_host() -> None:
    assert host_floor.host_seconds(host_floor.split(2.0, {}, {})) == pytest.approx(2.0)


def test_bytes_between_two_runs_of_bert(tiny_bundle: Path) -> None:
    d, layers, texts, tokens = 64, 3, 2, 100
    bundle = Bundle.open(tiny_bundle)
    found = host_traffic.traffic(bundle, tokens, texts)
    bundle.close()
    # id, word and position rows in float32; x in float32 and A in bfloat16.
    embeddings = 4 + 4 * d + 4 * d + 4 * d + 2 * d
    # Six stretches of host work: C, x read, x written, A; behind the last there is no layer.
    residuals = 6 * (2 * d + 4 * d + 4 * d + 2 * d) - (4 * d + 2 * d)
    assert layers * 2 == 6
    assert found == {
        "embeddings": embeddings,
        "residuals": residuals,
        "vectors": 4 * d * texts / tokens,
    }


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["gemma3_bundle", "gemma3_host_bundle"])
def test_gemmas_heads_pass_the_host(fixture: str, request: pytest.FixtureRequest) -> None:
    bundle = Bundle.open(request.getfixturevalue(fixture))
    p = bundle.manifest
    heads, kv, size, layers = (
        p.param_int(name)
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_hidden_layers",
        )
    )
    found = host_traffic.traffic(bundle, 10, 1)
    bundle.close()
    assert found is not None
    if p.param_str("attention") == "npu":  # q and k are turned
        assert found["heads"] == layers * 2 * 2 * (heads + kv) * size
    else:  # q, k and v are read, the context is written
        assert found["heads"] == layers * 2 * (heads + 2 * kv + heads) * size
    d = p.param_int("hidden_size")
    assert found["residuals"] == 2 * layers * 12 * d - 6 * d


def test_embedding_gemma2_has_a_third_residual_a_layer(eg2_bundle: Path) -> None:
    bundle = Bundle.open(eg2_bundle)
    d, layers, width = (
        bundle.manifest.param_int(name)
        for name in ("hidden_size", "num_hidden_layers", "hidden_size_per_layer_input")
    )
    found = host_traffic.traffic(bundle, 10, 1)
    bundle.close()
    assert found is not None
    assert found["residuals"] == 3 * layers * 12 * d - 6 * d
    assert found["per_layer_inputs"] == layers * 3 * 2 * width


def test_a_product_in_two_slices_is_read_twice() -> None:
    assert host_traffic.between_runs(10, 2) - host_traffic.between_runs(10) == 20


def test_a_family_without_a_floor_has_none(published_bundle: Path) -> None:
    bundle = Bundle.open(published_bundle)
    assert host_traffic.traffic(bundle, 10, 1) is None
    bundle.close()


def test_the_summary_puts_the_host_beside_its_floor() -> None:
    rounds = [{"gemm": 8.0, "host": 1.0, "other": 1.0}, {"gemm": 1.0, "host": 3.0, "other": 1.0}]
    found = host_floor.summary(rounds, 1000, {"a": 300.0, "b": 100.0}, RATE)
    assert found["us_per_token"] == Spread(3000.0, 2000.0, 4000.0)
    assert found["share"] == Spread(0.5, 0.2, 0.8)
    assert found["stages_us_per_token"]["host"].median == 2000.0
    assert "gemm" not in found["stages_us_per_token"]
    assert found["floor"]["us_per_token"] == 0.2  # 400 bytes at 2e9 a second
    assert found["times_floor"] == Spread(15000.0, 10000.0, 20000.0)


def test_without_a_floor_the_summary_says_none() -> None:
    found = host_floor.summary([{"gemm": 1.0, "host": 1.0}], 10, None, RATE)
    assert found["floor"] is None
    assert "times_floor" not in found


def test_the_copied_buffer_is_larger_than_the_cache() -> None:
    rate = CopyRate.measure(cache_bytes=1 << 16, copies=3)
    assert rate.buffer_bytes == 4 << 16
    assert 0 < rate.bytes_per_s.low <= rate.bytes_per_s.median <= rate.bytes_per_s.high


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (("32K", "512K", "32768K"), 32 << 20),
        (("16M", "48K"), 16 << 20),
        (("1024",), 1024),
        (("", "odd"), host_floor.USUAL_CACHE_BYTES),
        ((), host_floor.USUAL_CACHE_BYTES),
    ],
)
def test_the_last_cache_is_the_largest(tmp_path: Path, sizes: tuple[str, ...], wanted: int) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert host_floor.last_cache_bytes(tmp_path) == wanted
