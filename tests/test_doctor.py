"""`npu-embed doctor` from end to end: without an NPU, with a faked one, and with a broken one."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import run
from faked_machines import ALL_NAMES, WORKING, DriverSays, Faked

from npu_embed.doctor import Finding, examination, examine
from npu_embed.doctor.child import run_in_child
from npu_embed.doctor.machine import Machine
from npu_embed.doctor.probe import PyxrtProbe
from npu_embed.errors import FetchError, SettingError
from npu_embed.manifest import sha256_file

ROOT = Path(__file__).parent.parent
NO_PYXRT = PyxrtProbe("import", "ModuleNotFoundError", "No module named 'pyxrt'", module="pyxrt")
RUNS = ["emulated slots", "device", "gemm", "mha"]
HARDWARE = [
    *("container", "npu", "driver", "firmware", "node", "memlock", "xrt", "pyxrt"),
    *("array", "slots"),
]
BUNDLE = ["target", "contexts", "bundle", "embedding"]


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path / "machine")


@pytest.fixture
def seen_by_cli(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Makes the command line examine another machine than this one."""
    return lambda machine: monkeypatch.setattr(examination, "this_machine", lambda: machine)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the bundle's own check, which other tests have."""
    monkeypatch.setattr(examination, "check_bundle", lambda path, device: iter(()))


def checks(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings]


def problems(findings: Iterator[Finding] | list[Finding]) -> dict[str, tuple[str, str]]:
    """Status and situation of whatever did not pass."""
    return {f.check: (f.status, f.situation) for f in findings if f.status != "PASS"}


# No NPU


def test_without_an_npu_the_emulated_one_is_checked_and_nothing_fails(
    faked: Faked, tiny_bundle: Path
) -> None:
    machine = replace(faked.machine(), pyxrt=lambda: NO_PYXRT)
    found = list(examine(tiny_bundle, machine=machine))
    assert checks(found) == ["python", "settings", "container", "npu", *RUNS, *BUNDLE]
    assert problems(found) == {"npu": ("WARN", "none")}
    assert "runs are emulated" in found[3].text


@pytest.mark.slow
def test_the_command_line_says_so_and_ends_with_0(
    faked: Faked, tiny_bundle: Path, seen_by_cli: Callable[[Machine], None]
) -> None:
    seen_by_cli(faked.machine())
    result = run("doctor", tiny_bundle)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[-1] == "11 passed, 1 warned, 0 failed"
    assert {line[:4] for line in lines[:-1]} == {"PASS", "WARN"}
    assert next(line for line in lines if line.startswith("WARN"))[6:22].strip() == "npu"
    told = run("doctor", "--json", tiny_bundle)
    *findings, verdict = told.json_lines
    assert verdict == {"verdict": "WARN", "passed": 11, "warned": 1, "failed": 0}
    assert [line["check"] for line in findings][-1] == "embedding"
    assert set(findings[0]) == {
        *("check", "status", "situation", "found", "wanted", "action", "facts")
    }
    assert findings[-1]["facts"]["cosine"] > 0.9997


def test_a_demanded_npu_that_is_not_there_fails_and_nothing_is_emulated(
    faked: Faked, tiny_bundle: Path, seen_by_cli: Callable[[Machine], None]
) -> None:
    machine = replace(faked.machine(), pyxrt=lambda: NO_PYXRT)
    found = list(examine(tiny_bundle, "npu", machine))
    assert problems(found) == {
        "npu": ("FAIL", "none"),
        "driver": ("FAIL", "missing"),
        "node": ("FAIL", "missing"),
        "xrt": ("FAIL", "missing"),
        "pyxrt": ("FAIL", "missing"),
        "runs": ("FAIL", "no-npu"),
        "target": ("FAIL", "array-programs"),  # nor would it run on one
    }
    assert not {"gemm", "mha", "emulated slots", "embedding"} & set(checks(found))
    seen_by_cli(machine)
    assert run("doctor", "--device", "npu", tiny_bundle).code == 1


def test_the_emulated_device_leaves_the_hardware_out(faked: Faked, tiny_bundle: Path) -> None:
    def never() -> PyxrtProbe:
        raise AssertionError("pyxrt was imported")

    machine = replace(faked.whole().machine(), pyxrt=never)
    found = list(examine(tiny_bundle, "emulated", machine))
    assert checks(found) == ["python", "settings", *RUNS, *BUNDLE]
    assert problems(found) == {}


def test_an_unknown_device_is_refused(faked: Faked) -> None:
    with pytest.raises(SettingError, match="'gpu'"):
        list(examine(device="gpu", machine=faked.machine()))


def test_a_refused_setting_ends_the_examination(
    faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", "npu9")
    found = list(examine(machine=faked.machine()))
    assert checks(found) == ["python", "settings"]
    assert problems(found) == {"settings": ("FAIL", "refused")}


# Bundles


def test_no_bundle_is_no_failure(
    faked: Faked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "cache"))
    found = list(examine(device="emulated", machine=faked.machine()))
    assert checks(found) == ["python", "settings", *RUNS, "bundle"]
    assert problems(found) == {"bundle": ("WARN", "not-made")}
    assert "npu-embed get minilm" in found[-1].action
    assert not (tmp_path / "cache").exists()


def test_what_is_no_bundle_fails_and_the_runs_are_made_all_the_same(
    faked: Faked, tmp_path: Path
) -> None:
    found = list(examine(tmp_path / "nowhere", "emulated", faked.machine()))
    assert problems(found) == {"bundle": ("FAIL", "damaged")}
    assert "gemm" in checks(found)


@pytest.mark.slow
def test_a_damaged_bundle_fails_by_the_file(faked: Faked, tiny_copy: Path) -> None:
    weights = tiny_copy / "tensors.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = list(examine(tiny_copy, "emulated", faked.machine()))
    assert problems(found)["sha256"] == ("FAIL", "damaged")
    damaged = next(f for f in found if f.check == "sha256")
    assert damaged.found.startswith("tensors.safetensors: found ")
    assert f"npu-embed check {tiny_copy}" in damaged.action
    assert "bundle" not in checks(found)


def test_what_a_bundle_does_not_tell_is_a_warning(faked: Faked, tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    lines = [line for line in manifest.read_text().splitlines() if not line.startswith("sha256")]
    manifest.write_text("\n".join(lines) + "\n")
    found = list(examine(tiny_copy, "emulated", faked.machine()))
    assert problems(found) == {"sha256": ("WARN", "not-told")}


def test_a_bundle_of_another_generation_fails_and_is_not_run(
    faked: Faked, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", "npu1")
    found = list(examine(tiny_bundle, "emulated", faked.machine()))
    assert problems(found) == {"target": ("FAIL", "other-generation")}
    assert checks(found)[-1] == "contexts"


@pytest.mark.usefixtures("unread")
def test_more_contexts_than_slots_warn(
    faked: Faked, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    assert problems(examine(tiny_bundle, "emulated", faked.machine())) == {
        "contexts": ("WARN", "swaps")
    }


# An NPU


@pytest.mark.usefixtures("unread")
def test_on_a_whole_machine_only_our_own_kernels_keep_off_the_npu(
    faked: Faked, tiny_bundle: Path
) -> None:
    found = list(examine(tiny_bundle, machine=faked.whole().machine()))
    assert checks(found) == ["python", "settings", *HARDWARE, *RUNS, "runs", *BUNDLE[:2]]
    assert problems(found) == {"runs": ("WARN", "array-programs")}
    found = list(examine(tiny_bundle, "npu", faked.machine()))
    assert problems(found) == {
        "runs": ("FAIL", "array-programs"),
        "target": ("FAIL", "array-programs"),
    }


def with_pyxrt(faked: Faked, probe: PyxrtProbe) -> Machine:
    return replace(faked.whole().machine(), pyxrt=lambda: probe)


def without(name: str) -> PyxrtProbe:
    return replace(WORKING, names=ALL_NAMES - {name})


def no_node(faked: Faked) -> Machine:
    faked.whole()
    (faked.root / "dev/accel/accel0").unlink()
    return faked.machine()


def firmware_disagrees(faked: Faked) -> Machine:
    faked.pci(firmware=None)
    faked.driver()
    faked.node()
    faked.xrt()
    said = "amdxdna 0000:c5:00.1: aie2_check_protocol: Incompatible firmware protocol major 7"
    return replace(faked.machine(), kernel_log=lambda: said)


def no_plugin(faked: Faked) -> Machine:
    faked.pci()
    faked.driver()
    faked.node()
    faked.xrt(plugin=None)
    return faked.machine()


OTHER_PYTHON = PyxrtProbe(
    "import",
    "ImportError",
    "Python version mismatch: module was compiled for Python 3.12, but the interpreter version is "
    "incompatible: 3.11.7.",
    module="pyxrt",
)
# What can be wrong with a machine that has an NPU -> what the doctor says of it, and of no other.
BROKEN: dict[str, tuple[Callable[[Faked], Machine], tuple[str, str, str]]] = {
    "no pyxrt": (lambda f: with_pyxrt(f, NO_PYXRT), ("pyxrt", "FAIL", "missing")),
    "pyxrt for another Python": (
        lambda f: with_pyxrt(f, OTHER_PYTHON),
        ("pyxrt", "FAIL", "other-python"),
    ),
    "pyxrt without hw_context": (
        lambda f: with_pyxrt(f, without("hw_context")),
        ("pyxrt", "FAIL", "too-old"),
    ),
    "pyxrt without runlist": (
        lambda f: with_pyxrt(f, without("runlist")),
        ("pyxrt", "WARN", "no-runlist"),
    ),
    "XRT without its plugin": (no_plugin, ("xrt", "FAIL", "no-plugin")),
    "no /dev/accel": (no_node, ("node", "FAIL", "missing")),
    "no permission": (
        lambda f: replace(f.whole().machine(), usable=lambda _: False),
        ("node", "FAIL", "not-in-group"),
    ),
    "memlock 8 MiB": (
        lambda f: replace(f.whole().machine(), memlock=(8 << 20, 8 << 20)),
        ("memlock", "FAIL", "too-small"),
    ),
    "driver and firmware disagree": (firmware_disagrees, ("firmware", "FAIL", "disagrees")),
    "slots held by another process": (
        lambda f: replace(f.whole().machine(), query=DriverSays(limit=2, pids=(1, 1))),
        ("slots", "WARN", "full"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.usefixtures("unread")
def test_what_is_wrong_with_an_npu_that_is_there_is_told_apart_with_what_to_do(
    faked: Faked, tiny_bundle: Path, what: str
) -> None:
    break_it, wanted = BROKEN[what]
    found = list(examine(tiny_bundle, machine=break_it(faked)))
    # That our own kernels keep off the NPU is said as well, wherever it could be used.
    wrong = [f for f in found if f.status != "PASS" and f.check != "runs"]
    assert [(f.check, f.status, f.situation) for f in wrong] == [wanted]
    assert wrong[0].wanted
    assert wrong[0].action
    assert {"gemm", "mha", "target"} <= set(checks(found))  # the emulated one runs all the same


def test_no_two_of_these_are_told_alike() -> None:
    assert len({told for _, told in BROKEN.values()}) == len(BROKEN)


# Recipes


def test_a_recipe_that_is_damaged_ends_the_examination(
    faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(name: str) -> object:
        raise FetchError(f"{name}.recipe: no url, wanted one; install npu-embed anew.")

    monkeypatch.setattr("npu_embed.fetch.read_recipe", damaged)
    *_, last = examine(machine=faked.machine())
    assert (last.check, last.status, last.situation) == ("bundle", "FAIL", "no-recipe")
    assert last.found == "minilm.recipe: no url, wanted one; install npu-embed anew"


# Runs on an NPU, which is the emulated one under another name

PYXRT = """
import ast
import os
import re
from npu_embed.emulator import pyxrt as _emulated
from npu_embed.emulator.pyxrt import *

class device(_emulated.device):
    def get_info(self, key):
        return "NPU Strix"

def xclbin(path):
    return _emulated.xclbin(path + ".array")
"""


@pytest.fixture
def compiled_bundle(tiny_copy: Path) -> Path:
    """A bundle whose xclbins hold no array programs, as far as one can see."""
    manifest = (tiny_copy / "manifest.txt").read_text()
    for file in tiny_copy.glob("kernels/*.xclbin"):
        shutil.copy(file, f"{file}.array")
        before = sha256_file(file)
        file.write_bytes(file.read_bytes().replace(b"NPUEMBED", b"COMPILED"))
        manifest = manifest.replace(before, sha256_file(file))
    (tiny_copy / "manifest.txt").write_text(manifest)
    return tiny_copy


@pytest.fixture
def pyxrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the processes that are started from now on a pyxrt."""
    folder = tmp_path / "python"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")

    def write(more: str = "") -> None:
        (folder / "pyxrt.py").write_text(PYXRT + more)

    return write


@pytest.mark.slow
def test_a_compiled_bundle_runs_on_the_npu_in_a_process_of_its_own(
    faked: Faked, compiled_bundle: Path, pyxrt: Callable[[str], None]
) -> None:
    pyxrt("")
    found = list(examine(compiled_bundle, machine=faked.whole().machine()))
    assert checks(found) == [
        *("python", "settings", *HARDWARE, "target", "contexts", "device", "gemm", "mha"),
        *("bundle", "embedding"),
    ]
    assert problems(found) == {"gemm": ("WARN", "not-known")}
    assert next(f for f in found if f.check == "device").facts["generation"] == "npu2"
    mha = next(f for f in found if f.check == "mha")
    assert mha.found.startswith("mha_16 on NPU Strix: ")


def test_a_compiled_bundle_is_only_looked_at_where_there_is_no_npu(
    faked: Faked, compiled_bundle: Path
) -> None:
    found = list(examine(compiled_bundle, "emulated", faked.machine()))
    assert problems(found) == {"target": ("WARN", "compiled")}
    assert checks(found)[-1] == "contexts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ended", "after"),
    [
        ("os.abort()", "SIGABRT", "before the device was open"),
        ("def hw_context(*a): os.abort()", "SIGABRT", "after gemm"),
        ("import time; time.sleep(600)", "the doctor after 0.5 s", "before the device was open"),
    ],
)
def test_a_driver_that_kills_or_hangs_the_process_is_a_finding(
    compiled_bundle: Path, pyxrt: Callable[[str], None], more: str, ended: str, after: str
) -> None:
    pyxrt(more)
    timeout_s = 0.5 if "sleep" in more else 120.0
    *_, last = run_in_child(compiled_bundle, timeout_s)
    assert (last.check, last.status, last.situation) == ("runs", "FAIL", "crashed")
    assert f"was ended by {ended}" in last.found
    assert after in last.found


@pytest.mark.slow
def test_a_device_that_does_not_open_is_a_finding(
    compiled_bundle: Path, pyxrt: Callable[[str], None]
) -> None:
    pyxrt("def enumerate_devices(): return 0")
    found = list(run_in_child(compiled_bundle))
    assert problems(found)["device"] == ("FAIL", "failed")
    assert "sees no device" in found[0].found


@pytest.mark.slow
def test_a_name_of_no_known_generation_warns(
    compiled_bundle: Path, pyxrt: Callable[[str], None]
) -> None:
    pyxrt("device.get_info = lambda self, key: 'NPU Nova'")
    assert problems(list(run_in_child(compiled_bundle)))["device"] == ("WARN", "unknown-name")


# The page

PAGE = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")


def situations() -> set[str]:
    """Every situation named in the doctor's code."""
    found: set[str] = set()
    for file in (ROOT / "npu_embed/doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                named = node.args[2:3]
            elif isinstance(node, ast.Assign):
                (target,) = node.targets
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                named = [v for t, v in pairs if getattr(t, "id", "") == "situation"]
            found |= {str(n.value) for n in named if isinstance(n, ast.Constant)}
    return found


def test_the_page_lists_every_situation() -> None:
    named = situations()
    assert {"not-in-group", "no-group", "crashed", "other-python"} <= named
    assert {s for s in named if f"`{s}`" not in PAGE} == set()


def test_the_page_lists_every_check() -> None:
    listed = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in row.split("`")}
    assert {*HARDWARE, *RUNS, *BUNDLE, "runs", "python", "settings"} <= listed
