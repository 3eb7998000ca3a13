"""npu-embed profile: its table and timeline, its references, and that a comparison finds faults."""

from __future__ import annotations

import builtins
import math
from pathlib import Path

import numpy as np
import pytest
from commandline import run
from numpy.typing import NDArray
from rigs import Rig, numbers

from npu_embed import Embedder, events
from npu_embed.bf16 import round_f32
from npu_embed.bundle import Bundle
from npu_embed.errors import InputError
from npu_embed.exporters.pack import geglu_pair, pack_gemm
from npu_embed.profiling import TEXTS, compare, profile, reference, timeline
from npu_embed.profiling.compare import Comparison, expect
from npu_embed.profiling.operands import GemmFormula, MhaFormula, unpacked, widened
from npu_embed.profiling.table import kernel_lines, stage_lines

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
SOME = ("a", "two cats on a sofa", "a red car " * 6, "")


def quiet(done: int) -> None:
    """Shows no progress."""


def formula(K: int, N: int, epilogue: str = "none", *, bias: bool = False) -> GemmFormula:
    """A GEMM of the array's tiles."""
    n_out = N // 2 if epilogue == "geglu_pair" else N
    return GemmFormula(K, N, n_out, 64, 64, epilogue, bias)


# --- operands and references ----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("K", "N"), [(64, 64), (128, 64), (64, 192), (192, 128)])
def test_unpacked_weights_are_those_that_were_packed(K: int, N: int, bias: bool) -> None:
    b, added = round_f32(numbers(K, N)), numbers(1, N, seed=1)[0]
    packed = pack_gemm(b, added if bias else None)
    found, found_bias = unpacked(packed, formula(K, N, bias=bias))
    np.testing.assert_array_equal(found, b)
    np.testing.assert_array_equal(found_bias, added if bias else np.zeros(N))


def test_more_bytes_than_the_weights_need_are_left(tmp_path: Path) -> None:
    b = round_f32(numbers(64, 64))
    packed = np.concatenate([pack_gemm(b, None), np.full(100, 255, np.uint8)])
    np.testing.assert_array_equal(unpacked(packed, formula(64, 64))[0], b)


@pytest.mark.parametrize(("K", "N", "nbytes"), [(64, 64, 8190), (65, 64, 9999), (64, 60, 9999)])
def test_too_few_bytes_or_broken_tiles_are_refused(K: int, N: int, nbytes: int) -> None:
    with pytest.raises(InputError, match=f"do not hold {K} x {N} in whole tiles"):
        unpacked(np.zeros(nbytes, np.uint8), formula(K, N))


def gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("epilogue", "f"),
    [("none", float), ("gelu_erf", gelu), ("gelu_tanh", gelu_tanh), ("tanh", math.tanh)],
)
def test_a_reference_is_the_formula_of_each_number(epilogue: str, f: object) -> None:
    assert callable(f)
    a, b, bias = (
        m.astype(np.float64) for m in (numbers(3, 64), numbers(64, 64, 1), numbers(1, 64))
    )
    found = reference.gemm(a, b, bias[0], formula(64, 64, epilogue, bias=True))
    for i, j in [(0, 0), (2, 63), (1, 7)]:
        wanted = f(math.fsum([*(a[i] * b[:, j]), bias[0, j]]))
        assert found.values[i, j] == pytest.approx(wanted, rel=1e-12, abs=1e-13)


def test_a_geglu_reference_pairs_gate_and_up() -> None:
    a, gate, up = (
        m.astype(np.float64) for m in (numbers(3, 64), numbers(64, 64, 1), numbers(64, 64, 2))
    )
    b = geglu_pair(gate.astype(np.float32), up.astype(np.float32)).astype(np.float64)
    found = reference.gemm(a, b, np.zeros(128), formula(64, 128, "geglu_pair"))
    wanted = np.vectorize(gelu_tanh)(a @ gate) * (a @ up)
    np.testing.assert_allclose(found.values, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 0, 2])
def test_an_attention_reference_is_the_formula(window: int | None) -> None:
    heads, kv_heads, d, rows = 4, 2, 8, 7
    qkv = numbers(rows, (heads + 2 * kv_heads) * d + 5).astype(np.float64)
    found = reference.attention(qkv, MhaFormula(heads, kv_heads, d), window)
    for i, h in [(0, 0), (6, 3), (3, 2)]:
        q, g = qkv[i, h * d : (h + 1) * d], h // 2
        near = [j for j in range(rows) if window is None or abs(i - j) <= window]
        k0, v0 = (heads + g) * d, (heads + kv_heads + g) * d
        weights = [2.0 ** float(q @ qkv[j, k0 : k0 + d]) for j in near]
        for e in range(d):
            wanted = math.fsum(
                w * qkv[j, v0 + e] for w, j in zip(weights, near, strict=True)
            ) / math.fsum(weights)
            assert found.values[i, h * d + e] == pytest.approx(wanted, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("epilogue", ["none", "gelu_erf", "gelu_tanh", "geglu_pair", "tanh"])
def test_a_bound_holds_for_float32_in_another_order_and_fails_for_bf16_sums(epilogue: str) -> None:
    f = formula(256, 128, epilogue)
    a, b = round_f32(numbers(64, 256)), round_f32(numbers(256, 128, 1))
    expected = reference.gemm(a.astype(np.float64), b.astype(np.float64), np.zeros(128), f)

    def off(sums: F32) -> float:
        """How far rounded results of these sums are from the reference, in units of the bound."""
        x = sums.astype(np.float64)
        if epilogue == "geglu_pair":
            tiles = x.reshape(len(x), -1, 2, 32)
            y = (
                (reference._epilogue("gelu_tanh", tiles[:, :, 0], tiles[:, :, 0])[0])
                * tiles[:, :, 1]
            )
            y = y.reshape(len(x), -1)
        else:
            y = reference._epilogue(epilogue, x, x)[0]
        found = round_f32(y.astype(np.float32)).astype(np.float64)
        return float((np.abs(found - expected.values) / expected.bounds).max())

    backwards = np.zeros((64, 128), np.float32)
    coarse = np.zeros((64, 128), np.float32)
    for k in reversed(range(256)):
        product = a[:, k : k + 1] * b[k]
        backwards += product
        coarse = round_f32(coarse + product)
    assert off(backwards) <= 1
    assert off(coarse) > 1


# --- comparing ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "bundle", ["tiny_bundle", "narrow_bundle", "gemma3_bundle", "eg2_bundle", "published_bundle"]
)
def test_every_kernel_of_every_family_keeps_its_bound(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    with Embedder(request.getfixturevalue(bundle), "emulated") as embedder:
        found = compare(embedder, SOME[:3], quiet)
        assert sum(line.runs for line in found) == embedder.stats.runs > 0
    assert all(line.good and line.problem is None for line in found), found
    assert max(line.of_bound for line in found) > 0.5  # a bound that says something


@pytest.mark.parametrize(
    ("key", "byte"),
    [("qkv", 3), ("o", 4 * 64 + 3), ("up", 4 * 64 + 1), ("down", 4 * 64 + 9)],
)
def test_a_weight_the_device_has_otherwise_than_the_host_is_found(
    key: str, byte: int, tiny_bundle: Path
) -> None:
    rig = Rig(tiny_bundle)
    run = rig.gemm_run(key, 16)
    rig.inner.put(numbers(256, rig.inner.width))
    weights = rig.weights[key]
    expected = expect(rig.bundle, run)
    line = Comparison(key)
    rig.npu.submit([run]).wait()
    line.add(widened(run.c.bits(16)[:, : expected.values.shape[1]]), expected)
    assert line.good
    kept = int(weights.host[byte])
    weights.host[byte] = kept ^ 0x42
    weights.to_device(0, weights.size)
    weights.host[byte] = kept
    rig.npu.submit([run]).wait()
    line.add(widened(run.c.bits(16)[:, : expected.values.shape[1]]), expected)
    assert not line.good
    assert line.runs == 2
    rig.npu.close()


def test_a_window_that_was_not_patched_is_found(tiny_bundle: Path) -> None:
    rig = Rig(tiny_bundle)
    (run,) = rig.mha_runs(20)
    expected = expect(rig.bundle, run)
    rig.mha(20, window=3)
    line = Comparison("mha_32")
    line.add(widened(rig.o.bits(20)), expected)
    assert not line.good
    rig.npu.close()


def test_a_result_that_is_no_number_is_found() -> None:
    expected = reference.Expected(np.ones((1, 3)), np.ones((1, 3)))
    line = Comparison("k")
    line.add(np.array([[1.0, np.nan, 9.0]]), expected)
    assert not line.good
    line.add(np.array([[1.0, 1.0, 1.0]]), expected)
    assert not line.good


def test_the_worst_of_all_runs_is_kept() -> None:
    line = Comparison("k")
    for values in ([1.0, 1.5], [1.25, 1.0], [1.0, 1.0]):
        line.add(np.array([values]), reference.Expected(np.ones((1, 2)), np.full((1, 2), 0.75)))
    assert (line.runs, line.deviation, line.bound) == (3, 0.5, 0.75)
    assert line.good


def test_comparing_leaves_the_embedder_as_it_was(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, "emulated") as embedder:
        before = embedder.embed(list(SOME))
        lists = embedder.stats.runlists
        compare(embedder, SOME, quiet)
        assert embedder.stats.runlists == lists  # every run alone
        assert embedder.embed(list(SOME)).tobytes() == before.tobytes()
        assert embedder.stats.runlists > lists


def test_a_record_that_says_too_little_is_skipped_with_the_reason(tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    manifest.write_text(manifest.read_text().replace(" epilogue=none", "").replace(" heads=4", ""))
    done = run("profile", tiny_copy, "--compare", "--json")
    assert done.code == 0, done.err
    *lines, verdict = done.json_lines
    problems = {line["kernel"].split("_")[0]: line["problem"] for line in lines}
    assert problems["qkv"] == "gemm qkv: its record does not say epilogue= and bias="
    assert "does not say heads=" in problems["mha"]
    assert problems["up"] is None
    assert {line["status"] for line in lines} == {"PASS", "SKIP"}
    assert verdict == {"verdict": "PASS"}


# --- the command ----------------------------------------------------------------------------------


def test_a_comparison_passes_and_says_so(tiny_bundle: Path) -> None:
    done = run("profile", tiny_bundle, "--compare", "--texts", "-", stdin=b"a\ntwo cats\n")
    assert done.code == 0, done.err
    assert done.out.count("PASS") == 5
    assert "FAIL" not in done.out


def test_flipped_bits_fail_the_comparison(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "flip=0.01@1+")
    done = run("profile", tiny_bundle, "--compare", "--json", "--texts", "-", stdin=b"a b c\n" * 9)
    assert done.code == 1
    assert done.json_lines[-1] == {"verdict": "FAIL"}
    assert any(line["status"] == "FAIL" for line in done.json_lines[:-1])


def test_the_profile_as_json_adds_up(tiny_bundle: Path) -> None:
    done = run("profile", tiny_bundle, "--json")
    assert done.code == 0, done.err
    *lines, last = done.json_lines
    summary = last["profile"]
    assert summary["texts"] == len(TEXTS)
    kernels = [line for line in lines if "kernel" in line]
    stages = [line for line in lines if "stage" in line]
    assert {line["kernel"].split("_")[0] for line in kernels} == {"qkv", "o", "up, down", "mha"}
    assert all(line["listed"] == (line["kernel"] in ("up, down", "mha")) for line in kernels)
    assert all(0 < line["rows"] <= line["padded_rows"] for line in kernels)
    assert {"tokenize", "gemm", "mha", "host"} <= {line["stage"] for line in stages}
    assert sum(line["seconds"] for line in stages) <= summary["seconds"]
    assert sum(line["seconds"] for line in kernels) == pytest.approx(
        summary["device_seconds"], abs=1e-5
    )


def test_the_profile_as_a_table_names_kernels_and_stages(tiny_bundle: Path) -> None:
    done = run("profile", tiny_bundle, "--texts", "-", stdin=b"a\ntwo cats on a sofa\n")
    assert done.code == 0, done.err
    for word in ("up, down", "list", "qkv_r16", "run", "tokenize", "pooling", "share", "2 texts"):
        assert word in done.out


@pytest.mark.slow
def test_the_timeline_is_a_picture(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeline.png"
    assert run("profile", tiny_bundle, "--plot", file).code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["--texts", "-"], b"", 1, "profile: no texts, wanted at least one"),
        (["--texts", "-"], b"a\n\xff\n", 1, ":2: byte 1 of the line is 0xff, wanted UTF-8"),
        (["--plot", "t.xyz"], b"", 1, "give it an ending as .png"),
        (["--plot", "t.png", "--compare"], b"", 2, "a comparison has no timeline"),
        (["--texts", "/nonexistent"], b"", 2, "'/nonexistent': No such file or directory"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    arguments: list[str],
    stdin: bytes,
    code: int,
    says: str,
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("profile", tiny_bundle, *arguments, stdin=stdin)
    assert done.code == code
    assert says in " ".join(done.err.split())


def test_without_matplotlib_the_extra_is_named(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: object, **more: object) -> object:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    done = run("profile", tiny_bundle, "--plot", tmp_path / "t.png")
    assert done.code == 1
    assert "pip install 'npu-embed[plot]'" in done.err
    assert not done.out, "before the work"


# --- the profile ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_is_of_what_embed_does_a_pack_at_a_time(tiny_bundle: Path) -> None:
    done: list[int] = []
    with Embedder(tiny_bundle, "emulated", pack_rows=128) as embedder:
        found = profile(embedder, TEXTS, done.append)
        assert found.packs > 2
        runs = sum(line.runs for line in found.kernels)
        before = embedder.stats.runs
        embedder.embed(list(TEXTS))
        assert embedder.stats.runs - before == runs
        tokens = embedder.last_stats.tokens
    assert found.tokens == tokens
    assert done[-1] == len(TEXTS)
    assert events.listeners == ()


def test_lines_are_added_up_by_kernel_and_by_kind_of_list() -> None:
    def ended(begin: float, end: float, *kernels: str, listed: bool) -> events.RunsEnded:
        runs = tuple(events.RunSeen(kernel, 3, 16) for kernel in kernels)
        return events.RunsEnded("c", runs, begin, end, listed, False, False, False)

    seen: list[events.Event] = [
        ended(0, 1, "qkv_x3", listed=False),
        ended(1, 3, "mha_16", "mha_32", listed=True),
        ended(3, 4, "mha_64", "mha_64", "mha.full_64", listed=True),
        ended(4, 9, "mha_16", "mha_64", listed=True),
        ended(9, 10.5, "qkv_x3", listed=False),
        ended(0, 1, "mha_16", listed=False),
        events.StageEnded("host", 0, 2, waits=False),
        events.StageEnded("gemm", 2, 3, waits=True),
        events.StageEnded("host", 3, 4, waits=False),
    ]
    found = [(k.kernel, k.listed, k.submits, k.runs, k.seconds) for k in kernel_lines(seen)]
    assert found == [
        ("mha", True, 2, 4, 7.0),
        ("qkv_x3", False, 2, 2, 2.5),
        ("mha, mha.full", True, 1, 3, 1.0),
        ("mha_16", False, 1, 1, 1.0),
    ]
    assert kernel_lines(seen)[1].submit_us == 1.25e6
    assert [(s.stage, s.times, s.seconds, s.mean_us) for s in stage_lines(seen)] == [
        ("host", 2, 3.0, 1.5e6),
        ("gemm", 1, 1.0, 1e6),
    ]
    lanes = timeline.bars_by_lane(seen)
    assert lanes["host"] == [("host", 0, 2e3), ("host", 3e3, 1e3)]
    assert lanes["c"][:2] == [("qkv", 0, 1e3), ("mha", 1e3, 2e3)]


def test_the_default_texts_are_many_lengths(tiny_bundle: Path) -> None:
    assert len(set(TEXTS)) == len(TEXTS)
    bundle = Bundle.open(tiny_bundle)
    lengths = {len(bundle.open_tokenizer().encode_batch([text])[0].ids) for text in TEXTS}
    assert len(lengths) >= 8
    bundle.close()
