"""Enumerations with pybind11's manners: no integers, but convertible to one.

`bo.host_only == 1 << 29` is False and an int is no member where a member is wanted, as in the
real module; programs that rely on the opposite fail there, so they fail here.
"""

from __future__ import annotations

from typing import ClassVar


class PybindEnum:
    """Base of the enumerations; a class statement's `_values_` become its members."""

    _values_: ClassVar[dict[str, int]] = {}
    __members__: ClassVar[dict[str, PybindEnum]] = {}
    # Not `name`: a member of that name (xrt_info_device has one) would take the slot's place.
    __slots__ = ("_label", "value")

    _label: str
    value: int

    @property
    def name(self) -> str:
        """The member's name, `???` for a value without one."""
        return self._label

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__members__ = {}
        for name, value in cls._values_.items():
            member = cls(value)
            cls.__members__[name] = member
            setattr(cls, name, member)

    def __init__(self, value: int) -> None:
        if type(value) is not int:
            raise TypeError(
                f"__init__(): incompatible constructor arguments. The following argument types are "
                f"supported:\n    1. {type(self).__name__}(value: int)"
            )
        names = [n for n, v in self._values_.items() if v == value]
        object.__setattr__(self, "_label", names[0] if names else "???")
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"can't set attribute '{name}'")

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self._label}: {self.value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self._label}"


class xclBOSyncDirection(PybindEnum):
    """Which side of a buffer a sync makes current."""

    _values_: ClassVar[dict[str, int]] = {
        "XCL_BO_SYNC_BO_TO_DEVICE": 0,
        "XCL_BO_SYNC_BO_FROM_DEVICE": 1,
        "XCL_BO_SYNC_BO_GMIO_TO_AIE": 2,
        "XCL_BO_SYNC_BO_AIE_TO_GMIO": 3,
    }
    XCL_BO_SYNC_BO_TO_DEVICE: ClassVar[xclBOSyncDirection]
    XCL_BO_SYNC_BO_FROM_DEVICE: ClassVar[xclBOSyncDirection]


class ert_cmd_state(PybindEnum):
    """State of a command; RUNNING (3) exists but has no name, as in the real module."""

    _values_: ClassVar[dict[str, int]] = {
        "ERT_CMD_STATE_NEW": 1,
        "ERT_CMD_STATE_QUEUED": 2,
        "ERT_CMD_STATE_COMPLETED": 4,
        "ERT_CMD_STATE_ERROR": 5,
        "ERT_CMD_STATE_ABORT": 6,
        "ERT_CMD_STATE_SUBMITTED": 7,
        "ERT_CMD_STATE_TIMEOUT": 8,
        "ERT_CMD_STATE_NORESPONSE": 9,
        "ERT_CMD_STATE_SKERROR": 10,
        "ERT_CMD_STATE_SKCRASHED": 11,
    }
    ERT_CMD_STATE_NEW: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_QUEUED: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_COMPLETED: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_ERROR: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_ABORT: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_SUBMITTED: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_TIMEOUT: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_NORESPONSE: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_SKERROR: ClassVar[ert_cmd_state]
    ERT_CMD_STATE_SKCRASHED: ClassVar[ert_cmd_state]


class cu_access_mode(PybindEnum):
    """How a kernel shares its compute unit; accepted and ignored by the NPU's driver."""

    _values_: ClassVar[dict[str, int]] = {"exclusive": 0, "shared": 1, "none": 2}


class access_mode(PybindEnum):
    """How a context shares its partition; accepted and ignored by the NPU's driver."""

    _values_: ClassVar[dict[str, int]] = {"exclusive": 0, "shared": 1}
    exclusive: ClassVar[access_mode]
    shared: ClassVar[access_mode]


class bo_flags(PybindEnum):
    """Kinds of buffer memory."""

    _values_: ClassVar[dict[str, int]] = {
        "normal": 0,
        "cacheable": 1 << 24,
        "svm": 1 << 27,
        "device_only": 1 << 28,
        "host_only": 1 << 29,
        "p2p": 1 << 30,
    }
    normal: ClassVar[bo_flags]
    cacheable: ClassVar[bo_flags]
    svm: ClassVar[bo_flags]
    device_only: ClassVar[bo_flags]
    host_only: ClassVar[bo_flags]
    p2p: ClassVar[bo_flags]


bo_flags.__name__ = "flags"


class xrt_info_device(PybindEnum):
    """What device.get_info can be asked."""

    _values_: ClassVar[dict[str, int]] = {
        name: value
        for value, name in enumerate(
            (
                "bdf",
                "interface_uuid",
                "kdma",
                "max_clock_frequency_mhz",
                "m2m",
                "name",
                "nodma",
                "offline",
                "electrical",
                "thermal",
                "mechanical",
                "memory",
                "platform",
                "pcie_info",
                "host",
                "aie",
                "aie_shim",
                "dynamic_regions",
                "vmr",
            )
        )
    }


class xrt_msg_level(PybindEnum):
    """Severity of a log message."""

    _values_: ClassVar[dict[str, int]] = {
        "emergency": 0,
        "alert": 1,
        "critical": 2,
        "error": 3,
        "warning": 4,
        "notice": 5,
        "info": 6,
        "debug": 7,
    }
