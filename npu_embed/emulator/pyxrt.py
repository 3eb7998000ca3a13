"""pyxrt, on the emulated NPU: `import npu_embed.emulator.pyxrt as pyxrt`.

The calls that every pyxrt from XRT 2.16 on has, positionally, and the later ones the engine
detects (runlist, wait2, a buffer or context from newer arguments). Errors are plain
RuntimeError, IndexError and TypeError with XRT's words, as Python sees them from the real
module.

Where the real module is silent and the result is garbage, this one raises, and says "emulated
NPU" in the text: an argument that is no buffer and no int, a buffer in a bank its argument is
not connected to, more buffers than the firmware takes, a sub-buffer of a sub-buffer, a strided
write. docs/emulator.md lists what is not modelled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .enums import (
    access_mode,
    cu_access_mode,
    ert_cmd_state,
    xclBOSyncDirection,
    xrt_info_device,
    xrt_msg_level,
)
from .pyxrt_bo import bo
from .pyxrt_device import device, hw_context
from .pyxrt_run import kernel, run
from .pyxrt_runlist import runlist
from .pyxrt_xclbin import uuid, xclbin

__all__ = [
    "XCL_BO_FLAGS_NONE",
    "access_mode",
    "bo",
    "cu_access_mode",
    "device",
    "enumerate_devices",
    "ert_cmd_state",
    "hw_context",
    "kernel",
    "log_message",
    "run",
    "runlist",
    "uuid",
    "xclBOSyncDirection",
    "xclbin",
    "xrt_info_device",
    "xrt_msg_level",
]

log = logging.getLogger(__name__)

XCL_BO_FLAGS_NONE = 0


def enumerate_devices() -> int:
    """How many devices there are: one, the emulated NPU."""
    return 1


def log_message(level: xrt_msg_level, tag: str, message: str) -> None:
    """Write to the log, as XRT's message interface does."""
    severity = {0: 50, 1: 50, 2: 50, 3: 40, 4: 30, 5: 20, 6: 20}.get(int(level), 10)
    log.log(severity, "[%s] %s", tag, message)


def _export_levels() -> Sequence[str]:
    """The levels at module level, as pybind11's export_values() puts them."""
    globals().update(xrt_msg_level.__members__)
    return tuple(xrt_msg_level.__members__)


__all__ += _export_levels()
