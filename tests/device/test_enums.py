"""Enumerations have pybind11's manners: they look like integers and are none."""

from __future__ import annotations

import pytest
from boards import Xrt

FLAGS = {
    "normal": 0,
    "cacheable": 1 << 24,
    "svm": 1 << 27,
    "device_only": 1 << 28,
    "host_only": 1 << 29,
    "p2p": 1 << 30,
}
STATES = {
    "NEW": 1,
    "QUEUED": 2,
    "COMPLETED": 4,
    "ERROR": 5,
    "ABORT": 6,
    "SUBMITTED": 7,
    "TIMEOUT": 8,
    "NORESPONSE": 9,
    "SKERROR": 10,
    "SKCRASHED": 11,
}
DIRECTIONS = {"TO_DEVICE": 0, "FROM_DEVICE": 1}


def test_a_member_is_no_integer_but_converts_to_one(xrt: Xrt) -> None:
    assert int(xrt.bo.host_only) == 1 << 29
    assert xrt.bo.host_only != 1 << 29
    assert not isinstance(xrt.bo.host_only, int)
    assert len({xrt.bo.host_only, xrt.bo.flags.host_only, xrt.bo.cacheable}) == 2


@pytest.mark.parametrize(("name", "value"), FLAGS.items())
def test_buffer_flags_are_members_of_bo_too(xrt: Xrt, name: str, value: int) -> None:
    assert int(getattr(xrt.bo, name)) == value
    assert getattr(xrt.bo, name) == getattr(xrt.bo.flags, name)
    assert getattr(xrt.bo.flags, name).name == name


@pytest.mark.parametrize(("name", "value"), STATES.items())
def test_command_states_have_their_numbers(xrt: Xrt, name: str, value: int) -> None:
    state = getattr(xrt.ert_cmd_state, f"ERT_CMD_STATE_{name}")
    assert int(state) == value
    assert xrt.ert_cmd_state(value) == state


def test_running_is_a_state_without_a_name(xrt: Xrt) -> None:
    assert not hasattr(xrt.ert_cmd_state, "ERT_CMD_STATE_RUNNING")
    assert int(xrt.ert_cmd_state(3)) == 3
    assert "???" in repr(xrt.ert_cmd_state(3))


@pytest.mark.parametrize(("name", "value"), DIRECTIONS.items())
def test_directions_print_as_pybind11_prints_them(xrt: Xrt, name: str, value: int) -> None:
    member = getattr(xrt.xclBOSyncDirection, f"XCL_BO_SYNC_BO_{name}")
    assert str(member) == f"xclBOSyncDirection.XCL_BO_SYNC_BO_{name}"
    assert repr(member) == f"<xclBOSyncDirection.XCL_BO_SYNC_BO_{name}: {value}>"


def test_an_enumeration_lists_its_members(xrt: Xrt) -> None:
    assert set(xrt.ert_cmd_state.__members__) == {f"ERT_CMD_STATE_{name}" for name in STATES}
    assert set(xrt.bo.flags.__members__) >= set(FLAGS)
    assert list(xrt.cu_access_mode.__members__) == ["exclusive", "shared", "none"]


def test_members_of_different_enumerations_are_never_equal(xrt: Xrt) -> None:
    assert xrt.xclBOSyncDirection(0) != xrt.bo.normal


def test_a_member_cannot_be_changed_or_ordered(xrt: Xrt) -> None:
    with pytest.raises(AttributeError):
        xrt.bo.host_only.value = 3
    with pytest.raises(TypeError):
        _ = xrt.bo.host_only < xrt.bo.p2p


@pytest.mark.parametrize("value", ["0", 1.0, None])
def test_only_an_integer_makes_a_member(xrt: Xrt, value: object) -> None:
    with pytest.raises(TypeError):
        xrt.ert_cmd_state(value)


def test_a_member_called_name_hides_no_other_members_name(xrt: Xrt, device: Xrt) -> None:
    assert "name" in xrt.xrt_info_device.__members__
    assert "xrt_info_device.name" in repr(xrt.xrt_info_device.name)
    assert "xrt_info_device.bdf" in repr(xrt.xrt_info_device.bdf)
    assert device.get_info(xrt.xrt_info_device.name)


def test_message_levels_are_names_of_the_module(xrt: Xrt) -> None:
    assert int(xrt.warning) == int(xrt.xrt_msg_level.warning)
    assert int(xrt.XCL_BO_FLAGS_NONE) == 0
