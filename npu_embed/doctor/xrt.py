"""XRT, its plugin for the NPU, and whether their versions and the driver's fit together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding, Status, passed
from .hardware import DRIVER
from .machine import Machine

OLDEST = (2, 16)  # the first with hw_context in pyxrt
LISTS_SINCE = "2.20"  # the first with runlist
XRT_FOLDER = "/opt/xilinx/xrt"
CORE = "libxrt_coreutil.so"
PLUGIN = "libxrt_driver_xdna.so"
_FOLDERS = (
    f"{XRT_FOLDER}/lib",
    f"{XRT_FOLDER}/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib64",
)
_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library: its folder in the system, and its version where the file's name tells."""

    folder: str
    version: str | None


def find_library(machine: Machine, name: str) -> Library | None:
    """A library of XRT where packages put it; below XILINX_XRT first."""
    own = machine.environ.get("XILINX_XRT")
    folders = [f"{own}/lib", f"{own}/lib64"] if own else []
    for folder in (*folders, *_FOLDERS):
        files = sorted(machine.path(folder).glob(f"{name}*"))
        if files:
            return Library(folder, _version(files))
    return None


def _version(files: list[Path]) -> str | None:
    """The longest version in the names of files, or of what they link to."""
    names = [file.name for file in files] + [file.resolve().name for file in files]
    found = [match[1] for name in names if (match := _VERSION.search(name))]
    return max(found, key=len, default=None)


def check_xrt(machine: Machine, bad: Status) -> Finding:
    """Whether XRT is installed, new enough, and has a plugin of its version for the NPU."""
    core, plugin = find_library(machine, CORE), find_library(machine, PLUGIN)
    if core is None:
        return Finding(
            "xrt",
            bad,
            "missing",
            f"no {CORE}",
            f"XRT {OLDEST[0]}.{OLDEST[1]} or later with its amdxdna plugin",
            "install both from AMD's or your distribution's packages (xrt-base, xrt-npu and "
            "xrt_plugin-amdxdna; Arch: xrt, xrt-plugin-amdxdna)",
        )
    shown = f"XRT {core.version or 'of unknown version'} in {core.folder}"
    facts = {"version": core.version, "plugin": plugin.version if plugin else None}
    if core.version and _parts(core.version) < OLDEST:
        return Finding(
            "xrt",
            bad,
            "too-old",
            shown,
            f"{OLDEST[0]}.{OLDEST[1]} or later ({LISTS_SINCE} for runlists)",
            "install a newer XRT with its amdxdna plugin",
            facts,
        )
    if plugin is None:
        return Finding(
            "xrt",
            bad,
            "no-plugin",
            f"{shown}, no {PLUGIN}",
            "its amdxdna plugin, without which it sees no NPU",
            "install the package xrt_plugin-amdxdna (Arch: xrt-plugin-amdxdna) of that version",
            facts,
        )
    return _check_versions(machine, core, plugin, shown, facts)


def _check_versions(
    machine: Machine,
    core: Library,
    plugin: Library,
    shown: str,
    facts: dict[str, str | None],
) -> Finding:
    """Whether XRT, plugin and a driver that AMD's package brought are of one version."""
    driver = machine.text(f"/sys/module/{DRIVER}/version")
    facts = {**facts, "driver": driver}
    if core.version and plugin.version and _parts(core.version) != _parts(plugin.version):
        return Finding(
            "xrt",
            "WARN",
            "plugin-differs",
            f"{shown}, plugin {plugin.version}",
            "both of one version",
            "install both anew from the same source",
            facts,
        )
    # The kernel's own driver has no version; AMD's has XRT's: 2.21.0_20251207 or 2.21.260102.53.
    if driver and plugin.version and _parts(driver)[:1] == _parts(plugin.version)[:1]:
        if _parts(driver) != _parts(plugin.version):
            return Finding(
                "xrt",
                "WARN",
                "driver-differs",
                f"plugin {plugin.version}, driver {driver}",
                "both of one version",
                "install AMD's package of plugin and driver anew, then reboot",
                facts,
            )
    return passed("xrt", f"{shown}, plugin {plugin.version or 'of unknown version'}", **facts)


def _parts(version: str) -> tuple[int, ...]:
    """Major and minor version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
