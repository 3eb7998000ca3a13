"""Columns, slots and their holders, as the driver and the emulated NPU's table tell."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from faked_machines import DriverSays, Faked
from rigs import held

from npu_embed.doctor.ioctls import AIE_METADATA, HW_CONTEXTS, RESOURCE_INFO, get_info
from npu_embed.doctor.machine import this_machine
from npu_embed.doctor.slots import check_array, check_emulated_slots, check_slots

NODE = Path("accel0")
REFUSED = OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


@pytest.mark.parametrize("columns", [4, 8])
def test_columns_are_those_the_driver_tells(faked: Faked, columns: int) -> None:
    found = check_array(replace(faked.machine(), query=DriverSays(columns=columns)), NODE)
    assert (found.status, found.facts["columns"]) == ("PASS", columns)


def test_a_driver_that_tells_no_columns_is_no_failure(faked: Faked) -> None:
    query = DriverSays(errors={AIE_METADATA: REFUSED})
    found = check_array(replace(faked.machine(), query=query), NODE)
    assert (found.status, found.situation) == ("WARN", "not-told")
    assert "Operation not supported" in found.found


def test_holders_are_named_with_their_programs(faked: Faked) -> None:
    faked.write("/proc/41/cmdline", "/usr/bin/python3\0-m\0npu_embed\0serve\0--port\0" + "80\0")
    faked.write("/proc/42/comm", "ollama\n")
    found = check_slots(replace(faked.machine(), query=DriverSays(pids=(42, 41, 42, 43))), NODE)
    assert (found.status, found.facts["limit"]) == ("PASS", 16)
    assert found.found == (
        "4 of 16 held: 1 by python3 -m npu_embed serve (41), 2 by ollama (42), "
        "1 by not visible from here (43)"
    )


def test_a_full_npu_warns(faked: Faked) -> None:
    found = check_slots(replace(faked.machine(), query=DriverSays(limit=6, pids=(7,) * 6)), NODE)
    assert (found.status, found.situation) == ("WARN", "full")
    assert "6 of 6 held" in found.found


@pytest.mark.parametrize(
    "query",
    [DriverSays(pids=(7,), errors={RESOURCE_INFO: REFUSED}), DriverSays(limit=0, pids=(7,))],
)
def test_a_limit_the_driver_does_not_tell_is_not_made_up(faked: Faked, query: DriverSays) -> None:
    found = check_slots(replace(faked.machine(), query=query), NODE)
    assert (found.status, found.facts["limit"]) == ("PASS", None)
    assert "tells no limit" in found.found


def test_a_driver_that_tells_no_holders_is_no_failure(faked: Faked) -> None:
    query = DriverSays(errors={HW_CONTEXTS: REFUSED})
    assert check_slots(replace(faked.machine(), query=query), NODE).situation == "not-told"


def test_what_is_no_device_answers_nothing(tmp_path: Path) -> None:
    file = tmp_path / "accel0"
    file.write_bytes(b"")
    with pytest.raises(OSError, match="ioctl"):
        get_info(file, AIE_METADATA, 64)
    with pytest.raises(FileNotFoundError):
        get_info(tmp_path / "none", AIE_METADATA, 64)


# The emulated NPU


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_EMBED_EMU_DIR", str(tmp_path / "emulator"))
    return tmp_path / "emulator"


def test_free_slots_pass(own_table: Path, faked: Faked) -> None:
    found = check_emulated_slots(faked.machine())
    assert (found.status, found.found) == ("PASS", "0 of 16 held")


def test_slots_of_another_process_are_its(
    own_table: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tiny_bundle, 2) as holder:
        found = check_emulated_slots(this_machine())
        assert found.found.startswith("2 of 16 held: 2 by python")
        assert found.found.endswith(f"({holder.pid})")
        assert found.facts["pids"] == [holder.pid]
        monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "2")
        assert check_emulated_slots(this_machine()).situation == "full"


def test_a_table_that_cannot_be_made_fails(own_table: Path, faked: Faked) -> None:
    own_table.write_text("in its place")
    found = check_emulated_slots(faked.machine())
    assert (found.status, found.situation) == ("FAIL", "no-table")
    assert "NPU_EMBED_EMU_DIR" in found.action


def test_this_process_has_a_name() -> None:
    assert str(os.getpid()) in this_machine().process(os.getpid())
