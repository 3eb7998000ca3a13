"""Npu on the emulated NPU: which contexts and kernels are loaded, dropped, patched, run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bf16 import round_f32
from npu_embed.bundle import Bundle
from npu_embed.device import Buffer, Session
from npu_embed.emulator import txn
from npu_embed.errors import BundleError, NoFreeContext, RunFailed
from npu_embed.kernels import Kernel
from npu_embed.npu import Npu
from npu_embed.rows import Rows

F32 = NDArray[np.float32]

HEADS, HEAD_DIM, HIDDEN = 4, 16, 64
LAYER = "encoder.layer.0"

# A bf16 result is off by half a unit in its last place, 2^-9 of the largest value; the
# probabilities inside attention are rounded likewise, and their errors add up to as much again.
BF16_TOLERANCE = 2.0**-9 * 1.01
MHA_TOLERANCE = 3 * BF16_TOLERANCE


class Rig:
    """The tiny bundle's kernels with buffers to run them on."""

    def __init__(self, path: Path) -> None:
        self.bundle = Bundle.open(path)
        self.session = Session.open("emulated")
        self.npu = Npu(self.session, self.bundle)
        self.x = Rows(self.session, 256, HIDDEN)
        self.qkv = Rows(self.session, 256, 3 * HIDDEN)
        self.o = Rows(self.session, 256, HIDDEN)
        self.weights = {key: self._packed(key) for key in ("qkv", "o")}
        self.x.put(numbers(256, HIDDEN))
        self.qkv.put(numbers(256, 3 * HIDDEN, seed=1))

    def _packed(self, key: str) -> Buffer:
        data = self.bundle.tensors.raw(f"{LAYER}.{key}.packed")
        buffer = self.session.buffer(data.nbytes)
        buffer.host[:] = data
        buffer.to_device(0, data.nbytes)
        return buffer

    def gemm(self, rows: int = 3, key: str = "qkv") -> F32:
        c = self.qkv if key == "qkv" else self.o
        self.npu.run_gemm(key, self.x, 0, self.weights[key], c, rows)
        return c.get(rows)

    def mha(self, rows: int = 3, window: int | None = None, row: int = 0) -> F32:
        self.npu.run_mha(self.qkv, self.o, rows, window, row)
        return self.o.get(rows, row=row)

    def kernels(self) -> set[str]:
        return {name for loaded in self.npu._loaded.values() for name in loaded.kernels}

    def streams_word(self, name: str, word: int) -> int:
        """A word of a loaded instruction stream, as the device sees it."""
        (kernel,) = (
            loaded.kernels[name] for loaded in self.npu._loaded.values() if name in loaded.kernels
        )
        device = kernel._insts_bo._window.memory.device
        return int(device[: len(device) // 4 * 4].view(np.uint32)[word])


def numbers(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


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


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda n: monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(n))


@pytest.fixture
def make() -> Iterator[Callable[[Path], Rig]]:
    """Makes rigs whose slots are free again after the test, however it ends."""
    with contextlib.ExitStack() as stack:

        def made(path: Path) -> Rig:
            rig = Rig(path)
            stack.callback(rig.npu.close)
            return rig

        yield made


@pytest.fixture
def rig(make: Callable[[Path], Rig], tiny_bundle: Path) -> Rig:
    return make(tiny_bundle)


# --- loading and dropping -----------------------------------------------------------------------


def test_nothing_is_loaded_until_it_runs(rig: Rig) -> None:
    assert rig.session.counters.loads == 0
    rig.gemm()
    assert rig.kernels() == {"qkv"}
    rig.gemm()
    assert rig.session.counters.loads == 1
    assert rig.session.counters.runs == 2


def test_kernels_of_one_context_share_it(rig: Rig) -> None:
    rig.gemm()
    rig.gemm(key="o")
    rig.gemm(rows=65)
    assert rig.kernels() == {"qkv", "o", "qkv_x2"}
    assert len(rig.npu._loaded) == 1


def test_in_one_slot_each_change_of_context_is_a_swap(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    first = rig.gemm()
    for swaps in (1, 3, 5):
        rig.mha()
        assert rig.session.counters.swaps == swaps
        np.testing.assert_array_equal(rig.gemm(), first)
        assert rig.session.counters.swaps == swaps + 1
        assert rig.kernels() == {"qkv"}
    assert rig.session.counters.switches == 6


def test_with_a_slot_for_each_nothing_is_dropped(rig: Rig) -> None:
    for _ in range(3):
        rig.gemm()
        rig.mha()
    assert rig.session.counters.swaps == 0
    assert rig.session.counters.switches == 5
    assert rig.session.counters.loads == 2


def test_one_xclbin_under_two_keys_is_one_context(
    make: Callable[[Path], Rig], tiny_copy: Path, slots: Callable[[int], None]
) -> None:
    manifest = tiny_copy / "manifest.txt"
    text = manifest.read_text()
    text = text.replace("gemm o ctx=gemm", "gemm o ctx=same")
    text = text.replace("\nxclbin mha", "\nxclbin same kernels/./gemm.xclbin MLIR_AIE\nxclbin mha")
    manifest.write_text(text)
    slots(1)
    rig = make(tiny_copy)
    rig.gemm()
    rig.gemm(key="o")
    rig.gemm()
    assert (rig.session.counters.swaps, rig.session.counters.switches) == (0, 0)


def _split_o_from_qkv(bundle: Path) -> None:
    """Give the o GEMM an xclbin file of its own."""
    shutil.copy(bundle / "kernels/gemm.xclbin", bundle / "kernels/other.xclbin")
    manifest = bundle / "manifest.txt"
    text = manifest.read_text()
    text = text.replace("gemm o ctx=gemm", "gemm o ctx=other")
    text = text.replace("\nxclbin mha", "\nxclbin other kernels/other.xclbin MLIR_AIE\nxclbin mha")
    manifest.write_text(text)


def test_two_files_are_two_contexts_though_they_be_equal(
    make: Callable[[Path], Rig], tiny_copy: Path, slots: Callable[[int], None]
) -> None:
    _split_o_from_qkv(tiny_copy)
    slots(1)
    rig = make(tiny_copy)
    rig.gemm()
    rig.gemm(key="o")
    assert (rig.session.counters.swaps, rig.session.counters.switches) == (1, 1)


def test_no_more_is_dropped_than_needed(
    make: Callable[[Path], Rig], tiny_copy: Path, slots: Callable[[int], None]
) -> None:
    _split_o_from_qkv(tiny_copy)
    slots(2)
    rig = make(tiny_copy)
    rig.gemm()
    rig.gemm(key="o")
    rig.mha()
    assert rig.session.counters.swaps == 1
    assert rig.kernels() == {"o", "mha_16"}, "the one used last must not go"


def _delete(bundle: Path) -> None:
    (bundle / "kernels/mha.xclbin").unlink()


def _no_xclbin(bundle: Path) -> None:
    (bundle / "kernels/mha.xclbin").write_bytes(b"xclbin2\0" + bytes(600))


def _machine_code(bundle: Path) -> None:
    from npu_embed.emulator import xclbin

    (bundle / "kernels/mha.xclbin").write_bytes(xclbin.build(pdi_image=bytes(64)))


def _too_wide(bundle: Path) -> None:
    from npu_embed.emulator import xclbin

    (bundle / "kernels/mha.xclbin").write_bytes(xclbin.build(pdi_image=bytes(64), column_width=9))


def _bad_stream(bundle: Path) -> None:
    (bundle / "kernels/mha_16.insts.bin").write_bytes(bytes(64))


def _no_stream(bundle: Path) -> None:
    (bundle / "kernels/mha_16.insts.bin").unlink()


def _other_kernels_stream(bundle: Path) -> None:
    shutil.copy(bundle / "kernels/qkv_x1.insts.bin", bundle / "kernels/mha_16.insts.bin")


def _other_generations_stream(bundle: Path) -> None:
    path = bundle / "kernels/mha_16.insts.bin"
    stream = txn.decode(path.read_bytes())
    path.write_bytes(txn.assemble(stream.ops, dev_gen=3, num_cols=4).encode())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_delete, r"kernels/mha.xclbin.: no such file"),
        (_no_xclbin, r"mha.xclbin: no xclbin"),
        (_too_wide, r"mha.xclbin: for 9 columns, this NPU has 8"),
        (_bad_stream, r"mha_16.insts.bin: no instruction stream"),
        (_no_stream, r"mha_16.insts.bin.: no such file"),
        (_other_kernels_stream, r"uses buffers \[0, 1, 2\], wanted \[0, 1, 2, 3\] of mha"),
        (_other_generations_stream, r"for device generation 3, wanted 4 of npu2"),
    ],
)
def test_a_bad_file_is_a_bundle_error_and_evicts_nothing(
    make: Callable[[Path], Rig],
    tiny_copy: Path,
    slots: Callable[[int], None],
    damage: Callable[[Path], None],
    words: str,
) -> None:
    slots(1)
    rig = make(tiny_copy)
    first = rig.gemm()
    damage(tiny_copy)
    before = rig.session.counters.copy()
    with pytest.raises(BundleError, match=words):
        rig.mha()
    assert rig.session.counters.since(before).swaps == 0
    np.testing.assert_array_equal(rig.gemm(), first)
    assert rig.session.counters.since(before).loads == 0


def test_machine_code_on_the_emulator_evicts_nothing_and_says_why(
    make: Callable[[Path], Rig], tiny_copy: Path, slots: Callable[[int], None]
) -> None:
    slots(1)
    rig = make(tiny_copy)
    rig.gemm()
    _machine_code(tiny_copy)
    with pytest.raises(Exception, match=r"holds code for real AIE cores"):
        rig.mha()
    assert rig.session.counters.swaps == 0
    assert rig.kernels() == {"qkv"}


HOLDER = """
import sys
from npu_embed.emulator import pyxrt
device = pyxrt.device(0)
xclbin = pyxrt.xclbin(sys.argv[1])
device.register_xclbin(xclbin)
kept = [pyxrt.hw_context(device, xclbin.get_uuid()) for _ in range(int(sys.argv[2]))]
print("held", flush=True)
sys.stdin.read()
"""


def _hold(bundle: Path, contexts: int) -> subprocess.Popen[str]:
    """Another process that holds hardware contexts until its stdin is closed."""
    root = Path(__file__).parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(bundle / "kernels/gemm.xclbin"), str(contexts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_slots_that_another_process_holds_are_named_and_used_once_it_ends(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
) -> None:
    slots(2)
    rig = make(tiny_bundle)
    with _hold(tiny_bundle, 2) as holder:
        wanted = (
            r"gemm.xclbin: no free hardware context after dropping our other 0 \(2 on this "
            rf"emulated NPU, shared by all processes; held by process {holder.pid}\)"
        )
        with pytest.raises(NoFreeContext, match=wanted):
            rig.gemm()
        holder.kill()
        holder.wait()
    rig.gemm()


def test_with_one_slot_left_by_others_ours_are_swapped_in_it(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
) -> None:
    slots(2)
    rig = make(tiny_bundle)
    with _hold(tiny_bundle, 1):
        rig.gemm()
        rig.mha()
        assert rig.session.counters.swaps == 1


def test_close_gives_the_slots_back_and_a_later_run_takes_them_again(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
) -> None:
    slots(1)
    one, other = make(tiny_bundle), make(tiny_bundle)
    first = one.gemm()
    with pytest.raises(NoFreeContext):
        other.gemm()
    one.npu.close()
    one.npu.close()
    np.testing.assert_array_equal(other.gemm(), first)
    other.npu.close()
    np.testing.assert_array_equal(one.gemm(), first)


def test_a_bundle_for_another_npu_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", "npu1")
    with pytest.raises(BundleError, match=r"kernels for npu2, this NPU is npu1 .*--target npu1"):
        Npu(Session.open("emulated"), Bundle.open(tiny_bundle))


# --- gemm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "kernel"), [(1, "qkv"), (64, "qkv"), (65, "qkv_x2"), (256, "qkv_x4")]
)
def test_a_gemm_runs_the_shortest_stream_that_holds_the_rows(
    rig: Rig, rows: int, kernel: str
) -> None:
    rig.gemm(rows=rows)
    assert rig.kernels() == {kernel}


def test_a_row_is_the_same_bits_in_every_chunk_count(rig: Rig) -> None:
    long = rig.gemm(rows=256)
    for rows in (1, 64, 65, 130):
        np.testing.assert_array_equal(rig.gemm(rows=rows), long[:rows])


def test_a_gemm_leaves_the_rows_past_its_chunks(rig: Rig) -> None:
    rig.qkv.put(np.ones((256, 3 * HIDDEN), np.float32))
    rig.gemm(rows=3)
    assert (rig.qkv.get(192, row=64) == 1).all()


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
    ("rows", "kernel"), [(1, "mha_16"), (16, "mha_16"), (17, "mha_32"), (65, "mha_128")]
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


def test_words_are_patched_only_when_they_differ(rig: Rig) -> None:
    def patches() -> int:
        before = rig.session.counters.patches
        rig.mha(rows, window, row)
        return rig.session.counters.patches - before

    for rows, window, row, wanted in (
        (3, None, 0, 1),
        (3, None, 0, 0),
        (3, None, 7, 0),
        (4, None, 0, 1),
        (4, 2, 0, 1),
        (4, 2, 0, 0),
        (4, None, 0, 1),
        (20, None, 0, 1),  # another bucket has words of its own
        (4, None, 0, 0),
    ):
        assert patches() == wanted, (rows, window, row)


def test_every_word_of_the_record_is_patched(rig: Rig) -> None:
    rig.mha(5, window=3)
    spec = rig.bundle.specs.mhas[0]
    assert {rig.streams_word("mha_16", w) for w in spec.kv_words} == {5}
    assert {rig.streams_word("mha_16", w) for w in spec.win_words} == {3}
    rig.mha(5)
    assert {rig.streams_word("mha_16", w) for w in spec.win_words} == {0xFFFFFFFF}


def test_patched_words_are_forgotten_with_the_kernel(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
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
    wanted = rig.mha(5)
    real = Kernel.patch

    def interrupted(self: Kernel, words: Mapping[int, int]) -> None:
        if done:
            real(self, words)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "patch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.mha(3)
    np.testing.assert_array_equal(rig.mha(5), wanted)


@pytest.mark.parametrize("window", [-1, 1 << 32])
def test_a_window_that_is_no_word_is_refused(rig: Rig, window: int) -> None:
    with pytest.raises(ValueError, match=r"mha_16: word"):
        rig.mha(3, window)
    rig.mha(3)


def test_a_failed_run_is_an_error_and_the_next_is_right(rig: Rig) -> None:
    wanted = rig.gemm()
    too_short = rig.session.buffer(4096)
    with pytest.raises(RunFailed, match=r"qkv: the run ended in ERROR"):
        rig.npu.run_gemm("qkv", rig.x, 0, too_short, rig.qkv, 3)
    np.testing.assert_array_equal(rig.gemm(), wanted)


def test_an_error_that_somebody_keeps_does_not_keep_the_slot(
    make: Callable[[Path], Rig], tiny_bundle: Path, slots: Callable[[int], None]
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    with pytest.raises(RunFailed) as kept:
        rig.npu.run_gemm("qkv", rig.x, 0, rig.session.buffer(4096), rig.qkv, 3)
    rig.npu.close()
    make(tiny_bundle).gemm()
    assert kept.value.__traceback__ is not None
