"""How much memory this process may lock: the NPU's buffers are locked memory."""

from __future__ import annotations

from .findings import Finding, Status, passed
from .machine import Machine
from .sandbox import Sandbox

HEAP_BYTES = 64 << 20  # the driver's heap for instructions, mapped when the device is opened
MIB = 1 << 20
_IPC_LOCK = 1 << 14  # the capability that lifts the limit


def check_memlock(
    machine: Machine, bundle_bytes: int, sandbox: Sandbox | None, bad: Status
) -> Finding:
    """Whether heap and weights may be locked. bundle_bytes: the weights', 0 where not known."""
    soft, hard = machine.memlock
    needed = HEAP_BYTES + bundle_bytes
    facts = {"soft": soft, "hard": hard, "needed": needed}
    if soft is None:
        return passed("memlock", "unlimited", **facts)
    if _may_lock(machine):
        return passed("memlock", f"{_mib(soft)}, lifted by CAP_IPC_LOCK", **facts)
    if soft >= needed:
        return passed("memlock", f"{_mib(soft)}, and {_mib(needed)} are needed", **facts)
    return Finding(
        "memlock",
        bad,
        "too-small",
        f"{_mib(soft)} may be locked",
        f"unlimited, at least {_mib(needed)}"
        + (" for the driver's heap and the bundle's weights" if bundle_bytes else ""),
        _action(machine, hard, needed, sandbox),
        facts,
    )


def _action(machine: Machine, hard: int | None, needed: int, sandbox: Sandbox | None) -> str:
    if sandbox:
        return sandbox.memlock_hint
    raised = "`ulimit -l unlimited` in this shell now; for good, " if hard is None else ""
    if hard is not None and hard >= needed:
        raised = f"`ulimit -l {hard // 1024}` in this shell now; for good, "
    return (
        f"{raised}write `{machine.user} - memlock unlimited` to "
        "/etc/security/limits.d/99-npu.conf and log in anew (a systemd service: "
        "`LimitMEMLOCK=infinity`)"
    )


def _may_lock(machine: Machine) -> bool:
    """Whether this process has the capability that lifts the limit."""
    for line in (machine.text("/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "CapEff":
            try:
                return bool(int(value, 16) & _IPC_LOCK)
            except ValueError:
                return False
    return False


def _mib(count: int) -> str:
    return f"{count / MIB:.4g} MiB"
