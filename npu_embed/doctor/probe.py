"""An import of pyxrt in another process: a broken one can end or hang the process it is in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 5.0

# A line of JSON after each stage, so that a crash is known to be of the next one.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
def say(**facts):
    sys.stdout.write("\\n" + json.dumps(facts) + "\\n")
    sys.stdout.flush()
stage = "import"
try:
    import pyxrt
    names = ("device", "bo", "run", "hw_context", "runlist")
    say(file=str(getattr(pyxrt, "__file__", None)), names=[n for n in names if hasattr(pyxrt, n)])
    stage = "enumerate"
    if hasattr(pyxrt, "enumerate_devices"):
        say(devices=int(pyxrt.enumerate_devices()))
    stage = "open"
    device = pyxrt.device(0)
    say(name=str(device.get_info(pyxrt.xrt_info_device.name)))
    say(stage="done")
except BaseException as error:
    say(stage=stage, error=type(error).__name__, text=str(error),
        module=str(getattr(error, "name", None)))
"""
_STAGES = ("file", "devices", "name")  # said after each stage
_STAGE_NAMES = ("import", "enumerate", "open", "close")


@dataclass(frozen=True, slots=True)
class PyxrtProbe:
    """What an import of pyxrt gave.

    stage: where it ended: `import`, `enumerate` (counting devices), `open` (device 0), `done`, and
    `close` where the process died after all had worked. error and text: the exception's type and
    message, module what it says is missing; or error is `timeout` or a signal's name. names: what
    of the API there is. devices is None where it cannot count them.
    """

    stage: str
    error: str = ""
    text: str = ""
    module: str = ""
    file: str = ""
    names: frozenset[str] = field(default_factory=frozenset)
    devices: int | None = None
    name: str = ""

    @property
    def works(self) -> bool:
        """Whether a device could be opened, with contexts to run in."""
        ended = self.stage == "done" or (self.stage == "close" and self.error != "timeout")
        return ended and "hw_context" in self.names and self.devices != 0


def probe_pyxrt(path: tuple[str, ...] | None = None, timeout_s: float = TIMEOUT_S) -> PyxrtProbe:
    """Import pyxrt and open device 0 in a new process.

    path: where modules are looked for; None is where this process looks.
    """
    folders = [str(Path(p or ".").absolute()) for p in (sys.path if path is None else path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(folders)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        ended = ended_by(process.returncode)
    except subprocess.TimeoutExpired:
        output, ended = killed(process), "timeout"
    return _understood(output.decode("utf-8", "replace"), ended)


def killed(process: subprocess.Popen[bytes]) -> bytes:
    """What a process wrote before it was killed; one that hangs in the driver may not even die."""
    process.kill()
    try:
        return process.communicate(timeout=KILL_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired as error:
        return error.output or b""


def ended_by(returncode: int) -> str:
    """What ended a process that said no more: a signal's name, or its exit code."""
    if returncode < 0:
        try:
            return signal.Signals(-returncode).name
        except ValueError:
            return f"signal {-returncode}"
    return f"exit code {returncode}" if returncode else ""


def _understood(output: str, ended: str) -> PyxrtProbe:
    facts: dict[str, object] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                continue  # XRT's own words on stdout
            facts.update(said)
    stage = facts.get("stage")
    if stage is None or (stage == "done" and ended):
        said_stages = sum(1 for s in _STAGES if s in facts)
        done = stage == "done"
        stage = _STAGE_NAMES[-1] if done else _STAGE_NAMES[said_stages]
        facts["error"] = ended or "no answer"
    names, devices = facts.get("names"), facts.get("devices")
    return PyxrtProbe(
        stage=str(stage),
        error=str(facts.get("error", "")),
        text=str(facts.get("text", "")),
        module=str(facts.get("module", "")),
        file=str(facts.get("file", "")),
        names=frozenset(map(str, names)) if isinstance(names, list) else frozenset(),
        devices=devices if isinstance(devices, int) else None,
        name=str(facts.get("name", "")),
    )
