"""pyxrt.device and pyxrt.hw_context: the emulated NPU and a slot of it."""

from __future__ import annotations

import errno
import operator
import os

from . import xclbin as container
from .enums import access_mode, xrt_info_device
from .hardware import Context, EmulatedNpu, ShimError
from .program import NoArrayProgram
from .pyxrt_xclbin import INVALID_ARGUMENT, uuid, xclbin


class device:
    """The emulated NPU."""

    def __init__(self, index: int | str = 0) -> None:
        if isinstance(index, str):
            raise RuntimeError(f"Invalid device string '{index}': {INVALID_ARGUMENT}")
        if operator.index(index) != 0:
            raise RuntimeError(f"No such device with index '{index}'")
        try:
            self._npu = EmulatedNpu()
        except OSError as error:
            raise RuntimeError(f"emulated NPU: no slot table: {error}") from error
        self._registered: dict[str, container.Xclbin] = {}

    def register_xclbin(self, file: xclbin) -> uuid:
        """Make an xclbin known; its uuid names it from then on."""
        if not isinstance(file, xclbin):
            raise TypeError("register_xclbin(): incompatible function arguments.")
        self._registered[file._parsed.uuid] = file._parsed
        return file.get_uuid()

    def load_xclbin(self, file: xclbin | str) -> uuid:
        """Fail as the NPU's driver does: a whole-device load is for other devices."""
        raise RuntimeError(f"load_axlf: {os.strerror(errno.EOPNOTSUPP)}")

    def get_xclbin_uuid(self) -> uuid:
        """The null uuid: no xclbin is loaded device-wide on an NPU."""
        return uuid("00000000-0000-0000-0000-000000000000")

    def get_info(self, key: xrt_info_device) -> str:
        """A fact about the device as text."""
        if not isinstance(key, xrt_info_device):
            raise TypeError("get_info(): incompatible function arguments.")
        if self._npu.gone:
            raise RuntimeError(f"Failed to read {key}: {os.strerror(errno.ENODEV)}")
        profile = self._npu.profile
        facts = {"name": profile.device_name, "bdf": "emulated", "offline": "false"}
        return facts.get(str(key).rpartition(".")[2], "")

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Real seconds spent computing, by array program; the real module has no such thing."""
        with self._npu.lock:
            return dict(self._npu.busy_seconds)


class hw_context:
    """A hardware context: one of the NPU's slots, for one xclbin.

    hw_context(device, uuid), or in the newer spellings hw_context(device, xclbin) and
    hw_context(device, path), each with an optional mode or configuration that an NPU ignores.
    """

    access_mode = access_mode

    def __init__(self, *args: object) -> None:
        self._context: Context | None = None
        self._kernels: tuple[container.KernelInfo, ...] = ()
        if not args:
            return
        if len(args) not in (2, 3) or not isinstance(args[0], device):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.hw_context()\n    2. pyxrt.hw_context(arg0: pyxrt.device"
                ", arg1: pyxrt.uuid)"
            )
        owner, what = args[0], args[1]
        if isinstance(what, str):
            what = xclbin(what)
        if isinstance(what, xclbin):
            what = owner.register_xclbin(what)
        if not isinstance(what, uuid):
            raise TypeError("__init__(): incompatible constructor arguments.")
        parsed = owner._registered.get(what.to_string())
        if parsed is None:
            raise RuntimeError(f"No xclbin with uuid '{what.to_string()}': {INVALID_ARGUMENT}")
        try:
            self._context = owner._npu.create_context(parsed)
        except ShimError as error:
            raise RuntimeError(str(error)) from None
        except NoArrayProgram as error:
            raise RuntimeError(f"emulated NPU: {error}") from error
        except ValueError as error:
            raise RuntimeError(f"{error}: {INVALID_ARGUMENT}") from error
        self._device = owner
        self._parsed = parsed

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context is not None:
            context.destroy()
