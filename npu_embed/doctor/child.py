"""Runs on a real NPU in a process of their own: `python -m npu_embed.doctor.child BUNDLE`.

A broken driver can end or hang the process that uses it, and the doctor has more to say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .findings import Finding
from .probe import ended_by, killed
from .runs import check_bundle, run_npu

TIMEOUT_S = 300.0


def run_in_child(bundle: Path, timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """What the runs on the NPU found; a process that died or hung is a finding too."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(bundle)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, complaints = process.communicate(timeout=timeout_s)
        ended = ended_by(process.returncode)
    except subprocess.TimeoutExpired:
        output, complaints = killed(process), b""
        ended = f"the doctor after {timeout_s:g} s without an end"
    checks = []
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            finding = Finding(**json.loads(line))
        except (ValueError, TypeError):  # XRT's own words on stdout, or half a line
            continue
        checks.append(finding.check)
        yield finding
    if ended:
        said = last_line(complaints)
        after = f"after {checks[-1]}" if checks else "before the device was open"
        yield Finding(
            "runs",
            "FAIL",
            "crashed",
            f"the process that runs on the NPU was ended by {ended}, {after}"
            + (f": {said}" if said else ""),
            "an end of its own",
            "`sudo dmesg | grep amdxdna` says what the driver saw; see `xrt` and `firmware`",
            {"ended": ended, "said": said},
        )


def last_line(raw: bytes) -> str:
    """The last line that is not blank."""
    lines = [line for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def main(bundle: Path) -> None:
    """Print the findings of the runs on the NPU, a line of JSON each."""
    for findings in (run_npu(bundle), check_bundle(bundle, "npu")):
        for finding in findings:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
