"""Python, this package, and its settings."""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Callable

import numpy as np

from .. import settings
from ..api import __version__
from ..errors import SettingError
from .findings import Finding, passed
from .machine import Machine

PREFIX = "NPU_EMBED_"

_READERS: tuple[Callable[[], object], ...] = (
    settings.device,
    settings.bundle,
    settings.cache_dir,
    settings.timeout_ms,
    settings.eviction,
    settings.runlists,
    settings.verify,
    settings.slot_wait_ms,
    settings.idle_release_ms,
    settings.kernels_dir,
    settings.compiled,
    settings.debug,
    settings.trace_file,
    settings.emulator_profile,
    lambda: settings.emulator_slots(1),
    settings.emulator_mode,
    settings.emulator_seed,
    settings.emulator_dir,
)


def check_python(machine: Machine) -> Finding:
    """What runs: always a PASS, for the record."""
    version = ".".join(map(str, machine.python))
    return passed(
        "python",
        f"Python {version} ({sys.executable}), npu-embed {__version__}, numpy {np.__version__}, "
        f"Linux {machine.kernel}, {platform.machine()}",
        python=version,
        executable=sys.executable,
        npu_embed=__version__,
        numpy=np.__version__,
        kernel=machine.kernel,
        architecture=platform.machine(),
    )


def check_settings(machine: Machine) -> Finding:
    """Whether every NPU_EMBED_* variable that is set is one, with a value it accepts."""
    names = sorted(name for name in machine.environ if name.startswith(PREFIX))
    for reader in _READERS:
        try:
            reader()
        except SettingError as error:
            return Finding("settings", "FAIL", "refused", str(error).rstrip("."))
    for name in names:
        if name in settings.VARIABLES:
            continue
        near = difflib.get_close_matches(name, settings.VARIABLES, n=1)
        return Finding(
            "settings",
            "WARN",
            "unknown",
            f"{name} means nothing",
            f"perhaps {near[0]}" if near else "a variable of docs/environment.md",
            "correct or unset it",
            {"names": names},
        )
    if faults := settings.emulator_faults():
        return Finding(
            "settings",
            "WARN",
            "faults",
            f"NPU_EMBED_EMU_FAULTS is {faults}: runs on the emulated NPU fail on purpose",
            "it unset, but in tests",
            "unset it",
            {"names": names},
        )
    # Not their values: one of them is a key.
    return passed("settings", f"set: {', '.join(names) or 'none'}", names=names)
