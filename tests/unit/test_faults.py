"""Planned faults: the plan's text, and what each does to a program that uses pyxrt."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import numpy as np
import pytest
from boards import Design, Loaded, Xrt, copying_design

from npu_embed import settings
from npu_embed.emulator import faults, pyxrt, slots
from npu_embed.emulator.faults import Faults, Planned, parse
from npu_embed.emulator.hardware import EmulatedNpu
from npu_embed.emulator.profile import PROFILES
from npu_embed.errors import SettingError

TDR_MS = PROFILES["npu2"].tdr_ms


def name(state: Xrt) -> str:
    return str(state.name).removeprefix("ERT_CMD_STATE_")


@pytest.fixture
def design(tmp_path: Path) -> Design:
    return copying_design(tmp_path)


@pytest.fixture
def loaded(design: Design) -> Loaded:
    return Loaded(pyxrt, pyxrt.device(0), design)


def plan(loaded: Loaded, text: str) -> EmulatedNpu:
    """The device, on which this goes wrong from now on."""
    npu = loaded.device._npu
    assert isinstance(npu, EmulatedNpu)
    npu.plan_faults(parse(text))
    return npu


def own_slots() -> set[int]:
    return set(slots.table(settings.emulator_dir()).holders(16))


# --- the plan's text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        (" , ", ()),
        ("timeout@5", (Planned("timeout", 5),)),
        ("abort@1+", (Planned("abort", 1, 1),)),
        ("error@3/10", (Planned("error", 3, 10),)),
        ("flip@2, flip=0.01@1+", (Planned("flip", 2), Planned("flip", 1, 1, rate=0.01))),
        ("context=ENOSPC@2", (Planned("context", 2, errno=errno.ENOSPC, sign=-1),)),
        ("context=-EBUSY@1", (Planned("context", 1, errno=errno.EBUSY, sign=-1),)),
        ("context=+ENODEV@1+", (Planned("context", 1, 1, errno=errno.ENODEV, sign=1),)),
        ("heap@1,memlock@4", (Planned("heap", 1), Planned("memlock", 4))),
    ],
)
def test_a_plan_is_read(text: str, wanted: tuple[Planned, ...]) -> None:
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("timeout", "'timeout', wanted KIND@N, KIND@N+ or KIND@N/M"),
        ("timeout@0", "'timeout@0', wanted KIND@N"),
        ("timeout@1/0", "'timeout@1/0', wanted KIND@N"),
        ("timeout@-1", "wanted KIND@N"),
        ("timeout@1++", "wanted KIND@N"),
        ("timeout@" + "9" * 400, "wanted KIND@N"),
        ("boom@1", "unknown fault 'boom', wanted one of timeout, error, abort,"),
        ("abort=3@1", "'abort=3@1', wanted no value with abort"),
        ("context@1", "'context@1', wanted the name of an errno, as in context=ENOSPC"),
        ("context=28@1", "wanted the name of an errno"),
        ("context=errorcode@1", "wanted the name of an errno"),
        ("context=+-EBUSY@1", "wanted the name of an errno"),
        ("flip=0@1", "'flip=0@1', wanted a share above 0 and up to 1"),
        ("flip=2@1", "wanted a share"),
        ("flip=nan@1", "wanted a share"),
        ("flip=often@1", "wanted a share"),
    ],
)
def test_another_text_is_an_error_that_names_variable_and_fault(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="^NPU_EMBED_EMU_FAULTS: .*" + re.escape(says)):
        parse("timeout@3," + text)
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", text)
    with pytest.raises(SettingError, match="NPU_EMBED_EMU_FAULTS"):
        pyxrt.device(0)


@pytest.mark.parametrize(
    ("text", "due"),
    [("error@3", [3]), ("error@3+", [3, 4, 5, 6, 7, 8]), ("error@2/3", [2, 5, 8]), ("heap@1", [])],
)
def test_a_fault_happens_when_its_count_comes(text: str, due: list[int]) -> None:
    planned = Faults(parse(text), seed=0)
    assert [n for n in range(1, 9) if planned.of_run()] == due
    assert planned.struck.total() == len(due)


def test_the_variable_plans_for_what_is_opened_afterwards(
    loaded: Loaded, design: Design, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "error@2")
    assert loaded.device._npu.faults is None
    other = Loaded(pyxrt, pyxrt.device(0), design)
    for wanted in ("COMPLETED", "ERROR", "COMPLETED"):
        run = other.run()
        run.start()
        assert name(run.wait()) == wanted


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
    for kind in faults.KINDS:
        assert re.search(rf"^\| `{kind}\b", text, re.MULTILINE), kind


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "ms"),
    [("timeout", "TIMEOUT", TDR_MS), ("error", "ERROR", 0), ("abort", "ABORT", 0)],
)
def test_a_run_fails_and_leaves_no_results(loaded: Loaded, kind: str, state: str, ms: int) -> None:
    run = loaded.run()
    run.start()
    assert name(run.wait()) == "COMPLETED"
    assert loaded.result() == loaded.design.wanted
    npu = plan(loaded, f"{kind}@2")
    for wanted in ("COMPLETED", state):
        run.start()
        assert name(run.wait()) == wanted
    assert npu.clock_ms == ms
    if kind != "timeout":
        assert not any(loaded.result())
    run.start()
    assert name(run.wait()) == "COMPLETED"
    assert loaded.result() == loaded.design.wanted


def test_a_run_that_fails_in_a_list_aborts_those_after_it(loaded: Loaded) -> None:
    npu = plan(loaded, "abort@2")
    runs = [loaded.run() for _ in range(3)]
    members = pyxrt.runlist(loaded.context)
    for run in runs:
        members.add(run)
    members.execute()
    with pytest.raises(RuntimeError, match=r"runlist failed execution .*ABORT"):
        members.wait()
    assert [name(run.state()) for run in runs] == ["COMPLETED", "ABORT", "ABORT"]
    assert npu.faults is not None
    assert npu.faults.struck == {"abort": 1}
    members.execute()
    members.wait()


def test_a_flip_changes_one_bit_of_one_element(loaded: Loaded) -> None:
    plan(loaded, "flip@1/2")
    run = loaded.run()
    wanted = np.frombuffer(loaded.design.wanted, np.uint16)
    places = set()
    for _ in range(8):
        run.start()
        assert name(run.wait()) == "COMPLETED"
        changed = np.frombuffer(loaded.result(), np.uint16) ^ wanted
        (place,) = np.flatnonzero(changed)
        assert bin(changed[place]).count("1") == 1
        places.add(int(place))
        run.start()
        run.wait()
        assert loaded.result() == loaded.design.wanted
    assert len(places) > 1


def test_flips_at_a_rate_are_as_many_and_the_same_for_a_seed(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    wanted = np.frombuffer(loaded.design.wanted, np.uint16)
    for seed in (0, 0, 1):
        monkeypatch.setenv("NPU_EMBED_EMU_SEED", str(seed))
        plan(loaded, "flip=0.25@1")
        run = loaded.run()
        run.start()
        run.wait()
        found.append(loaded.result())
        share = float(np.mean(np.frombuffer(found[-1], np.uint16) != wanted))
        assert 0.1 < share < 0.4
    assert found[0] == found[1] != found[2]


def test_a_stale_line_shows_what_the_host_saw_before(loaded: Loaded) -> None:
    output = loaded.bos[loaded.design.output]
    before = b"\x11\x22" * (output.size() // 2)
    output.write(np.frombuffer(before, np.uint8), 0)
    output.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)
    plan(loaded, "stale@1")
    run = loaded.run()
    run.start()
    assert name(run.wait()) == "COMPLETED"
    found = np.frombuffer(loaded.result(), np.uint8)
    wanted = np.frombuffer(loaded.design.wanted, np.uint8)
    changed = np.flatnonzero(found != wanted)
    first = changed[0] // 64 * 64
    assert 0 < len(changed) <= 64
    assert changed[-1] < first + 64
    assert found[first : first + 64].tobytes() == before[:64]
    assert loaded.result() == loaded.design.wanted  # at the next sync it is there


# --- contexts, buffers, the device --------------------------------------------------------------


@pytest.mark.parametrize("sign", ["", "-", "+"])
@pytest.mark.parametrize("code", ["ENOENT", "EINVAL", "ENODEV", "ENOSPC", "EBUSY", "ETIME"])
def test_a_context_is_refused_with_the_drivers_words(
    loaded: Loaded, design: Design, code: str, sign: str
) -> None:
    plan(loaded, f"context={sign}{code}@1")
    number = getattr(errno, code) * (1 if sign == "+" else -1)
    with pytest.raises(RuntimeError, match=rf"CREATE_HWCTX IOCTL failed \(err={number}\)"):
        Loaded(pyxrt, loaded.device, design)
    Loaded(pyxrt, loaded.device, design)


def test_a_suspend_loses_registers_and_nothing_else(loaded: Loaded) -> None:
    run = loaded.run()
    run.start()
    run.wait()
    (array,) = loaded.context._context.arrays.values()
    array.registers[0x1234] = 5
    plan(loaded, "suspend@1")
    run.start()
    assert name(run.wait()) == "COMPLETED"
    assert 0x1234 not in array.registers
    assert loaded.result() == loaded.design.wanted


def test_a_lost_context_takes_no_more_commands(loaded: Loaded, design: Design) -> None:
    plan(loaded, "lost@2")
    runs = [loaded.run() for _ in range(3)]
    for run in runs:
        run.start()
    assert [name(run.wait()) for run in runs] == ["COMPLETED", "ABORT", "ABORT"]
    with pytest.raises(RuntimeError, match=r"EXEC_CMD IOCTL failed \(err=-2\)"):
        runs[0].start()
    other = Loaded(pyxrt, loaded.device, design)
    run = other.run()
    run.start()
    assert name(run.wait()) == "COMPLETED"


@pytest.mark.parametrize("bounded", [True, False])
def test_a_device_that_is_gone_refuses_everything(
    loaded: Loaded, design: Design, bounded: bool
) -> None:
    plan(loaded, "gone@2")
    runs = [loaded.run() for _ in range(3)]
    for run in runs:
        run.start()
    assert name(runs[0].wait()) == "COMPLETED"
    with pytest.raises(RuntimeError, match=r"IOCTL failed \(err=-19\): No such device"):
        runs[1].wait(100) if bounded else runs[1].state()
    assert name(runs[2].wait()) == "ABORT"
    for call in (
        runs[0].start,
        lambda: pyxrt.hw_context(loaded.device, pyxrt.xclbin(str(design.xclbin))),
        lambda: pyxrt.bo(loaded.device, 64, pyxrt.bo.host_only, 0),
        lambda: loaded.device.get_info(pyxrt.xrt_info_device.name),
    ):
        with pytest.raises(RuntimeError, match="No such device"):
            call()
    assert loaded.context._context.slot not in own_slots()
    reopened = Loaded(pyxrt, pyxrt.device(0), design).run()
    reopened.start()
    assert name(reopened.wait()) == "COMPLETED"


def test_buffers_are_refused_by_where_they_would_be(loaded: Loaded) -> None:
    def instructions() -> Xrt:
        return pyxrt.bo(loaded.device, 64, pyxrt.bo.cacheable, 1)

    def rows() -> Xrt:
        return pyxrt.bo(loaded.device, 64, pyxrt.bo.host_only, 0)

    plan(loaded, "heap@2,memlock@1")
    instructions()
    with pytest.raises(RuntimeError, match=r"CREATE_BO IOCTL failed \(err=-28\): No space left"):
        instructions()
    with pytest.raises(RuntimeError, match=r"^mmap\(.*failed \(err=-11\): Resource temporarily"):
        rows()
    instructions()
    rows()
