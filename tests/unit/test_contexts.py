"""Contexts on the emulated NPU: made on first use, dropped for others, waited for in line."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rigs import GEMMS, MakeRig, Rig, Slots, another_process, held

from npu_embed import Embedder, contexts
from npu_embed.contexts import Contexts
from npu_embed.device import Context, Session
from npu_embed.emulator import txn, xclbin
from npu_embed.errors import BundleError, InputError, NoFreeContext
from npu_embed.eviction import POLICIES, count_swaps, fewest_swaps
from npu_embed.loaded import LoadedContext
from npu_embed.waiting import line


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that others hold are not waited for."""
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "0")


# --- loading and dropping -----------------------------------------------------------------------


def test_nothing_is_loaded_until_it_runs(rig: Rig) -> None:
    assert rig.session.counters.loads == 0
    rig.gemm()
    assert rig.kernels() == {"qkv_r16"}
    rig.gemm()
    assert rig.session.counters.loads == 1
    assert rig.session.counters.runs == 2


def test_kernels_of_one_context_share_it(rig: Rig) -> None:
    rig.gemm()
    rig.gemm(key="o")
    rig.gemm(rows=65)
    assert rig.kernels() == {"qkv_r16", "o_r16", "qkv_r96"}
    assert len(rig.npu.loaded()) == 1


def test_in_one_slot_each_change_of_context_is_a_swap(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    first = rig.gemm()
    for swaps in (1, 3, 5):
        rig.mha()
        assert rig.session.counters.swaps == swaps
        np.testing.assert_array_equal(rig.gemm(), first)
        assert rig.session.counters.swaps == swaps + 1
        assert rig.kernels() == {"qkv_r16"}
    assert rig.session.counters.switches == 6


def test_with_a_slot_for_each_nothing_is_dropped(rig: Rig) -> None:
    for _ in range(3):
        rig.gemm()
        rig.mha()
    assert rig.session.counters.swaps == 0
    assert rig.session.counters.switches == 5
    assert rig.session.counters.loads == 2


def test_one_xclbin_under_two_keys_is_one_context(
    make: MakeRig, tiny_copy: Path, slots: Slots
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


def test_two_files_are_two_contexts_though_they_be_equal(
    make: MakeRig, split_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(split_bundle)
    rig.gemm()
    rig.gemm(key="o")
    assert (rig.session.counters.swaps, rig.session.counters.switches) == (1, 1)


def test_no_more_is_dropped_than_needed(make: MakeRig, split_bundle: Path, slots: Slots) -> None:
    slots(2)
    rig = make(split_bundle)
    rig.gemm()
    rig.gemm(key="o")
    rig.mha()
    assert rig.session.counters.swaps == 1
    assert rig.kernels() == {"o_r16", "mha_16"}, "the one used last must not go"


def _delete(bundle: Path) -> None:
    (bundle / "kernels/mha.xclbin").unlink()


def _no_xclbin(bundle: Path) -> None:
    (bundle / "kernels/mha.xclbin").write_bytes(b"xclbin2\0" + bytes(600))


def _machine_code(bundle: Path) -> None:
    (bundle / "kernels/mha.xclbin").write_bytes(xclbin.build(pdi_image=bytes(64)))


def _too_wide(bundle: Path) -> None:
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
    make: MakeRig,
    tiny_copy: Path,
    slots: Slots,
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
    make: MakeRig, tiny_copy: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(tiny_copy)
    rig.gemm()
    _machine_code(tiny_copy)
    with pytest.raises(Exception, match=r"holds code for real AIE cores"):
        rig.mha()
    assert rig.session.counters.swaps == 0
    assert rig.kernels() == {"qkv_r16"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_wait")
def test_slots_that_another_process_holds_are_named_and_used_once_it_ends(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(2)
    rig = make(tiny_bundle)
    with held(tiny_bundle, 2) as holder:
        wanted = (
            r"gemm.xclbin: no free hardware context after dropping our other 0 and waiting 0 s "
            rf"\(2 on this emulated NPU, shared by all processes; held by process {holder.pid}\); "
            "close other NPU programs, let idle ones"  # no xrt-smi, which does not list them
        )
        with pytest.raises(NoFreeContext, match=wanted):
            rig.gemm()
        holder.kill()
        holder.wait()
    rig.gemm()


@pytest.mark.usefixtures("no_wait")
def test_slots_that_nobody_holds_any_more_are_not_held_by_process_none(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "context=ENOENT@1+")
    with pytest.raises(NoFreeContext, match=r"processes; none held now\); close") as found:
        make(tiny_bundle).gemm()
    assert "xrt-smi" not in str(found.value)


@pytest.mark.slow
def test_with_one_slot_left_by_others_ours_are_swapped_in_it(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(2)
    rig = make(tiny_bundle)
    with held(tiny_bundle, 1):
        rig.gemm()
        rig.mha()
        assert rig.session.counters.swaps == 1


@pytest.mark.usefixtures("no_wait")
def test_close_gives_the_slots_back_and_a_later_run_takes_them_again(
    make: MakeRig, tiny_bundle: Path, slots: Slots
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


# --- policies -----------------------------------------------------------------------------------

TEXTS = [f"{i} " + "cats " * (7 * i % 23) for i in range(9)]
ORDERS = {"one at a time": [[text] for text in TEXTS[:3]], "packed": [TEXTS]}


def swaps_and_places(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, policy: str, order: str
) -> tuple[int, list[str]]:
    """The swaps counted, and the contexts that were used, in order."""
    used: list[str] = []
    real = Contexts.use

    def use(self: Contexts, ctx: str) -> LoadedContext:
        used.append(ctx)
        return real(self, ctx)

    monkeypatch.setenv("NPU_EMBED_EVICTION", policy)
    with monkeypatch.context() as patch:
        patch.setattr(Contexts, "use", use)
        with Embedder(bundle, "emulated", pack_rows=128) as embedder:
            for texts in ORDERS[order]:
                embedder.embed(texts)
            assert embedder.stats.packs > len(ORDERS["packed"])  # several, some of them in step
            return embedder.stats.swaps, used


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_swaps_are_those_of_the_policy_on_the_recorded_sequence(
    split_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    slots: Slots,
    policy: str,
    count: int,
    order: str,
) -> None:
    slots(count)
    swaps, used = swaps_and_places(split_bundle, monkeypatch, policy, order)
    assert set(used) == {*GEMMS, "mha"}
    assert swaps == count_swaps(used, count, POLICIES[policy]())
    if policy == "next-use":
        assert swaps == fewest_swaps(used, count)


@pytest.mark.slow
def test_the_default_policy_is_better_than_the_others_where_there_is_a_choice(
    split_bundle: Path, monkeypatch: pytest.MonkeyPatch, slots: Slots
) -> None:
    slots(3)
    swaps = {
        policy: swaps_and_places(split_bundle, monkeypatch, policy, "packed")[0]
        for policy in POLICIES
    }
    assert swaps["next-use"] < swaps["lru"]
    assert swaps["next-use"] < swaps["all"]


def test_a_policy_given_goes_before_the_setting(
    make: MakeRig, split_bundle: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EVICTION", "lru")
    slots(2)
    rig = make(split_bundle, policy="all")
    for key in GEMMS[:3]:
        rig.gemm(key=key)
    assert rig.session.counters.swaps == 2
    assert rig.contexts() == {"up"}


def test_what_is_planned_is_dropped_last(make: MakeRig, split_bundle: Path, slots: Slots) -> None:
    slots(2)
    rig = make(split_bundle)
    rig.npu.plan(["qkv", "mha", "qkv", "o"])
    for key in ("qkv", "mha", "qkv", "o"):
        rig.use(key)
    assert rig.contexts() == {"qkv", "o"}, "mha is needed again after qkv"


# --- management ---------------------------------------------------------------------------------


def test_what_is_loaded_is_told_and_unloaded_by_name(rig: Rig) -> None:
    wanted = rig.gemm(), rig.mha(3), rig.mha(5)
    rig.gemm(rows=65)
    assert rig.npu.loaded() == {
        "kernels/gemm.xclbin": ["qkv_r16", "qkv_r96"],
        "kernels/mha.xclbin": ["mha_16"],
    }
    rig.npu.unload("qkv_r96")
    assert rig.npu.loaded()["kernels/gemm.xclbin"] == ["qkv_r16"]
    rig.npu.unload("mha_16")  # both copies, and with the last kernel its context
    assert rig.npu.loaded() == {"kernels/gemm.xclbin": ["qkv_r16"]}
    rig.npu.unload("gemm")
    assert rig.npu.loaded() == {}
    for found, right in zip((rig.gemm(), rig.mha(3), rig.mha(5)), wanted, strict=True):
        np.testing.assert_array_equal(found, right)
    assert rig.session.counters.swaps == 0


@pytest.mark.parametrize("key", ["qkv_x3", "mha", "", "gemm.xclbin"])
def test_unloading_what_is_not_loaded_says_what_is(rig: Rig, key: str) -> None:
    with pytest.raises(InputError, match=rf"unload\('{key}'\): not loaded; loaded are no kernels"):
        rig.npu.unload(key)
    rig.gemm()
    with pytest.raises(InputError, match=r"not loaded; loaded are qkv_r16\."):
        rig.npu.unload(key)


def test_unload_all_frees_every_slot(make: MakeRig, tiny_bundle: Path, slots: Slots) -> None:
    slots(2)
    one, other = make(tiny_bundle), make(tiny_bundle)
    one.gemm()
    one.mha()
    assert one.npu.unload_all() == 2
    assert one.npu.unload_all() == 0
    other.gemm()
    other.mha()
    assert other.session.counters.swaps == 0


# --- others -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slot_that_another_process_gives_back_in_time_is_taken(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig = make(tiny_bundle)
    with held(tiny_bundle, 1) as holder:
        threading.Timer(0.1, holder.kill).start()
        rig.gemm()
    assert rig.session.counters.swaps == 0


@pytest.mark.slow
def test_the_wait_for_others_is_bounded_and_told(
    make: MakeRig, tiny_bundle: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "120")
    slots(1)
    rig = make(tiny_bundle)
    with held(tiny_bundle, 1):
        begun = time.monotonic()
        with pytest.raises(NoFreeContext, match=r"waiting 0.12 s .*NPU_EMBED_SLOT_WAIT_MS"):
            rig.gemm()
    assert 0.12 <= time.monotonic() - begun < 2
    assert not line(rig.session.lock_folder).anyone()


@pytest.mark.slow
def test_another_engine_that_waits_gets_its_turn_and_then_we_ours(
    make: MakeRig, tiny_bundle: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "TURN_S", 0.02)
    slots(1)
    rigs = [make(tiny_bundle) for _ in range(3)]
    wanted = rigs[0].gemm()
    loads: list[list[int]] = [[] for _ in rigs]
    over = threading.Event()

    def work(i: int) -> None:
        while not over.is_set():
            np.testing.assert_array_equal(rigs[i].gemm(), wanted)
            loads[i].append(rigs[i].session.counters.loads)
        rigs[i].npu.unload_all()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.6)
    over.set()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    for i in range(3):
        assert loads[i][-1] >= 3, "it had its turn more than once"
        assert len(loads[i]) > 2 * loads[i][-1], "a turn is more than one run"


def test_nobody_gives_a_turn_before_its_own_is_over(
    make: MakeRig, tiny_bundle: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots(2)
    rig = make(tiny_bundle)
    rig.gemm()
    with line(rig.session.lock_folder).stand():
        rig.gemm()
        assert rig.session.counters.loads == 1
        monkeypatch.setattr(contexts, "TURN_S", 0.0)
        monkeypatch.setattr(rig.npu._contexts, "_slot_wait_s", 0.0)
        rig.gemm()
    assert rig.session.counters.loads == 2
    rig.gemm()
    assert rig.session.counters.loads == 2, "nobody waits any more"


@pytest.mark.parametrize("ours", [0, 1])
def test_a_turn_begins_when_a_context_was_waited_for(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, ours: int
) -> None:
    rig = make(tiny_bundle)
    if ours:
        rig.mha()
    began = rig.npu._contexts._turn_began
    real, refusals = Session.context, [None] * (ours + 2)

    def context(self: Session, path: Path, kernel_name: str) -> Context:
        if refusals:
            refusals.pop()
            raise NoFreeContext("somebody else was quicker")
        return real(self, path, kernel_name)

    monkeypatch.setattr(Session, "context", context)
    rig.gemm()
    assert rig.npu._contexts._turn_began > began
    assert rig.session.counters.swaps == ours


STANDS = """
import sys
from pathlib import Path
from npu_embed.waiting import line
with line(Path(sys.argv[1])).stand():
    print("stands", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_who_has_nothing_does_not_push_in(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(tiny_bundle)
    folder = rig.session.lock_folder
    with another_process(STANDS, folder) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "stands\n"
        thread = threading.Thread(target=rig.gemm)
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive(), "there are 16 slots, but somebody stands before us"
        first.kill()
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_waiter_that_was_stopped_keeps_nobody_from_trying_in_the_end(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "100")
    rig = make(tiny_bundle)
    with line(rig.session.lock_folder).stand():
        begun = time.monotonic()
        rig.gemm()
        assert time.monotonic() - begun >= 0.1
        rig.mha()  # who has a context does not stand in line
        assert time.monotonic() - begun < 5
