"""Every NPU_EMBED_* variable: its default, what it takes, and what it refuses."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_embed import settings
from npu_embed.errors import SettingError

SOURCE = Path(settings.__file__).read_text(encoding="utf-8")

READERS: dict[str, Callable[[], object]] = {
    "NPU_EMBED_DEVICE": settings.device,
    "NPU_EMBED_BUNDLE": settings.bundle,
    "NPU_EMBED_CACHE": settings.cache_dir,
    "NPU_EMBED_TIMEOUT_MS": settings.timeout_ms,
    "NPU_EMBED_EVICTION": settings.eviction,
    "NPU_EMBED_RUNLISTS": settings.runlists,
    "NPU_EMBED_VERIFY": settings.verify,
    "NPU_EMBED_SLOT_WAIT_MS": settings.slot_wait_ms,
    "NPU_EMBED_IDLE_RELEASE_MS": settings.idle_release_ms,
    "NPU_EMBED_KERNELS": settings.kernels_dir,
    "NPU_EMBED_EMU_PROFILE": settings.emulator_profile,
    "NPU_EMBED_API_KEY": settings.api_key,
    "NPU_EMBED_COMPILED": settings.compiled,
    "NPU_EMBED_DEBUG": settings.debug,
    "NPU_EMBED_TRACE": settings.trace_file,
    "NPU_EMBED_EMU_SLOTS": lambda: settings.emulator_slots(16),
    "NPU_EMBED_EMU_MODE": settings.emulator_mode,
    "NPU_EMBED_EMU_SEED": settings.emulator_seed,
    "NPU_EMBED_EMU_FAULTS": settings.emulator_faults,
    "NPU_EMBED_EMU_DIR": settings.emulator_dir,
}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_every_variable_is_listed_documented_and_tested() -> None:
    assert set(READERS) == set(settings.VARIABLES)
    table = re.findall(r"^\| (NPU_EMBED_\w+) \|", SOURCE, re.MULTILINE)
    assert sorted(table) == sorted(settings.VARIABLES)


def test_the_documentation_has_a_row_for_every_variable() -> None:
    path = Path(__file__).parents[2] / "docs" / "environment.md"
    rows = re.findall(r"^\| `(NPU_EMBED_\w+)` \|", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(settings.VARIABLES)


@pytest.mark.parametrize(
    ("variable", "wanted"),
    [
        ("NPU_EMBED_DEVICE", "auto"),
        ("NPU_EMBED_BUNDLE", None),
        ("NPU_EMBED_TIMEOUT_MS", 10_000),
        ("NPU_EMBED_EVICTION", "next-use"),
        ("NPU_EMBED_RUNLISTS", "auto"),
        ("NPU_EMBED_VERIFY", "auto"),
        ("NPU_EMBED_SLOT_WAIT_MS", 10_000),
        ("NPU_EMBED_IDLE_RELEASE_MS", 0),
        ("NPU_EMBED_KERNELS", None),
        ("NPU_EMBED_DEBUG", 0),
        ("NPU_EMBED_TRACE", None),
        ("NPU_EMBED_EMU_PROFILE", "npu2"),
        ("NPU_EMBED_EMU_SLOTS", 16),
        ("NPU_EMBED_EMU_MODE", "strict"),
        ("NPU_EMBED_EMU_SEED", 0),
        ("NPU_EMBED_EMU_FAULTS", ""),
        ("NPU_EMBED_EMU_DIR", Path(tempfile.gettempdir()) / "npu-embed-emulator"),
    ],
)
def test_unset_and_empty_mean_the_default(
    variable: str, wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert READERS[variable]() == wanted
    monkeypatch.setenv(variable, "")
    assert READERS[variable]() == wanted


def test_the_cache_is_the_users_own() -> None:
    assert settings.cache_dir().name == "npu-embed"


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("NPU_EMBED_DEVICE", "npu", "npu"),
        ("NPU_EMBED_DEVICE", "emulated", "emulated"),
        ("NPU_EMBED_BUNDLE", "/some/bundle", Path("/some/bundle")),
        ("NPU_EMBED_CACHE", "/some/cache", Path("/some/cache")),
        ("NPU_EMBED_TIMEOUT_MS", "1", 1),
        ("NPU_EMBED_EVICTION", "lru", "lru"),
        ("NPU_EMBED_RUNLISTS", "off", "off"),
        ("NPU_EMBED_VERIFY", "always", "always"),
        ("NPU_EMBED_SLOT_WAIT_MS", "0", 0),
        ("NPU_EMBED_IDLE_RELEASE_MS", "500", 500),
        ("NPU_EMBED_KERNELS", str(Path(__file__).parent), Path(__file__).parent),
        ("NPU_EMBED_DEBUG", "4", 4),
        (
            "NPU_EMBED_TRACE",
            str(Path(__file__).parent / "t.json"),
            Path(__file__).parent / "t.json",
        ),
        ("NPU_EMBED_EMU_PROFILE", "npu1", "npu1"),
        ("NPU_EMBED_EMU_SLOTS", "1", 1),
        ("NPU_EMBED_EMU_MODE", "loose", "loose"),
        ("NPU_EMBED_EMU_SEED", "7", 7),
        ("NPU_EMBED_EMU_FAULTS", "timeout@5", "timeout@5"),
        ("NPU_EMBED_EMU_DIR", "/some/table", Path("/some/table")),
    ],
)
def test_a_variable_is_read_when_it_is_asked_for(
    variable: str, text: str, wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert READERS[variable]() == wanted


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        (
            "NPU_EMBED_DEVICE",
            "emu",
            "NPU_EMBED_DEVICE='emu': unknown device, wanted 'auto', 'npu' or 'emulated'.",
        ),
        ("NPU_EMBED_DEVICE", "NPU", "'NPU': unknown device"),
        ("NPU_EMBED_EMU_PROFILE", "npu3", "'npu3': unknown profile, wanted 'npu2' or 'npu1'."),
        ("NPU_EMBED_EMU_MODE", "lax", "'lax': unknown memory mode, wanted 'strict' or 'loose'."),
        ("NPU_EMBED_TIMEOUT_MS", "0", "NPU_EMBED_TIMEOUT_MS='0': not an integer >= 1"),
        ("NPU_EMBED_TIMEOUT_MS", "1.5", "'1.5': not an integer >= 1"),
        ("NPU_EMBED_EVICTION", "mru", "NPU_EMBED_EVICTION='mru': unknown eviction policy, wanted"),
        ("NPU_EMBED_RUNLISTS", "yes", "'yes': unknown runlists setting, wanted 'auto', 'on' or"),
        ("NPU_EMBED_KERNELS", "/nonexistent", "NPU_EMBED_KERNELS='/nonexistent': no such folder"),
        ("NPU_EMBED_TIMEOUT_MS", "1000000001", "'1000000001': not an integer >= 1 and <= 10000000"),
        ("NPU_EMBED_EMU_SLOTS", "9" * 400, "9': not an integer >= 1 and <= 1000000000; set such"),
        ("NPU_EMBED_VERIFY", "once", "'once': unknown way to verify, wanted 'auto', 'startup',"),
        ("NPU_EMBED_SLOT_WAIT_MS", "-1", "'-1': not an integer >= 0"),
        ("NPU_EMBED_IDLE_RELEASE_MS", "soon", "'soon': not an integer >= 0"),
        ("NPU_EMBED_EMU_SLOTS", "0", "'0': not an integer >= 1"),
        ("NPU_EMBED_EMU_SLOTS", "-1", "'-1': not an integer >= 1"),
        ("NPU_EMBED_EMU_SLOTS", "many", "'many': not an integer >= 1"),
        ("NPU_EMBED_EMU_SEED", "-1", "'-1': not an integer >= 0"),
        ("NPU_EMBED_DEBUG", "5", "NPU_EMBED_DEBUG='5': not an integer >= 0 and <= 4; set such"),
        ("NPU_EMBED_TRACE", "/nonexistent/t", "='/nonexistent/t': no file can be made there"),
        ("NPU_EMBED_TRACE", "/", "NPU_EMBED_TRACE='/': no file can be made there"),
    ],
)
def test_another_value_is_an_error_naming_it_and_what_is_wanted(
    variable: str, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=re.escape(says)):
        READERS[variable]()


@pytest.mark.parametrize("value", [None, 3, ["npu"], b"npu"])
def test_a_choice_of_another_type_is_an_error_too(value: object) -> None:
    with pytest.raises(SettingError, match=r"device=.*: unknown device"):
        settings.check_choice("device", "device", value, settings.DEVICES)


def test_the_name_of_a_trace_may_hold_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_TRACE", "trace-%p.json")
    assert settings.trace_file() == Path.cwd() / f"trace-{os.getpid()}.json"


def test_nothing_else_reads_the_environment_for_a_setting() -> None:
    package = Path(settings.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "settings.py":
            assert not re.search(r"environ.*NPU_EMBED|getenv.*NPU_EMBED", text), path
