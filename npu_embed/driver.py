"""Driver: the pyxrt module in use, the system's or the emulated one, and what is counted of it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, TypeAlias

from .errors import DeviceError

# pyxrt's objects: its own stub files are wrong in places, so nothing is promised about them.
Xrt: TypeAlias = Any


@dataclass(slots=True)
class Counters:
    """What a session did since it was opened; every field only grows."""

    runs: int = 0
    runlists: int = 0
    switches: int = 0
    swaps: int = 0
    loads: int = 0
    patches: int = 0
    syncs: int = 0
    bytes_to_device: int = 0
    bytes_from_device: int = 0
    rebuilds: int = 0

    def copy(self) -> Counters:
        """The counts of now."""
        return Counters(*(getattr(self, f.name) for f in fields(self)))

    def add(self, other: Counters) -> None:
        """Count what others counted."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(slots=True)
class Driver:
    """A module with pyxrt's API, and what goes with every use of it.

    timeout_ms: how long a run may take.
    """

    xrt: Xrt
    timeout_ms: int
    counters: Counters = field(default_factory=Counters)


def emulated_pyxrt() -> ModuleType:
    """The emulated NPU's module."""
    return importlib.import_module("npu_embed.emulator.pyxrt")


def system_pyxrt() -> ModuleType:
    """The system's pyxrt with a device behind it.

    Raises:
        DeviceError: it is missing, too old, or sees no NPU.
    """
    try:
        module = importlib.import_module("pyxrt")
    except Exception as error:  # a pyxrt of another Python can fail in many ways
        raise DeviceError(
            f"pyxrt: not importable ({type(error).__name__}: {error}), wanted XRT's Python module; "
            "install XRT with its amdxdna plugin and put its python folder on PYTHONPATH"
        ) from error
    missing = [n for n in ("hw_context", "device", "bo", "run") if not hasattr(module, n)]
    if missing:
        raise DeviceError(
            f"pyxrt: has no {missing[0]}, wanted XRT 2.16 or later; install a newer XRT"
        )
    try:
        found = int(module.enumerate_devices()) if hasattr(module, "enumerate_devices") else 1
    except RuntimeError as error:
        raise DeviceError(f"pyxrt: no device can be listed. XRT said: {error}") from error
    if found == 0:
        raise DeviceError("pyxrt: sees no device, wanted an NPU; is the amdxdna driver loaded?")
    return module
