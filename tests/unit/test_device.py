"""Session, Context, Kernel and Buffer over a module that only pretends to be pyxrt."""

from __future__ import annotations

import enum
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from npu_embed import device, kernels
from npu_embed.containers import ArgumentLayout, argument_layout, holds_array_program
from npu_embed.device import Buffer, Context, Kernel, Session
from npu_embed.driver import Counters, Driver
from npu_embed.driver import Xrt as Fake
from npu_embed.errors import (
    BundleError,
    DeviceError,
    NoFreeContext,
    NpuEmbedError,
    RunFailed,
    SettingError,
)

CREATE = "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err={}): {}"
LAYOUT = ArgumentLayout(opcode=0, instr=1, ninstr=2, buffers=(3, 4, 5, 6, 7))


class State(enum.Enum):
    """As pybind11's enums: no int, compares only with itself."""

    ERT_CMD_STATE_NEW = 1
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_ERROR = 5
    ERT_CMD_STATE_ABORT = 6
    ERT_CMD_STATE_TIMEOUT = 8


class Direction(enum.Enum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


DONE, TIMEOUT = State.ERT_CMD_STATE_COMPLETED, State.ERT_CMD_STATE_TIMEOUT


class FakeBo:
    """Memory that the host alone sees."""

    host_only, cacheable = "host_only", "cacheable"

    def __init__(self, owner: object, size: int, *rest: object) -> None:
        self.parent = owner if isinstance(owner, FakeBo) else None
        self.args = (size, *rest)
        self.memory = bytearray(b"\xaa" * size)
        self.syncs: list[tuple[Direction, int, int]] = []

    def map(self) -> memoryview:
        return memoryview(self.memory)

    def sync(self, direction: Direction, size: int, offset: int) -> None:
        self.syncs.append((direction, size, offset))


class FakeRun:
    """A run whose waits and states are told beforehand; the last one stays."""

    waits: ClassVar[list[State | BaseException]] = [DONE]
    states: ClassVar[list[State]] = [DONE]
    made: ClassVar[list[FakeRun]] = []

    def __init__(self, kernel: object) -> None:
        self.args: dict[int, object] = {}
        self.starts = 0
        self._waits, self._states = list(self.waits), list(self.states)
        self.made.append(self)

    def set_arg(self, index: int, value: object) -> None:
        self.args[index] = value

    def start(self) -> None:
        self.starts += 1

    def wait(self, timeout_ms: int) -> State:
        assert timeout_ms > 0, "0 would wait for ever"
        step = self._waits.pop(0) if len(self._waits) > 1 else self._waits[0]
        if isinstance(step, BaseException):
            raise step
        return step

    def state(self) -> State:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]


def _fails(error: BaseException) -> Fake:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A pyxrt that works, to be broken by the test."""
    module: Fake = types.ModuleType("pyxrt")
    known = types.SimpleNamespace(get_uuid=lambda: "uuid")
    module.enumerate_devices = lambda: 1
    module.xrt_info_device = types.SimpleNamespace(name="name")
    module.device = lambda index: types.SimpleNamespace(
        get_info=lambda key: "RyzenAI-npu4 Strix", register_xclbin=lambda x: "uuid"
    )
    module.xclbin = lambda path: known
    module.hw_context = lambda device, uuid: object()
    module.kernel = lambda context, name: types.SimpleNamespace(group_id=lambda index: 0x10001)
    module.bo = FakeBo
    module.run = type("run", (FakeRun,), {"made": []})
    module.ert_cmd_state = State
    module.xclBOSyncDirection = Direction
    kept = len(kernels.abandoned)
    yield module
    del kernels.abandoned[kept:]


@pytest.fixture
def system(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The same, as the machine's own pyxrt."""
    monkeypatch.setitem(sys.modules, "pyxrt", fake)
    return fake


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_said", set())


@pytest.fixture
def xclbin(tiny_bundle: Path) -> Path:
    return tiny_bundle / "kernels" / "gemm.xclbin"


def loaded(fake: Fake, xclbin: Path, timeout_ms: int = 1000) -> tuple[Session, Kernel]:
    session = Session("npu", fake)
    session.driver.timeout_ms = timeout_ms
    return session, session.context(xclbin, "MLIR_AIE").load("qkv_x2", bytes(64))


# --- which device -------------------------------------------------------------------------------


def test_auto_takes_the_npu_and_says_nothing(
    system: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session.open("auto")
    assert (session.kind, session.generation) == ("npu", "npu2")
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("RyzenAI-npu1", "npu1"),
        ("NPU Phoenix", "npu1"),
        ("NPU Strix Halo", "npu2"),
        ("NPU Krackan 1", "npu2"),
        ("NPU of 2031", None),
    ],
)
def test_the_generation_is_told_by_the_devices_name(
    fake: Fake, name: str, generation: str | None
) -> None:
    fake.device = lambda index: types.SimpleNamespace(get_info=lambda key: name)
    assert Session("npu", fake).generation == generation


NO_NPU = {
    "missing": (None, "not importable"),
    "too old": ({"hw_context": None}, "has no hw_context, wanted XRT 2.16 or later"),
    "no device": ({"enumerate_devices": lambda: 0}, "sees no device"),
    "not listed": ({"enumerate_devices": _fails(RuntimeError("mmap: EAGAIN"))}, "mmap: EAGAIN"),
    "not opened": ({"device": _fails(RuntimeError("No such device"))}, "No such device"),
}


@pytest.fixture
def no_npu(request: pytest.FixtureRequest, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine without a usable NPU; the words that must say why."""
    changes, words = NO_NPU[request.param]
    for name, value in (changes or {}).items():
        if value is None:
            delattr(fake, name)
        else:
            setattr(fake, name, value)
    # None in sys.modules is what "no such module" looks like, wherever the tests run.
    monkeypatch.setitem(sys.modules, "pyxrt", fake if changes is not None else None)
    return words


@pytest.mark.parametrize("no_npu", NO_NPU, indirect=True)
def test_the_npu_is_never_emulated(no_npu: str) -> None:
    with pytest.raises(DeviceError, match=no_npu):
        Session.open("npu")


@pytest.mark.parametrize("no_npu", NO_NPU, indirect=True)
def test_auto_says_once_and_in_one_line_that_it_emulates_and_why(
    no_npu: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Session.open("auto").kind == "emulated"
    assert Session.open("auto").kind == "emulated"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert said.startswith("running on the emulated NPU: ")
    assert no_npu in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: _Py_Dealloc"), SystemError("bad magic")]
)
def test_a_pyxrt_that_crashes_at_import_is_a_device_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crashes:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "pyxrt":
                raise error

    monkeypatch.delitem(sys.modules, "pyxrt", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Crashes(), *sys.meta_path])
    with pytest.raises(DeviceError, match=str(error)):
        Session.open("npu")


def test_array_programs_are_emulated_even_beside_an_npu(
    system: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    assert Session.open("auto", array_programs=True).kind == "emulated"
    assert "no hardware can run" in caplog.text
    with pytest.raises(DeviceError, match=r'device="npu".*no hardware can run'):
        Session.open("npu", array_programs=True)


def test_emulated_asks_no_pyxrt_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    assert Session.open("emulated").kind == "emulated"
    assert not caplog.records


def test_without_an_argument_the_setting_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_DEVICE", "emulated")
    assert Session.open().kind == "emulated"


@pytest.mark.parametrize("name", ["emu", "", "NPU", 0])
def test_an_unknown_device_is_refused_with_the_known_ones(name: Fake) -> None:
    with pytest.raises(SettingError, match="wanted 'auto', 'npu' or 'emulated'"):
        Session.open(name)


# --- contexts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code", [2, 22, 19, 28, 16])
def test_five_errnos_of_either_sign_mean_no_slot_now(
    fake: Fake, xclbin: Path, code: int, sign: int
) -> None:
    fake.hw_context = _fails(RuntimeError(CREATE.format(sign * code, "some words")))
    with pytest.raises(NoFreeContext, match="some words"):
        Session("npu", fake).context(xclbin, "MLIR_AIE")


@pytest.mark.parametrize(
    "words",
    [
        CREATE.format(-62, "Timer expired"),
        CREATE.format(12, "Cannot allocate memory"),
        "DRM_IOCTL_AMDXDNA_CONFIG_HWCTX IOCTL failed (err=-22): Invalid argument",
        "No xclbin with uuid 'x': Invalid argument",
    ],
)
def test_any_other_failure_to_create_a_context_is_no_lack_of_slots(
    fake: Fake, xclbin: Path, words: str
) -> None:
    fake.hw_context = _fails(RuntimeError(words))
    with pytest.raises(DeviceError, match=r"gemm.xclbin: no hardware context") as caught:
        Session("npu", fake).context(xclbin, "MLIR_AIE")
    assert not isinstance(caught.value, NoFreeContext)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["xclbin", "kernel"])
def test_an_xclbin_that_xrt_refuses_is_a_bundle_error(fake: Fake, xclbin: Path, name: str) -> None:
    setattr(fake, name, _fails(RuntimeError("Invalid xclbin")))
    with pytest.raises(BundleError, match=r"gemm.xclbin: .*Invalid xclbin"):
        Session("npu", fake).context(xclbin, "MLIR_AIE")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"", "no xclbin"), (b"xclbin2\0" + bytes(100), "no xclbin")],
)
def test_a_bad_xclbin_never_reaches_the_device(
    fake: Fake, tmp_path: Path, content: bytes | None, words: str
) -> None:
    fake.xclbin = fake.hw_context = _fails(AssertionError("asked"))
    path = tmp_path / "x.xclbin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=f"x.xclbin: {words}"):
        Session("npu", fake).context(path, "MLIR_AIE")


def test_a_kernel_the_xclbin_lacks_is_refused_with_those_it_has(fake: Fake, xclbin: Path) -> None:
    with pytest.raises(BundleError, match="has kernels MLIR_AIE, wanted DPU"):
        Session("npu", fake).context(xclbin, "DPU")


def test_an_xclbin_wider_than_the_array_is_refused_before_the_driver_is_asked(
    fake: Fake, tmp_path: Path
) -> None:
    from npu_embed.emulator import xclbin as container

    path = tmp_path / "wide.xclbin"
    path.write_bytes(container.build(pdi_image=bytes(64), column_width=9))
    fake.hw_context = _fails(AssertionError("asked"))
    with pytest.raises(BundleError, match="for 9 columns, this NPU has 8"):
        Session("npu", fake).context(path, "MLIR_AIE")


def test_argument_positions_come_from_the_xclbin(xclbin: Path) -> None:
    assert argument_layout(xclbin, "MLIR_AIE") == LAYOUT


def test_array_programs_are_told_from_machine_code(xclbin: Path, tmp_path: Path) -> None:
    from npu_embed.emulator import xclbin as container

    assert holds_array_program(xclbin)
    real = tmp_path / "real.xclbin"
    real.write_bytes(container.build(pdi_image=bytes.fromhex("DD00000044332211") + bytes(64)))
    assert not holds_array_program(real)


# --- buffers ------------------------------------------------------------------------------------


def test_a_new_buffer_is_zero_on_both_sides_and_in_no_context(fake: Fake) -> None:
    session = Session("npu", fake)
    buffer = session.buffer(100)
    bo = buffer.view(0, 100).bo
    assert bo.args == (100, "host_only", 0)
    assert not any(bo.memory)
    assert bo.syncs == [(Direction.XCL_BO_SYNC_BO_TO_DEVICE, 100, 0)]
    assert session.counters.bytes_to_device == 100


@pytest.mark.parametrize(
    "error", [RuntimeError("mmap failed (err=11)"), MemoryError(), OSError("no memory")]
)
def test_no_memory_is_a_device_error_that_names_the_limit(fake: Fake, error: Exception) -> None:
    fake.bo = type("bo", (FakeBo,), {"__init__": _fails(error)})
    with pytest.raises(DeviceError, match=r"buffer of 64 bytes.*ulimit -l"):
        Session("npu", fake).buffer(64)


def test_views_are_made_once_and_of_the_root(fake: Fake) -> None:
    buffer = Session("npu", fake).buffer(100)
    whole, part = buffer.view(0, 100), buffer.view(10, 20)
    assert buffer.view(10, 20) is part
    assert whole.bo.parent is None
    assert part.bo.parent is whole.bo
    assert part.bo.args == (20, 10)
    assert whole.id != part.id


@pytest.mark.parametrize("place", [(-1, 5), (0, 0), (96, 5), (0, 101), (200, 1)])
def test_a_view_that_leaves_the_buffer_is_refused(fake: Fake, place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="buffer of 100 bytes"):
        Session("npu", fake).buffer(100).view(*place)


def test_cached_views_are_bounded(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_embed import buffers

    monkeypatch.setattr(buffers, "MAX_CACHED_VIEWS", 2)
    buffer = Session("npu", fake).buffer(100)
    first, second = buffer.view(0, 1), buffer.view(1, 1)
    assert buffer.view(0, 1) is first  # now the younger one
    buffer.view(2, 1)
    assert buffer.view(0, 1) is first
    assert buffer.view(1, 1) is not second


@pytest.mark.parametrize("method", ["to_device", "from_device"])
def test_a_sync_names_size_then_offset_and_is_counted(fake: Fake, method: str) -> None:
    session = Session("npu", fake)
    buffer = session.buffer(100)
    before = session.counters.copy()
    getattr(buffer, method)(30, 7)
    direction, size, offset = buffer.view(0, 100).bo.syncs[-1]
    assert (size, offset) == (7, 30)
    assert direction.name.endswith("BO_" + method.upper())
    assert session.counters.since(before) == Counters(syncs=1, **{f"bytes_{method}": 7})


def test_a_sync_that_fails_is_a_device_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Session("npu", fake).buffer(100)
    monkeypatch.setattr(FakeBo, "sync", _fails(RuntimeError("No such device")))
    with pytest.raises(DeviceError, match=r"bytes 0 to 8 not synced.*No such device"):
        buffer.from_device(0, 8)


# --- kernels ------------------------------------------------------------------------------------


def test_a_stream_is_loaded_into_the_instruction_arguments_bank(fake: Fake, xclbin: Path) -> None:
    session, kernel = loaded(fake, xclbin)
    kernel.run([session.buffer(8).view(0, 8)])
    (run,) = fake.run.made
    insts = run.args[LAYOUT.instr]
    assert insts.args == (64, "cacheable", 0x10001)
    assert insts.syncs == [(Direction.XCL_BO_SYNC_BO_TO_DEVICE, 64, 0)]
    assert run.args[LAYOUT.opcode] == 3
    assert run.args[LAYOUT.ninstr] == 64
    assert session.counters.loads == 1


def test_no_room_for_a_stream_is_a_device_error(fake: Fake, xclbin: Path) -> None:
    context = Session("npu", fake).context(xclbin, "MLIR_AIE")
    fake.bo = type("bo", (FakeBo,), {"__init__": _fails(RuntimeError("heap is full"))})
    with pytest.raises(DeviceError, match=r"qkv_x2: no instruction buffer.*heap is full"):
        context.load("qkv_x2", bytes(64))


def test_a_run_is_prepared_once_for_the_same_views(fake: Fake, xclbin: Path) -> None:
    session, kernel = loaded(fake, xclbin)
    views = [session.buffer(8).view(0, 8) for _ in range(3)]
    kernel.run(views)
    kernel.run(views)
    kernel.run(views[::-1])
    first, second = fake.run.made
    assert (first.starts, second.starts) == (2, 1)
    assert [first.args[i] for i in (3, 4, 5)] == [v.bo for v in views]
    assert session.counters.runs == 3


def test_prepared_runs_are_bounded(
    fake: Fake, xclbin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_CACHED_RUNS", 2)
    session, kernel = loaded(fake, xclbin)
    views = [session.buffer(8).view(0, 8) for _ in range(3)]
    for view in (*views, views[0], views[2]):
        kernel.run([view])
    assert len(fake.run.made) == 4  # the first was dropped for the third, the third was kept


def test_more_buffers_than_the_kernel_takes_are_a_bundle_error(fake: Fake, xclbin: Path) -> None:
    session, kernel = loaded(fake, xclbin)
    with pytest.raises(BundleError, match="qkv_x2 takes 5 buffers, wanted 6"):
        kernel.run([session.buffer(8).view(0, 8)] * 6)


def test_a_patch_is_one_sync_and_a_bad_one_writes_nothing(fake: Fake, xclbin: Path) -> None:
    session, kernel = loaded(fake, xclbin)
    kernel.run([])
    insts = fake.run.made[0].args[LAYOUT.instr]
    syncs = len(insts.syncs)
    for bad in ({3: 7, 16: 1}, {3: 7, -1: 1}, {3: 7, 4: 1 << 32}, {3: 7, 4: -1}):
        with pytest.raises(ValueError, match="qkv_x2: word"):
            kernel.patch(bad)
    assert not any(insts.memory)
    assert len(insts.syncs) == syncs
    kernel.patch({3: 7, 15: 0xFFFFFFFF})
    assert insts.memory[12:16] == b"\7\0\0\0"
    assert insts.memory[60:64] == b"\xff\xff\xff\xff"
    assert len(insts.syncs) == syncs + 1
    assert session.counters.patches == 1


@pytest.mark.parametrize("state", [State.ERT_CMD_STATE_ERROR, State.ERT_CMD_STATE_ABORT])
def test_a_run_that_fails_names_kernel_and_state(fake: Fake, xclbin: Path, state: State) -> None:
    fake.run.waits = [state]
    _, kernel = loaded(fake, xclbin)
    words = state.name.removeprefix("ERT_CMD_STATE_")
    with pytest.raises(RunFailed, match=f"qkv_x2: the run ended in {words}"):
        kernel.run([])
    assert not kernels.abandoned


def test_a_run_that_cannot_start_names_its_kernel(fake: Fake, xclbin: Path) -> None:
    fake.run.start = _fails(RuntimeError("EXEC_CMD IOCTL failed (err=-19)"))
    session, kernel = loaded(fake, xclbin)
    with pytest.raises(RunFailed, match=r"qkv_x2: could not be started.*err=-19"):
        kernel.run([])
    assert session.counters.runs == 0


def test_a_slow_run_is_waited_for_in_slices(fake: Fake, xclbin: Path) -> None:
    fake.run.waits = [TIMEOUT, TIMEOUT, DONE]
    fake.run.states = [State.ERT_CMD_STATE_NEW]
    _, kernel = loaded(fake, xclbin)
    kernel.run([])


def test_the_devices_own_timeout_ends_the_wait_and_the_run(fake: Fake, xclbin: Path) -> None:
    fake.run.waits, fake.run.states = [TIMEOUT], [TIMEOUT]
    _, kernel = loaded(fake, xclbin, timeout_ms=60_000)
    with pytest.raises(RunFailed, match="qkv_x2: the run ended in TIMEOUT"):
        kernel.run([])
    assert not kernels.abandoned


def test_a_run_that_never_ends_is_left_in_time_and_kept_alive(fake: Fake, xclbin: Path) -> None:
    fake.run.waits, fake.run.states = [TIMEOUT], [State.ERT_CMD_STATE_NEW]
    session, kernel = loaded(fake, xclbin, timeout_ms=5)
    view = session.buffer(8).view(0, 8)
    with pytest.raises(RunFailed, match="qkv_x2: the run ended in TIMEOUT"):
        kernel.run([view])
    kept: Fake = kernels.abandoned
    ((run, views, *rest),) = kept
    kernel.release()
    assert run is fake.run.made[0]
    assert views == (view,)
    assert all(part is not None for part in rest)


def test_after_a_run_that_never_ended_the_next_is_a_new_one(fake: Fake, xclbin: Path) -> None:
    fake.run.waits, fake.run.states = [TIMEOUT], [State.ERT_CMD_STATE_NEW]
    _, kernel = loaded(fake, xclbin, timeout_ms=5)
    with pytest.raises(RunFailed):
        kernel.run([])
    fake.run.waits = [DONE]
    kernel.run([])
    assert [run.starts for run in fake.run.made] == [1, 1]


def test_a_device_lost_in_mid_run_is_a_failed_run_kept_alive(fake: Fake, xclbin: Path) -> None:
    fake.run.waits = [RuntimeError("WAIT_CMD IOCTL failed (err=-19): No such device")]
    _, kernel = loaded(fake, xclbin)
    with pytest.raises(RunFailed, match=r"qkv_x2: could not be waited for.*No such device"):
        kernel.run([])
    assert len(kernels.abandoned) == 1


def test_ctrl_c_waits_for_the_run_to_end(fake: Fake, xclbin: Path) -> None:
    fake.run.waits = [KeyboardInterrupt(), TIMEOUT, DONE]
    fake.run.states = [State.ERT_CMD_STATE_NEW]
    _, kernel = loaded(fake, xclbin)
    with pytest.raises(KeyboardInterrupt):
        kernel.run([])
    assert not kernels.abandoned
    kernel.run([])


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(TIMEOUT, id="a run that never ends"),
        pytest.param(KeyboardInterrupt(), id="a second Ctrl-C"),
        pytest.param(RuntimeError("gone"), id="a device lost"),
    ],
)
def test_ctrl_c_is_heard_whatever_the_run_does(fake: Fake, xclbin: Path, then: Fake) -> None:
    fake.run.waits, fake.run.states = [KeyboardInterrupt(), then], [State.ERT_CMD_STATE_NEW]
    _, kernel = loaded(fake, xclbin, timeout_ms=5)
    with pytest.raises(KeyboardInterrupt):
        kernel.run([])
    assert len(kernels.abandoned) == 1


def test_a_kernel_frees_runs_then_instructions_then_kernel() -> None:
    freed: list[str] = []

    class Traced(FakeBo):
        def __init__(self, what: str) -> None:
            super().__init__(None, 16)
            self.what = what

        def __del__(self) -> None:
            freed.append(self.what)

    class TracedRun(FakeRun):
        made: ClassVar[list[FakeRun]] = []

        def __init__(self, kernel: object) -> None:
            self.args: dict[int, object] = {}
            self.starts = 0
            self._waits, self._states = [DONE], [DONE]

        def __del__(self) -> None:
            freed.append("run")

    module: Fake = types.SimpleNamespace(
        run=TracedRun, ert_cmd_state=State, xclBOSyncDirection=Direction
    )
    driver = Driver(module, 1000)
    bo = Traced("insts")
    of: Fake = Traced("kernel")
    kernel = Kernel(driver, "k", "x.xclbin", LAYOUT, of, bo, Buffer(driver, bo, 16))
    del of, bo
    kernel.run([])
    kernel.release()
    assert freed == ["run", "insts", "kernel"]


def test_every_error_of_the_device_is_one_of_ours() -> None:
    for kind in (BundleError, DeviceError, NoFreeContext, RunFailed, SettingError):
        assert issubclass(kind, NpuEmbedError)
    assert issubclass(NoFreeContext, DeviceError)
    assert issubclass(RunFailed, DeviceError)


def test_a_released_context_keeps_nothing(fake: Fake, xclbin: Path) -> None:
    context: Context = Session("npu", fake).context(xclbin, "MLIR_AIE")
    context.release()
    assert context._kernel is None
    assert context._hw_context is None
