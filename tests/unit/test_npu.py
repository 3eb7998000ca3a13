"""Npu on the emulated NPU: which streams run, what is patched, and runs submitted together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs import HEAD_DIM, HEADS, HIDDEN, MakeRig, Rig, Slots, numbers

from npu_embed.bf16 import round_f32
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import BundleError, RunFailed
from npu_embed.kernels import Kernel
from npu_embed.npu import Npu

F32 = NDArray[np.float32]

# A bf16 result is off by half a unit in its last place, 2^-9 of the largest value; the
# probabilities inside attention are rounded likewise, and their errors add up to as much again.
BF16_TOLERANCE = 2.0**-9 * 1.01
MHA_TOLERANCE = 3 * BF16_TOLERANCE


def attention(qkv: F32, window: int | None = None) -> NDArray[np.float64]:
    """softmax2(Q K^T) V by head, in float64 on the bf16 operands."""
    n = len(qkv)
    q, k, v = (
        part.reshape(n, HEADS, HEAD_DIM)
        for part in np.split(round_f32(qkv).astype(np.float64), 3, axis=1)
    )
    scores = np.einsum("ihd,jhd->hij", q, k)
    if window is not None:
        i, j = np.ogrid[:n, :n]
        scores[:, np.abs(i - j) > window] = -np.inf
    p = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("hij,jhd->ihd", p, v).reshape(n, HIDDEN)
    return out


def check(found: F32, wanted: NDArray[np.float64], tolerance: float) -> None:
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def test_a_bundle_for_another_npu_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", "npu1")
    wanted = (
        r"kernels for npu2, this NPU is npu1 \(.*\); set NPU_EMBED_EMU_PROFILE=npu2 to emulate the "
        r"NPU it is for, or export its checkpoint folder with `npu-embed export CHECKPOINT OUT "
        r"--target npu1`"
    )
    with pytest.raises(BundleError, match=wanted):
        Npu(Session.open("emulated"), Bundle.open(tiny_bundle))


# --- gemm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [
        (1, "qkv_r16"),
        (48, "qkv_r48"),
        (64, "qkv"),
        (65, "qkv_r96"),
        (97, "qkv_x2"),
        (256, "qkv_x4"),
    ],
)
def test_a_gemm_runs_the_shortest_stream_that_holds_the_rows(
    rig: Rig, rows: int, kernel: str
) -> None:
    rig.gemm(rows=rows)
    assert rig.kernels() == {kernel}


def test_a_row_is_the_same_bits_in_every_stream(rig: Rig) -> None:
    long = rig.gemm(rows=256)
    for rows in (1, 17, 33, 64, 65, 128, 130):
        np.testing.assert_array_equal(rig.gemm(rows=rows), long[:rows])


@pytest.mark.parametrize(("rows", "computed"), [(3, 16), (40, 48), (64, 64), (70, 96), (100, 128)])
def test_a_gemm_leaves_the_rows_past_its_streams(rig: Rig, rows: int, computed: int) -> None:
    rig.qkv.put(np.ones((256, 3 * HIDDEN), np.float32))
    rig.gemm(rows=rows)
    left = rig.qkv.get(256) == 1
    assert left[computed:].all()
    assert not left[:computed].all(axis=1).any()


@pytest.mark.parametrize("rows", [0, -1, 2049])
def test_a_gemm_of_no_rows_or_too_many_is_refused(rig: Rig, rows: int) -> None:
    with pytest.raises(ValueError, match=rf"gemm qkv: {rows} rows, wanted 1 to 2048"):
        rig.gemm(rows=rows)


def test_a_gemm_that_leaves_a_buffer_is_refused_before_it_runs(rig: Rig) -> None:
    with pytest.raises(ValueError, match=r"leaves it"):
        rig.npu.run_gemm("qkv", rig.x, 0, rig.weights["qkv"], rig.qkv, 2048)
    assert rig.session.counters.runs == 0


# --- mha ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "kernel"), [(1, "mha_16"), (16, "mha_16"), (17, "mha_32"), (65, "mha_80")]
)
def test_attention_runs_in_the_shortest_bucket(rig: Rig, rows: int, kernel: str) -> None:
    rig.mha(rows)
    assert rig.kernels() == {kernel}


@pytest.mark.parametrize("row", [0, 1, 37])
@pytest.mark.parametrize("window", [None, 0, 2, 100])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_attention_is_the_formula(rig: Rig, rows: int, window: int | None, row: int) -> None:
    found = rig.mha(rows, window, row)
    qkv = numbers(256, 3 * HIDDEN, seed=1)[row : row + rows]
    check(found, attention(qkv, window), MHA_TOLERANCE)


def test_attention_reads_no_row_before_or_after_its_text(rig: Rig) -> None:
    wanted = rig.mha(5, row=20)
    qkv = np.full((256, 3 * HIDDEN), np.nan, np.float32)
    qkv[20:25] = numbers(256, 3 * HIDDEN, seed=1)[20:25]
    rig.qkv.put(qkv)
    np.testing.assert_array_equal(rig.mha(5, row=20), wanted)


def test_texts_in_ascending_order_keep_their_rows(rig: Rig) -> None:
    alone = [rig.mha(5, row=row) for row in (0, 5, 10)]
    for row in (0, 5, 10):  # each bucket of 16 rows overwrites what follows
        rig.npu.run_mha(rig.qkv, rig.o, 5, row=row)
    np.testing.assert_array_equal(rig.o.get(15), np.concatenate(alone))


@pytest.mark.parametrize("rows", [0, -1, 129])
def test_attention_of_no_rows_or_too_many_is_refused(rig: Rig, rows: int) -> None:
    with pytest.raises(ValueError, match=rf"mha: {rows} rows, wanted 1 to 128"):
        rig.mha(rows)


@pytest.mark.parametrize("row", [-1, 255, 256])
def test_a_bucket_that_leaves_a_buffer_is_refused_before_it_runs(rig: Rig, row: int) -> None:
    with pytest.raises(ValueError, match=r"leaves it"):
        rig.npu.run_mha(rig.qkv, rig.o, 3, row=row)
    assert rig.session.counters.runs == 0


# --- words --------------------------------------------------------------------------------------


def test_equal_words_are_patched_once(rig: Rig) -> None:
    def patches() -> int:
        before = rig.session.counters.patches
        rig.mha(rows, window, row)
        return rig.session.counters.patches - before

    for rows, window, row, wanted in (
        (3, None, 0, 1),
        (3, None, 0, 0),
        (3, None, 7, 0),
        (4, None, 0, 1),
        (3, None, 0, 0),
        (4, 2, 0, 1),
        (4, None, 0, 0),
        (4, 2, 0, 0),
        (20, None, 0, 1),  # another bucket
        (4, None, 0, 0),
    ):
        assert patches() == wanted, (rows, window, row)
    assert rig.session.counters.loads == rig.session.counters.patches == 4


def words_on_the_device(rig: Rig, rows: int, window: int, words: tuple[int, ...]) -> set[int]:
    """The words of a copy of the 16-row bucket's stream, as the device sees them."""
    ((_, loaded),) = rig.npu._contexts
    kernel: Anything = loaded._copies["mha_16", (rows, window)]
    device = kernel._insts_bo._window.memory.device
    return {int(device[: len(device) // 4 * 4].view(np.uint32)[word]) for word in words}


def test_every_word_of_the_record_is_patched(rig: Rig) -> None:
    spec = rig.bundle.specs.mhas[0]
    rig.mha(5, window=3)
    rig.mha(5)
    for window in (3, 0xFFFFFFFF):
        assert words_on_the_device(rig, 5, window, spec.kv_words) == {5}
        assert words_on_the_device(rig, 5, window, spec.win_words) == {window}


def test_patched_words_are_forgotten_with_the_kernel(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    first = rig.mha(5, window=1)
    rig.gemm(key="o")  # drops the mha context
    rig.qkv.put(numbers(256, 3 * HIDDEN, seed=1))
    patches = rig.session.counters.patches
    np.testing.assert_array_equal(rig.mha(5, window=1), first)
    assert rig.session.counters.patches == patches + 1


@pytest.mark.parametrize("done", [False, True])
def test_words_are_patched_anew_after_a_patch_that_was_interrupted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    wanted = rig.mha(3), rig.mha(5)
    rig.npu.unload_all()
    rig.mha(5)
    real = Kernel.patch

    def interrupted(self: Kernel, words: Mapping[int, int]) -> None:
        if done:
            real(self, words)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "patch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.mha(3)
    for found, right in zip((rig.mha(3), rig.mha(5)), wanted, strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("window", [-1, 1 << 32])
def test_a_window_that_is_no_word_is_refused(rig: Rig, window: int) -> None:
    with pytest.raises(ValueError, match=r"mha_16: word"):
        rig.mha(3, window)
    rig.mha(3)


def test_a_failed_run_is_an_error_and_the_next_is_right(rig: Rig) -> None:
    wanted = rig.gemm()
    too_short = rig.session.buffer(4096)
    with pytest.raises(RunFailed, match=r"qkv_r16: the run ended in ERROR"):
        rig.npu.run_gemm("qkv", rig.x, 0, too_short, rig.qkv, 3)
    np.testing.assert_array_equal(rig.gemm(), wanted)


def test_an_error_that_somebody_keeps_does_not_keep_the_slot(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    with pytest.raises(RunFailed) as kept:
        rig.npu.run_gemm("qkv", rig.x, 0, rig.session.buffer(4096), rig.qkv, 3)
    rig.npu.close()
    make(tiny_bundle).gemm()
    assert kept.value.__traceback__ is not None
