"""The emulated NPU's queues and its clock, on which a hang costs nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from boards import Design, Loaded, Xrt, copying_design

from npu_embed.emulator import hardware, pyxrt
from npu_embed.emulator.array import compute
from npu_embed.emulator.ert import encode_start
from npu_embed.emulator.hardware import EmulatedNpu
from npu_embed.emulator.heap import Heap
from npu_embed.emulator.profile import PROFILES
from npu_embed.emulator.xclbin import Argument

TDR_MS = PROFILES["npu2"].tdr_ms


def name(state: Xrt) -> str:
    return str(state.name).removeprefix("ERT_CMD_STATE_")


@pytest.fixture
def design(tmp_path: Path) -> Design:
    return copying_design(tmp_path)


@pytest.fixture
def loaded(design: Design) -> Loaded:
    return Loaded(pyxrt, pyxrt.device(0), design)


def npu_of(loaded: Loaded) -> EmulatedNpu:
    npu = loaded.device._npu
    assert isinstance(npu, EmulatedNpu)
    return npu


def test_a_fifth_command_lets_the_oldest_run(loaded: Loaded) -> None:
    runs = [loaded.run() for _ in range(5)]
    for run in runs[:4]:
        run.start()
    assert [run._command.in_flight for run in runs[:4]] == [True] * 4
    runs[4].start()
    assert [run._command.in_flight for run in runs] == [False, True, True, True, True]
    for run in runs:
        run.wait()


def test_a_fifth_command_behind_a_hang_waits_for_the_device_to_give_up(loaded: Loaded) -> None:
    runs = [loaded.run(loaded.design.hanging), *(loaded.run() for _ in range(4))]
    for run in runs:
        run.start()
    assert [name(run.wait()) for run in runs] == ["TIMEOUT", *["ABORT"] * 3, "COMPLETED"]
    assert npu_of(loaded).clock_ms == TDR_MS


def test_waiting_for_one_lets_those_before_it_run(loaded: Loaded) -> None:
    first, second, third = (loaded.run() for _ in range(3))
    for run in (first, second, third):
        run.start()
    second.wait()
    assert not first._command.in_flight
    assert third._command.in_flight
    third.wait()


def test_the_clock_stands_still_while_commands_complete(loaded: Loaded) -> None:
    run = loaded.run()
    for _ in range(3):
        run.start()
        run.wait(5)
    assert npu_of(loaded).clock_ms == 0


def test_short_waits_add_up_to_the_devices_time_out(loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    for step in range(1, TDR_MS // 100):
        assert name(run.wait(100)) == "TIMEOUT"
        assert npu_of(loaded).clock_ms == 100 * step
        assert run._command.in_flight
    run.wait(100)
    assert not run._command.in_flight
    assert name(run.state()) == "TIMEOUT"


def test_looking_at_a_hanging_run_takes_time_too(loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    looks = 0
    while run._command.in_flight:
        assert int(run.state()) in (3, 8)
        looks += 1
    assert looks == TDR_MS


def test_a_submission_winds_the_watchdog_up_again(loaded: Loaded, design: Design) -> None:
    hanging = loaded.run(design.hanging)
    hanging.start()
    hanging.wait(TDR_MS - 100)
    other = Loaded(pyxrt, loaded.device, design)
    run = other.run()
    run.start()
    hanging.wait(200)
    assert hanging._command.in_flight
    hanging.wait(TDR_MS)
    assert not hanging._command.in_flight
    run.wait()


def test_a_hang_in_one_context_does_not_touch_another(loaded: Loaded, design: Design) -> None:
    hanging = loaded.run(design.hanging)
    hanging.start()
    hanging.wait(100)
    other = Loaded(pyxrt, loaded.device, design)
    run = other.run()
    run.start()
    assert name(run.wait()) == "COMPLETED"
    assert other.result() == design.wanted
    assert name(hanging.wait()) == "TIMEOUT"


def test_a_run_dropped_from_the_queue_leaves_the_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: caught.append(str(args.exc_value)))
    first, second, third = (loaded.run() for _ in range(3))
    first.start()
    second.start()
    third.start()
    del second
    gc.collect()
    assert len(caught) == 1
    assert name(third.wait()) == "COMPLETED"
    assert name(first.wait()) == "COMPLETED"


def test_switches_between_contexts_are_counted(loaded: Loaded, design: Design) -> None:
    other = Loaded(pyxrt, loaded.device, design)
    before = npu_of(loaded).switches
    for one in (loaded, loaded, other, loaded):
        run = one.run()
        run.start()
        run.wait()
    assert npu_of(loaded).switches - before == 3


@pytest.mark.parametrize("shared_device", [True, False])
def test_threads_with_contexts_of_their_own_do_not_disturb_each_other(
    design: Design, shared_device: bool
) -> None:
    device = pyxrt.device(0)
    failures: list[str] = []

    def work(seed: int) -> None:
        own = device if shared_device else pyxrt.device(0)
        loaded = Loaded(pyxrt, own, design)
        content = bytes((i * seed) % 120 for i in range(len(design.wanted)))
        loaded.bos[3] = loaded.buffer(3, content)
        run = loaded.run()
        for _ in range(40):
            loaded.clear()
            run.start()
            if name(run.wait()) != "COMPLETED" or loaded.result() != content:
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_handles_stay_in_the_bits_of_a_group(loaded: Loaded, design: Design) -> None:
    uuid = loaded.device.register_xclbin(pyxrt.xclbin(str(design.xclbin)))
    for _ in range(300):
        pyxrt.hw_context(loaded.device, uuid)
    again = Loaded(pyxrt, loaded.device, design)
    assert again.kernel.group_id(3) < 1 << 24
    run = again.run()
    run.start()
    assert name(run.wait()) == "COMPLETED"


def test_a_machine_without_memory_ends_the_run_not_the_program(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    run = loaded.run()
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "compute", exhausted)
        run.start()
        assert name(run.wait()) == "ERROR"
    run.start()
    assert name(run.wait()) == "COMPLETED"


def test_where_memory_ends_in_a_list_the_run_it_was_for_has_the_error(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def exhausted(bound: object) -> None:
        calls.append(bound)
        if len(calls) == 2:
            raise MemoryError
        compute(bound)  # type: ignore[arg-type]

    monkeypatch.setattr(hardware, "compute", exhausted)
    runs = [loaded.run() for _ in range(3)]
    members = pyxrt.runlist(loaded.context)
    for run in runs:
        members.add(run)
    members.execute()
    with pytest.raises(RuntimeError, match=r"runlist failed execution \(ERT_CMD_STATE_ERROR\)"):
        members.wait()
    assert [name(run.state()) for run in runs] == ["COMPLETED", "ERROR", "ABORT"]


def test_an_interrupted_wait_can_be_waited_for_again(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = loaded.run()
    run.start()
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
    assert name(run.wait()) == "COMPLETED"
    assert loaded.result() == loaded.design.wanted


def test_newer_spellings_of_contexts_and_buffers_work_too(loaded: Loaded, design: Design) -> None:
    file = pyxrt.xclbin(str(design.xclbin))
    forms: list[tuple[object, ...]] = [
        (file,),
        (str(design.xclbin),),
        (file, pyxrt.access_mode.shared),
        (file, {}),
    ]
    for arguments in forms:
        context = pyxrt.hw_context(loaded.device, *arguments)
        kernel = pyxrt.kernel(context, design.kernel)
        buffer = pyxrt.bo(context, 64, kernel.group_id(3))
        assert buffer.size() == 64
        assert pyxrt.bo(context, 64, pyxrt.bo.cacheable, kernel.group_id(1)).size() == 64


def test_an_error_aborts_the_rest_of_its_list_and_nothing_else(loaded: Loaded) -> None:
    broken = loaded.run()
    broken.set_arg(0, 2)  # no such opcode
    runs = [loaded.run(), broken, *(loaded.run() for _ in range(5))]
    members = pyxrt.runlist(loaded.context)
    for run in runs:
        members.add(run)
    members.execute()
    alone = loaded.run()
    alone.start()
    with pytest.raises(RuntimeError, match=r"runlist failed execution \(ERT_CMD_STATE_ERROR\)"):
        members.wait()
    assert [name(run.state()) for run in runs] == ["COMPLETED", "ERROR", *["ABORT"] * 5]
    assert name(alone.wait()) == "COMPLETED"


def test_the_packet_is_what_the_device_goes_by(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(arguments: Sequence[Argument], values: Mapping[int, int]) -> bytes:
        return encode_start(arguments, {**values, 3: values[4]})

    run = loaded.run()
    monkeypatch.setattr("npu_embed.emulator.ert.encode_start", elsewhere)
    run.start()
    assert name(run.wait()) == "ERROR"


# -- addresses ------------------------------------------------------------------------------------


def test_the_heap_gives_the_first_gap_that_fits() -> None:
    heap = Heap(0x1000, 0x10000, 0x100)
    a, b, c = heap.take(0x80), heap.take(0x300), heap.take(0x100)
    assert (a, b, c) == (0x1000, 0x1100, 0x1400)
    assert b is not None
    heap.give_back(b)
    assert heap.take(0x400) == 0x1500
    assert heap.take(0x200) == 0x1100
    assert heap.take(0x100) == 0x1300


def test_a_full_heap_gives_nothing_until_something_is_given_back() -> None:
    heap = Heap(0, 0x1000, 0x100)
    first = heap.take(0x800)
    assert heap.take(0x801) is None
    assert heap.take(0x800) == 0x800
    assert heap.take(1) is None
    assert first == 0
    heap.give_back(0)
    heap.give_back(0x123)
    assert heap.take(1) == 0
