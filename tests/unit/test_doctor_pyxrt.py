"""pyxrt as another process imports it: missing, for another Python, too old, broken, hanging."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faked_machines import ALL_NAMES, WORKING, Faked

from npu_embed.doctor.binding import check_pyxrt
from npu_embed.doctor.findings import Finding
from npu_embed.doctor.probe import PyxrtProbe, probe_pyxrt

STDLIB = sysconfig.get_path("stdlib")
PATH = (STDLIB, sysconfig.get_path("platstdlib"), f"{STDLIB}/lib-dynload")
MISSING = PyxrtProbe("import", "ModuleNotFoundError", "No module named 'pyxrt'", module="pyxrt")


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


def pyxrt(faked: Faked, probe: PyxrtProbe, folder: Path | None = None) -> Finding:
    """What is made of a probe; folder is on the import path."""
    machine = replace(faked.machine(), import_path=() if folder is None else (folder,))
    return check_pyxrt(machine, probe, "FAIL")


def imported(error: str, text: str) -> PyxrtProbe:
    return PyxrtProbe("import", error, text, module="pyxrt")


def test_a_working_pyxrt_passes_and_names_the_device(faked: Faked) -> None:
    found = pyxrt(faked, WORKING)
    assert (found.status, found.found) == ("PASS", "/x/pyxrt.so, device 0 is NPU Strix")


@pytest.mark.parametrize(
    ("text", "situation", "words"),
    [
        (
            "Python version mismatch: module was compiled for Python 3.12, but the interpreter "
            "version is incompatible: 3.11.7 (main, Dec  4 2023, 15:22:56) [GCC 13.2.0].",
            "other-python",
            "one for Python 3.11",
        ),
        (
            "dynamic module does not define module export function (PyInit_pyxrt)",
            "other-python",
            "one for Python 3.11",
        ),
        ("/x/pyxrt.so: undefined symbol: _PyThreadState_UncheckedGet", "other-python", "3.11"),
        ("/x/pyxrt.so: undefined symbol: PyUnicode_FromString", "other-python", "3.11"),
        (
            "libpython3.10.so.1.0: cannot open shared object file: No such file or directory",
            "other-python",
            "3.11",
        ),
        (
            "libxrt_coreutil.so.2: cannot open shared object file: No such file or directory",
            "no-library",
            "libxrt_coreutil.so.2 on the loader's path",
        ),
        (
            "/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found "
            "(required by /x/pyxrt.so)",
            "other-system",
            "GLIBCXX_3.4.32",
        ),
        ("/x/pyxrt.so: undefined symbol: _ZN3xrt6device", "not-importable", "XRT's module"),
    ],
)
def test_an_import_error_is_told_apart_by_its_words(
    faked: Faked, text: str, situation: str, words: str
) -> None:
    found = pyxrt(faked, imported("ImportError", text))
    assert (found.status, found.situation) == ("FAIL", situation)
    assert words in found.wanted
    assert text in found.found


def test_the_python_it_was_built_for_is_a_fact(faked: Faked) -> None:
    probe = imported("ImportError", "libpython3.10.so.1.0: cannot open shared object file")
    assert pyxrt(faked, probe).facts["built_for"] == "3.10"


def test_no_pyxrt_anywhere_is_missing(faked: Faked) -> None:
    found = pyxrt(faked, MISSING)
    assert (found.status, found.situation) == ("FAIL", "missing")


def test_a_file_for_another_python_is_named(faked: Faked) -> None:
    file = faked.write("/opt/xilinx/xrt/python/pyxrt.cpython-312-x86_64-linux-gnu.so")
    found = pyxrt(faked, MISSING)
    assert (found.situation, found.facts["built_for"]) == ("other-python", "3.12")
    assert f"{file} is for Python 3.12" in found.found


def test_a_file_for_another_python_on_the_path_is_named_too(faked: Faked, tmp_path: Path) -> None:
    faked.write("/venv/pyxrt.cpython-310-x86_64-linux-gnu.so")
    found = pyxrt(faked, MISSING, tmp_path / "venv")
    assert (found.situation, found.facts["built_for"]) == ("other-python", "3.10")


@pytest.mark.parametrize("name", ["pyxrt.so", "pyxrt.cpython-311-x86_64-linux-gnu.so"])
def test_a_file_for_this_python_is_only_not_on_the_path(faked: Faked, name: str) -> None:
    faked.write("/usr/lib/python3/dist-packages/pyxrt.cpython-312-x86_64-linux-gnu.so")
    file = faked.write(f"/opt/xilinx/xrt/python/{name}")
    found = pyxrt(faked, MISSING)
    assert found.situation == "not-on-path"
    assert f"export PYTHONPATH={file.parent}" in found.action


def test_another_missing_module_is_not_pyxrt(faked: Faked) -> None:
    probe = PyxrtProbe("import", "ModuleNotFoundError", "No module named 'numpy'", module="numpy")
    assert pyxrt(faked, probe).situation == "not-importable"


@pytest.mark.parametrize(
    ("change", "status", "situation"),
    [
        ({"names": ALL_NAMES - {"hw_context"}}, "FAIL", "too-old"),
        ({"names": frozenset(("run",))}, "FAIL", "not-xrt"),
        ({"names": ALL_NAMES - {"runlist"}}, "WARN", "no-runlist"),
        ({"devices": 0}, "FAIL", "no-device"),
        (
            {"stage": "open", "devices": 0, "error": "RuntimeError", "text": "x"},
            "FAIL",
            "no-device",
        ),
        (
            {"stage": "open", "error": "RuntimeError", "text": "No such device"},
            "FAIL",
            "not-opened",
        ),
        (
            {
                "stage": "open",
                "error": "RuntimeError",
                "text": "mmap(addr=0x7f2dd0000000, len=67108864, prot=3, flags=8209, "
                "offset=4294967296) failed (err=-11): Resource temporarily unavailable",
            },
            "FAIL",
            "memlock",
        ),
        ({"stage": "open", "error": "SIGSEGV"}, "FAIL", "crashes"),
        ({"stage": "enumerate", "error": "SIGABRT"}, "FAIL", "crashes"),
        ({"stage": "close", "error": "SIGSEGV"}, "WARN", "crashes-at-exit"),
        ({"stage": "open", "error": "timeout"}, "FAIL", "hangs"),
    ],
)
def test_a_pyxrt_that_was_imported_can_still_fail(
    faked: Faked, change: dict[str, Any], status: str, situation: str
) -> None:
    probe = replace(WORKING, **change)
    found = pyxrt(faked, probe)
    assert (found.status, found.situation) == (status, situation)
    assert probe.works == (status == "WARN")


@pytest.mark.parametrize(("error", "situation"), [("SIGSEGV", "crashes"), ("timeout", "hangs")])
def test_an_import_may_crash_or_hang(faked: Faked, error: str, situation: str) -> None:
    assert pyxrt(faked, PyxrtProbe("import", error)).situation == situation


# The other process

FAKE = """
class _Device:
    def __init__(self, index): pass
    def get_info(self, key): return "NPU Fake"
class xrt_info_device: name = 1
device, bo, run, hw_context, runlist = _Device, 1, 2, 3, 4
def enumerate_devices(): return 1
"""


def probed(tmp_path: Path, module: str | None, timeout_s: float = 60.0) -> PyxrtProbe:
    if module is not None:
        (tmp_path / "pyxrt.py").write_text(module)
    return probe_pyxrt((str(tmp_path), *PATH), timeout_s)


def test_a_probe_of_a_working_module_says_what_it_has(tmp_path: Path) -> None:
    probe = probed(tmp_path, "print('{XRT talks', end='')\n" + FAKE)
    assert probe == PyxrtProbe(
        "done", file=str(tmp_path / "pyxrt.py"), names=ALL_NAMES, devices=1, name="NPU Fake"
    )
    assert probe.works
    assert "pyxrt" not in sys.modules


def test_a_probe_of_nothing_is_a_missing_module(tmp_path: Path) -> None:
    probe = probed(tmp_path, None)
    assert (probe.stage, probe.error, probe.module) == ("import", "ModuleNotFoundError", "pyxrt")


@pytest.mark.parametrize(
    ("module", "stage", "error"),
    [
        ("import os; os.abort()", "import", "SIGABRT"),
        ("raise ImportError('no such symbol')", "import", "ImportError"),
        ("import os; os._exit(3)", "import", "exit code 3"),
        (f"{FAKE}\ndef enumerate_devices(): import os; os.abort()", "enumerate", "SIGABRT"),
        (f"{FAKE}\ndef device(i): import os; os.abort()", "open", "SIGABRT"),
        (f"{FAKE}\ndef device(i): raise RuntimeError('err=-2')", "open", "RuntimeError"),
        (f"{FAKE}\nimport atexit, os; atexit.register(os.abort)", "close", "SIGABRT"),
    ],
)
def test_a_probe_tells_where_a_broken_module_ended(
    tmp_path: Path, module: str, stage: str, error: str
) -> None:
    probe = probed(tmp_path, module)
    assert (probe.stage, probe.error) == (stage, error)


def test_a_probe_does_not_wait_for_ever(tmp_path: Path) -> None:
    probe = probed(tmp_path, "import time; time.sleep(600)", timeout_s=0.5)
    assert (probe.stage, probe.error) == ("import", "timeout")
