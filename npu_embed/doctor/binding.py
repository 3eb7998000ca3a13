"""pyxrt: the ways in which an import of it, and of the device behind it, can fail."""

from __future__ import annotations

import re
from pathlib import Path

from .findings import Finding, Status, passed
from .machine import Machine
from .probe import PyxrtProbe
from .xrt import LISTS_SINCE, OLDEST, XRT_FOLDER

_PYTHON_FOLDERS = (
    f"{XRT_FOLDER}/python",
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3/site-packages",
    "/usr/local/lib/python3/dist-packages",
)
_TAG = re.compile(r"\.cpython-(\d)(\d+)")
# What an extension of another Python says when it is loaded: pybind11's own words, the name its
# file should export, a function of Python that is not there, Python's library itself.
_OTHER_PYTHON = (
    re.compile(r"compiled for Python (?P<version>\d+\.\d+)"),
    re.compile(r"module export function \(PyInit_"),
    re.compile(r"undefined symbol: _?Py[A-Z_]"),
    re.compile(r"libpython(?P<version>3\.\d+)"),
)
_NO_LIBRARY = re.compile(r"(\S+\.so\S*): cannot open shared object file")
_OTHER_SYSTEM = re.compile(r"version [`'](G\w+_[\d.]+)' not found")
_MEMLOCK = re.compile(r"mmap\(.*Resource temporarily unavailable")
_BUILD = "build XRT's pyxrt for this Python, or run npu-embed with the Python it is for"


def check_pyxrt(machine: Machine, probe: PyxrtProbe, bad: Status) -> Finding:
    """Whether pyxrt can be imported, is new enough, and opens a device."""
    facts = {"stage": probe.stage, "file": probe.file, "error": probe.error, "text": probe.text}
    if probe.error == "timeout":
        return Finding(
            "pyxrt",
            bad,
            "hangs",
            f"{_doing(probe)} did not end in time",
            "an answer within seconds",
            "see whether the NPU is stuck: `sudo dmesg | grep amdxdna`; reboot if it is",
            facts,
        )
    if probe.stage == "import":
        return _not_imported(machine, probe, bad, facts)
    if "hw_context" not in probe.names:
        return _too_old(probe, bad, facts)
    if probe.devices == 0:
        return Finding(
            "pyxrt",
            bad,
            "no-device",
            "sees no device",
            "the NPU",
            "see `xrt` (its plugin), `node` and `driver`",
            facts,
        )
    if probe.stage == "close":
        return Finding(
            "pyxrt",
            "WARN",
            "crashes-at-exit",
            f"opens {probe.name}, then ends Python with {probe.error} when it leaves",
            "a quiet exit",
            "install XRT and its plugin of one version; results are not touched by it",
            {**facts, "device": probe.name},
        )
    if probe.stage != "done":
        return _not_opened(probe, bad, facts)
    shown = f"{probe.file}, device 0 is {probe.name}"
    if "runlist" not in probe.names:
        return Finding(
            "pyxrt",
            "WARN",
            "no-runlist",
            f"{shown}; no runlist",
            f"XRT {LISTS_SINCE} or later",
            "runs are submitted one by one; a newer XRT submits them as lists",
            {**facts, "device": probe.name},
        )
    return passed("pyxrt", shown, **facts, device=probe.name)


def _doing(probe: PyxrtProbe) -> str:
    return {
        "import": "an import",
        "enumerate": "counting devices",
        "open": "opening device 0",
    }.get(probe.stage, "leaving")


def _not_imported(
    machine: Machine, probe: PyxrtProbe, bad: Status, facts: dict[str, str]
) -> Finding:
    ours = ".".join(map(str, machine.python))
    if probe.error == "ModuleNotFoundError" and probe.module == "pyxrt":
        return _not_on_path(machine, bad, facts)
    said = f"not importable: {probe.text or probe.error}"
    for pattern in _OTHER_PYTHON:
        if match := pattern.search(probe.text):
            theirs = match.groupdict().get("version") or "another Python"
            return Finding(
                "pyxrt", bad, "other-python", said, f"one for Python {ours}", _BUILD,
                {**facts, "built_for": theirs},
            )  # fmt: skip
    if match := _NO_LIBRARY.search(probe.text):
        return Finding(
            "pyxrt",
            bad,
            "no-library",
            said,
            f"{match[1]} on the loader's path",
            f"`source {XRT_FOLDER}/setup.sh`, or name its folder in /etc/ld.so.conf.d and run "
            "`sudo ldconfig`",
            facts,
        )
    if match := _OTHER_SYSTEM.search(probe.text):
        return Finding(
            "pyxrt",
            bad,
            "other-system",
            said,
            f"a system with {match[1]}",
            "install the XRT packages of this distribution's release",
            facts,
        )
    if not probe.text:
        return Finding(
            "pyxrt",
            bad,
            "crashes",
            f"an import of it ends Python with {probe.error}",
            f"a pyxrt for Python {ours} and this XRT",
            _BUILD,
            facts,
        )
    return Finding(
        "pyxrt", bad, "not-importable", f"{said} ({probe.error})", "XRT's module",
        "install XRT anew", facts,
    )  # fmt: skip


def _not_on_path(machine: Machine, bad: Status, facts: dict[str, str]) -> Finding:
    """Pyxrt was not found; there may be one for another Python, or in a folder not searched."""
    ours = "".join(map(str, machine.python))
    shown = ".".join(map(str, machine.python))
    known = (*machine.import_path, *(machine.path(folder) for folder in _PYTHON_FOLDERS))
    files = [file for folder in known for file in sorted(folder.glob("pyxrt*.so"))]
    fitting = [f for f in files if _built_for(f) in (None, ours)]
    if fitting:
        return Finding(
            "pyxrt",
            bad,
            "not-on-path",
            f"{fitting[0]}, where this Python does not look",
            "it on the import path",
            f"`export PYTHONPATH={fitting[0].parent}` (`source {XRT_FOLDER}/setup.sh` does that)",
            {**facts, "files": [str(f) for f in files]},
        )
    if files:
        built_for = _built_for(files[0]) or ""
        theirs = f"{built_for[:1]}.{built_for[1:]}"
        return Finding(
            "pyxrt",
            bad,
            "other-python",
            f"{files[0]} is for Python {theirs}",
            f"one for Python {shown}",
            _BUILD,
            {**facts, "built_for": theirs, "files": [str(f) for f in files]},
        )
    return Finding(
        "pyxrt",
        bad,
        "missing",
        "no module pyxrt",
        f"XRT's, for Python {shown}",
        "install XRT with its Python package and put its folder on PYTHONPATH; in a virtual "
        "environment, the system's is not seen",
        facts,
    )


def _built_for(file: Path) -> str | None:
    """`312` of a file for Python 3.12; None where the name does not tell."""
    match = _TAG.search(file.name)
    return match[1] + match[2] if match else None


def _too_old(probe: PyxrtProbe, bad: Status, facts: dict[str, str]) -> Finding:
    if "device" not in probe.names:
        return Finding(
            "pyxrt",
            bad,
            "not-xrt",
            f"{probe.file} has no device",
            "XRT's module of that name",
            "rename that file, or take its folder off PYTHONPATH",
            facts,
        )
    return Finding(
        "pyxrt",
        bad,
        "too-old",
        f"{probe.file} has no hw_context",
        f"XRT {OLDEST[0]}.{OLDEST[1]} or later ({LISTS_SINCE} for runlists)",
        "install a newer XRT with its amdxdna plugin",
        facts,
    )


def _not_opened(probe: PyxrtProbe, bad: Status, facts: dict[str, str]) -> Finding:
    said = f'{_doing(probe)} fails: "{probe.text}"' if probe.text else ""
    if _MEMLOCK.search(probe.text):
        return Finding("pyxrt", bad, "memlock", said, "memory to lock", "see `memlock`", facts)
    if probe.text:
        return Finding(
            "pyxrt",
            bad,
            "not-opened",
            said,
            "an open device",
            "see `node`, `driver` and `xrt`; `xrt-smi examine` says more",
            facts,
        )
    return Finding(
        "pyxrt",
        bad,
        "crashes",
        f"{_doing(probe)} ends Python with {probe.error}",
        "an open device",
        "install XRT, its plugin and the driver of one version; see `xrt`",
        facts,
    )
