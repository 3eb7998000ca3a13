"""Every NPU_EMBED_* variable: read here, validated here, documented here, nowhere else.

| variable | values | meaning |
|---|---|---|
| NPU_EMBED_DEVICE | auto, npu, emulated | the device where none is asked for; default auto |
| NPU_EMBED_BUNDLE | a folder or name | the bundle where none is asked for; default: minilm |
| NPU_EMBED_CACHE | a folder | for bundles and machine code; default: the user's cache folder |
| NPU_EMBED_TIMEOUT_MS | integer >= 1 | how long a kernel run may take; default 10000 |
| NPU_EMBED_EVICTION | next-use, lru, all | which context is dropped first; default next-use |
| NPU_EMBED_RUNLISTS | auto, on, off | whether runs are submitted as lists; default auto |
| NPU_EMBED_VERIFY | auto, startup, always, never | how results are verified where nothing is said |
| NPU_EMBED_SLOT_WAIT_MS | integer >= 0 | how long to wait for a hardware context while others |
| | | hold them all; default 10000 |
| NPU_EMBED_IDLE_RELEASE_MS | integer >= 0 | release the contexts when idle this long; 0: never |
| NPU_EMBED_KERNELS | a folder | its xclbins and streams go before the bundle's of that name |
| NPU_EMBED_API_KEY | text | what clients of `npu-embed serve` must send; default: nothing |
| NPU_EMBED_COMPILED | auto, vectors, off | what computes on the CPU where numba and llvmlite are |
| | | installed: their code; their code without AMX' tile registers; numpy alone |
| NPU_EMBED_DEBUG | 0 to 4 | what is said on stderr of what the engine does; default 0 |
| NPU_EMBED_TRACE | a file | where a trace of the process goes, for Perfetto; default: none |
| NPU_EMBED_EMU_PROFILE | npu2, npu1 | the NPU generation that is emulated; default npu2 |
| NPU_EMBED_EMU_SLOTS | integer >= 1 | its hardware contexts; default: the profile's (16 or 6) |
| NPU_EMBED_EMU_MODE | strict, loose | what unsynced memory holds; default strict |
| NPU_EMBED_EMU_SEED | integer >= 0 | which lines loose mode evicts, which bits `flip` and lines |
| | | `stale` of the faults strike; default 0 |
| NPU_EMBED_EMU_FAULTS | KIND[=VALUE]@WHEN, ... | what goes wrong on it: emulator/faults.py; |
| | | default: nothing |
| NPU_EMBED_EMU_DIR | a folder | holds the emulated NPU's slot table; default: in the temp folder |
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal, cast

import platformdirs

from .errors import SettingError
from .eviction import DEFAULT_POLICY, POLICIES

DeviceName = Literal["auto", "npu", "emulated"]
ProfileName = Literal["npu2", "npu1"]
MemoryMode = Literal["strict", "loose"]

DEVICES: tuple[DeviceName, ...] = ("auto", "npu", "emulated")
PROFILES: tuple[ProfileName, ...] = ("npu2", "npu1")
RUNLISTS = ("auto", "on", "off")
COMPILED = ("auto", "vectors", "off")
VERIFY = ("auto", "startup", "always", "never")
MEMORY_MODES: tuple[MemoryMode, ...] = ("strict", "loose")

MAX_INTEGER = 10**9  # more is a mistake: 11 days in ms

VARIABLES = (
    "NPU_EMBED_DEVICE",
    "NPU_EMBED_BUNDLE",
    "NPU_EMBED_CACHE",
    "NPU_EMBED_TIMEOUT_MS",
    "NPU_EMBED_EVICTION",
    "NPU_EMBED_RUNLISTS",
    "NPU_EMBED_VERIFY",
    "NPU_EMBED_SLOT_WAIT_MS",
    "NPU_EMBED_IDLE_RELEASE_MS",
    "NPU_EMBED_KERNELS",
    "NPU_EMBED_API_KEY",
    "NPU_EMBED_COMPILED",
    "NPU_EMBED_DEBUG",
    "NPU_EMBED_TRACE",
    "NPU_EMBED_EMU_PROFILE",
    "NPU_EMBED_EMU_SLOTS",
    "NPU_EMBED_EMU_MODE",
    "NPU_EMBED_EMU_SEED",
    "NPU_EMBED_EMU_FAULTS",
    "NPU_EMBED_EMU_DIR",
)


def _choice(variable: str, noun: str, accepted: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable) or default
    return check_choice(variable, noun, value, accepted)


def check_choice(where: str, noun: str, value: object, accepted: tuple[str, ...]) -> str:
    """The value, if it is one of `accepted`.

    Raises:
        SettingError: naming `where`, the value and what is accepted.
    """
    if not isinstance(value, str) or value not in accepted:
        wanted = ", ".join(repr(a) for a in accepted[:-1]) + f" or {accepted[-1]!r}"
        raise SettingError(f"{where}={value!r}: unknown {noun}, wanted {wanted}.")
    return value


def _integer(variable: str, default: int, lowest: int, highest: int = MAX_INTEGER) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= highest:
        raise SettingError(
            f"{variable}={text!r}: not an integer >= {lowest} and <= {highest}; set such a "
            "number or unset it."
        )
    return value


def device() -> DeviceName:
    """The device to open where the caller names none."""
    return cast(DeviceName, _choice("NPU_EMBED_DEVICE", "device", DEVICES, "auto"))


def bundle() -> Path | None:
    """The bundle to open where the caller names none; None is the default bundle."""
    value = os.environ.get("NPU_EMBED_BUNDLE")
    return Path(value) if value else None


def cache_dir() -> Path:
    """The folder that holds what this package builds for the user."""
    value = os.environ.get("NPU_EMBED_CACHE")
    return Path(value) if value else Path(platformdirs.user_cache_dir("npu-embed"))


def timeout_ms() -> int:
    """How long one kernel run may take before it counts as failed."""
    return _integer("NPU_EMBED_TIMEOUT_MS", 10_000, 1)


def eviction() -> str:
    """The policy that names the context to drop when another needs its slot."""
    return _choice("NPU_EMBED_EVICTION", "eviction policy", tuple(POLICIES), DEFAULT_POLICY)


def runlists() -> str:
    """Whether consecutive runs are submitted as one list."""
    return _choice("NPU_EMBED_RUNLISTS", "runlists setting", RUNLISTS, RUNLISTS[0])


def verify() -> str:
    """How an Embedder verifies what the device computes where its caller does not say."""
    return _choice("NPU_EMBED_VERIFY", "way to verify", VERIFY, VERIFY[0])


def slot_wait_ms() -> int:
    """How long to wait for a hardware context while others hold all of them."""
    return _integer("NPU_EMBED_SLOT_WAIT_MS", 10_000, 0)


def idle_release_ms() -> int:
    """How long an Embedder is idle before it releases its contexts; 0 is for ever."""
    return _integer("NPU_EMBED_IDLE_RELEASE_MS", 0, 0)


def kernels_dir() -> Path | None:
    """The folder whose xclbins and instruction streams go before a bundle's; None is none.

    Raises:
        SettingError: there is no such folder.
    """
    value = os.environ.get("NPU_EMBED_KERNELS")
    if value and not Path(value).is_dir():
        raise SettingError(f"NPU_EMBED_KERNELS={value!r}: no such folder; make it or unset it.")
    return Path(value) if value else None


def api_key() -> str | None:
    """What clients of the server must send; None is nothing."""
    return os.environ.get("NPU_EMBED_API_KEY") or None


def compiled() -> str:
    """What compiled code is used, where numba or llvmlite is installed."""
    return _choice("NPU_EMBED_COMPILED", "setting of compiled code", COMPILED, COMPILED[0])


def debug() -> int:
    """How much is said on stderr of what the engine does: debuglines.py has the ladder."""
    return _integer("NPU_EMBED_DEBUG", 0, 0, 4)


def trace_file() -> Path | None:
    """Where a trace of the process goes, `%p` replaced by its id; None is nowhere.

    Raises:
        SettingError: there is no such folder.
    """
    value = os.environ.get("NPU_EMBED_TRACE")
    if not value:
        return None
    path = Path(value.replace("%p", str(os.getpid()))).absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise SettingError(
            f"NPU_EMBED_TRACE={value!r}: no file can be made there, wanted one in a folder that "
            "exists; make the folder or unset it."
        )
    return path


def emulator_profile() -> ProfileName:
    """The NPU generation to emulate."""
    return cast(ProfileName, _choice("NPU_EMBED_EMU_PROFILE", "profile", PROFILES, "npu2"))


def emulator_slots(default: int) -> int:
    """Hardware contexts of the emulated NPU."""
    return _integer("NPU_EMBED_EMU_SLOTS", default, 1)


def emulator_mode() -> MemoryMode:
    """What unsynced memory of the emulated NPU holds."""
    return cast(MemoryMode, _choice("NPU_EMBED_EMU_MODE", "memory mode", MEMORY_MODES, "strict"))


def emulator_seed() -> int:
    """Seed of the random evictions in loose mode."""
    return _integer("NPU_EMBED_EMU_SEED", 0, 0)


def emulator_faults() -> str:
    """What is planned to go wrong on the emulated NPU, as emulator/faults.py reads it."""
    return os.environ.get("NPU_EMBED_EMU_FAULTS") or ""


def npu_dir() -> Path:
    """The folder where engines of all processes take turns on a real NPU."""
    return Path(tempfile.gettempdir()) / "npu-embed"


def emulator_dir() -> Path:
    """The folder with the emulated NPU's slot table, shared by every process of the machine."""
    value = os.environ.get("NPU_EMBED_EMU_DIR")
    return Path(value) if value else Path(tempfile.gettempdir()) / "npu-embed-emulator"
