"""Hardware-context slots: their number, and how processes share and lose them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from boards import Loaded, Xrt, copying_design

from npu_embed.emulator import pyxrt, slots

TESTS = Path(__file__).parents[1]
NO_SLOT = r"^DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed \(err=-2\): No such file or directory$"
HOLDER = """
import sys
from pathlib import Path
from npu_embed.emulator import slots
table = slots.table(Path(sys.argv[1]))
held = [table.acquire(int(sys.argv[2])) for _ in range(int(sys.argv[3]))]
print(*held, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A slot table of the test's own."""
    folder = tmp_path / "slots"
    monkeypatch.setenv("NPU_EMBED_EMU_DIR", str(folder))
    return folder


@contextmanager
def another_process(folder: Path, limit: int, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process that takes `count` slots below `limit` and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(limit), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def held(process: subprocess.Popen[str]) -> list[int]:
    """The slots the process says it holds."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split() if word != "None"]


def contexts(design_folder: Path, count: int) -> list[Xrt]:
    design = copying_design(design_folder)
    device = pyxrt.device(0)
    return [Loaded(pyxrt, device, design) for _ in range(count)]


# -- their number ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 16),
        ({"NPU_EMBED_EMU_SLOTS": "1"}, 1),
        ({"NPU_EMBED_EMU_SLOTS": "3"}, 3),
        ({"NPU_EMBED_EMU_SLOTS": "20"}, 20),
    ],
)
def test_a_device_has_as_many_contexts_as_its_generation_or_the_setting(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    limit: int,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    alive = contexts(tmp_path, limit)
    with pytest.raises(RuntimeError, match=NO_SLOT) as error:
        contexts(tmp_path, 1)
    assert type(error.value) is RuntimeError
    del alive[0]
    alive += contexts(tmp_path, 1)


def test_the_older_generation_has_six(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", "npu1")
    _alive = contexts(tmp_path, 6)
    with pytest.raises(RuntimeError, match=NO_SLOT):
        contexts(tmp_path, 1)


def test_devices_of_one_process_share_the_slots(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "2")
    one, two = contexts(tmp_path, 1), contexts(tmp_path, 1)
    with pytest.raises(RuntimeError, match=NO_SLOT):
        contexts(tmp_path, 1)
    del one, two


def test_a_folder_has_one_table_however_it_is_spelled(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    table = slots.table(folder)
    assert slots.table(tmp_path / "link" / "slots") is table
    assert slots.table(folder / ".." / "slots") is table


# -- processes ------------------------------------------------------------------------------------


def test_another_process_counts(folder: Path) -> None:
    table = slots.table(folder)
    with another_process(folder, 4, 3) as process:
        assert held(process) == [0, 1, 2]
        assert table.acquire(4) == 3
        assert table.acquire(4) is None
        assert table.holders(4) == {0: process.pid, 1: process.pid, 2: process.pid, 3: os.getpid()}
    table.release(3)


def test_a_slot_given_back_is_another_processs_to_take(folder: Path) -> None:
    table = slots.table(folder)
    assert [table.acquire(2), table.acquire(2)] == [0, 1]
    table.release(0)
    with another_process(folder, 2, 2) as process:
        assert held(process) == [0]
    table.release(1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_frees_its_slots_at_once(folder: Path, how: signal.Signals) -> None:
    table = slots.table(folder)
    with another_process(folder, 2, 2) as process:
        assert held(process) == [0, 1]
        assert table.acquire(2) is None
        process.send_signal(how)
        process.wait()
        assert table.holders(2) == {}
        assert [table.acquire(2), table.acquire(2)] == [0, 1]
    table.release(0)
    table.release(1)


def test_a_process_that_ends_frees_its_slots(folder: Path) -> None:
    with another_process(folder, 2, 2) as process:
        assert held(process) == [0, 1]
        process.communicate("\n")
        assert process.returncode == 0
        assert slots.table(folder).holders(2) == {}


@pytest.mark.slow
def test_racing_processes_never_hold_the_same_slot(folder: Path) -> None:
    with (
        another_process(folder, 8, 5) as one,
        another_process(folder, 8, 5) as two,
    ):
        found = [held(one), held(two)]
        assert len(found[0]) + len(found[1]) == 8
        assert not set(found[0]) & set(found[1])


# Python warns where native threads (BLAS has some) could hold a lock that the child needs.
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@FORKS
def test_a_forked_child_neither_owns_nor_frees_its_parents_slots(folder: Path) -> None:
    table = slots.table(folder)
    assert table.acquire(2) == 0
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            seen = table.holders(2) == {0: os.getppid()}
            table.release(0)
            found = f"{seen} {table.acquire(2)} {table.acquire(2)}"
            os.write(writes, found.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    assert os.read(reads, 100) == b"True 1 None"
    os.close(reads)
    assert table.holders(2) == {0: os.getpid()}, "the child's own slot went with it"
    table.release(0)


@FORKS
def test_a_forked_childs_copies_of_contexts_free_nothing_and_run_nothing(
    folder: Path, tmp_path: Path
) -> None:
    (loaded,) = contexts(tmp_path, 1)
    pending = loaded.run()
    pending.start()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = "started"
        try:
            loaded.run().start()
        except RuntimeError as error:
            said = str(error)
        try:
            del pending, loaded
            os.write(writes, said.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    assert b"EXEC_CMD IOCTL failed" in os.read(reads, 1000)
    os.close(reads)
    assert slots.table(folder).holders(16) == {0: os.getpid()}
    assert pending.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED


@FORKS
def test_the_array_is_switched_between_contexts_of_all_processes(folder: Path) -> None:
    table = slots.table(folder)
    assert table.take_the_array(1)
    assert not table.take_the_array(1)
    assert table.take_the_array(2)
    child = os.fork()
    if child == 0:
        table.take_the_array(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert table.take_the_array(2)


# -- the folder -----------------------------------------------------------------------------------


def test_any_user_may_share_the_folder(folder: Path) -> None:
    slots.table(folder)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "slots").stat().st_mode & 0o777 == 0o666


def a_file(folder: Path) -> None:
    folder.write_text("in the way")


def a_link(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    target.mkdir()
    folder.symlink_to(target)


def a_dangling_link(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def a_link_as_table(folder: Path) -> None:
    folder.mkdir()
    victim = folder.parent / "victim"
    victim.write_text("precious")
    (folder / "slots").symlink_to(victim)


def a_fifo_as_table(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "slots")


def a_folder_as_table(folder: Path) -> None:
    (folder / "slots").mkdir(parents=True)


@pytest.mark.parametrize(
    "obstacle",
    [a_file, a_link, a_dangling_link, a_link_as_table, a_fifo_as_table, a_folder_as_table],
)
def test_what_lies_in_the_tables_place_is_left_alone(folder: Path, obstacle: object) -> None:
    assert callable(obstacle)
    obstacle(folder)
    with pytest.raises(RuntimeError, match="emulated NPU: no slot table"):
        pyxrt.device(0)
    victim = folder.parent / "victim"
    assert not victim.exists() or victim.read_text() == "precious"
    assert not (folder.parent / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.mkdir(mode=0o555)
    with pytest.raises(RuntimeError, match="emulated NPU: no slot table"):
        pyxrt.device(0)


def test_a_table_cut_short_is_filled_up(folder: Path) -> None:
    folder.mkdir()
    (folder / "slots").write_bytes(b"x")
    table = slots.table(folder)
    assert table.acquire(1) == 0
    assert table.take_the_array(1)
    table.release(0)


# -- the end of a process -------------------------------------------------------------------------

ENDS = {
    "with contexts open": "",
    "with a command in flight": "run.start()",
    "in a hang": "run = loaded.run(loaded.design.hanging); run.start(); run.wait(10)",
    "by an exception": "raise SystemExit(7)",
    "in a cycle": "loaded.self = loaded; del loaded",
}
PROGRAM = """
import sys
from pathlib import Path
from boards import Loaded, copying_design
from npu_embed.emulator import pyxrt
loaded = Loaded(pyxrt, pyxrt.device(0), copying_design(Path(sys.argv[1])))
run = loaded.run()
run.start()
assert run.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_at_once_and_frees_all(folder: Path, tmp_path: Path, end: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ENDS[end], str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (7 if "raise" in ENDS[end] else 0), done.stderr
    if "start" not in ENDS[end]:
        assert done.stderr == ""
    assert time.monotonic() - start < 30
    assert slots.table(folder).holders(16) == {}


def test_release_of_what_is_not_held_is_nothing(folder: Path) -> None:
    table = slots.table(folder)
    table.release(3)
    with another_process(folder, 4, 4) as process:
        assert held(process) == [0, 1, 2, 3]
        table.release(3)
        assert table.acquire(4) is None


def test_a_table_cut_short_while_it_is_used_is_no_bus_error(folder: Path) -> None:
    table = slots.table(folder)
    assert table.take_the_array(1)
    os.truncate(folder / "slots", 0)
    assert table.take_the_array(1)
    assert not table.take_the_array(1)
    assert table.acquire(16) == 0
    table.release(0)


def test_a_table_removed_by_a_cleaner_is_followed_to_the_new_one(folder: Path) -> None:
    table = slots.table(folder)
    assert table.acquire(16) == 0
    (folder / "slots").unlink()
    with another_process(folder, 16, 2) as process:  # makes the table anew
        assert held(process) == [0, 1]
        assert table.acquire(16) == 2
        assert table.holders(16) == {0: os.getpid(), 1: process.pid, 2: os.getpid()}
        table.release(0)  # through the old table
        assert table.holders(16) == {0: process.pid, 1: process.pid, 2: os.getpid()}
        table.release(2)
        assert table.holders(16) == {0: process.pid, 1: process.pid}


def test_a_slot_of_a_removed_table_is_given_back_there(folder: Path) -> None:
    table = slots.table(folder)
    assert [table.acquire(16), table.acquire(16)] == [0, 1]
    old = table._fd
    (folder / "slots").unlink()
    assert table.acquire(16) == 2
    table.release(0)
    ask = (
        "from npu_embed.emulator.slots import *\n"
        f"print([lock_holder({old}, FIRST_SLOT_OFFSET + s, 1) for s in range(3)])"
    )
    told = subprocess.run([sys.executable, "-c", ask], pass_fds=[old], capture_output=True)
    assert told.stdout.decode().strip() == f"[None, {os.getpid()}, None]"
    table.release(1)  # the last one there
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    table.release(2)


def test_a_table_removed_with_its_folder_is_made_anew(folder: Path) -> None:
    table = slots.table(folder)
    shutil.rmtree(folder)
    assert table.acquire(16) == 0
    assert (folder / "slots").is_file()
    table.release(0)
