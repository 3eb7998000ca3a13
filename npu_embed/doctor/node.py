"""The NPU's device node: whether it is there, and whether this user may use it."""

from __future__ import annotations

import stat
from pathlib import Path

from .findings import Finding, Status, passed
from .hardware import DRIVER, Npu
from .machine import Machine
from .sandbox import Sandbox

_GROUP_RW = stat.S_IRGRP | stat.S_IWGRP
_ALL_RW = stat.S_IROTH | stat.S_IWOTH
UDEV_RULE = 'SUBSYSTEM=="accel", KERNEL=="accel*", GROUP="render", MODE="0660"'


def find_nodes(machine: Machine, npus: tuple[Npu, ...]) -> tuple[Path, ...]:
    """The device nodes of NPUs; where /sys does not tell whose a node is, it may be one."""
    ours = {npu.folder.resolve() for npu in npus}
    found = []
    for node in sorted(machine.path("/dev/accel").glob("accel*")):
        device = machine.path(f"/sys/class/accel/{node.name}/device")
        if not device.exists() or device.resolve() in ours:
            found.append(node)
    return tuple(found)


def check_node(
    machine: Machine, nodes: tuple[Path, ...], sandbox: Sandbox | None, bad: Status
) -> Finding:
    """Whether there is a node that this user may read and write."""
    if not nodes:
        inside = f"; in {sandbox.name}, {sandbox.node_hint}" if sandbox else ""
        return Finding(
            "node",
            bad,
            "missing",
            "no /dev/accel/accel* of an NPU",
            "one",
            f"the driver makes it: see `driver`{inside}",
        )
    node = nodes[0]
    shown = f"/dev/accel/{node.name}"
    try:
        owner = machine.owner(node)
    except OSError as error:
        return Finding(
            "node", bad, "gone", f"{shown}: {error.strerror}", "it", "see `driver`", {"node": shown}
        )
    group = machine.group(owner.gid)
    mode = f"{stat.filemode(stat.S_IFCHR | owner.mode)}, group {group.name}"
    if machine.usable(node):
        return passed("node", f"{shown} ({mode})", node=shown, group=group.name)
    facts = {"node": shown, "group": group.name, "mode": f"{owner.mode:04o}", "user": machine.user}
    found = f"{shown} ({mode}) is closed to user {machine.user}"
    wanted = "read and write"
    allowed = owner.mode & _ALL_RW == _ALL_RW or (
        owner.mode & _GROUP_RW == _GROUP_RW and owner.gid in machine.groups
    )
    if allowed:
        hint = sandbox.node_hint if sandbox else "look at SELinux, AppArmor and device cgroups"
        situation, action = "denied", f"its mode allows it, so something else forbids it: {hint}"
    elif owner.mode & _GROUP_RW != _GROUP_RW or owner.gid == 0:
        situation = "no-group"
        action = (
            f"no group is let in: write `{UDEV_RULE}` to /etc/udev/rules.d/99-{DRIVER}.rules, "
            f"`sudo udevadm control --reload`, `sudo udevadm trigger`, and join the group: "
            f"`sudo usermod -aG render {machine.user}`, then log in anew"
        )
    elif machine.user in group.members:
        situation = "not-logged-in-anew"
        action = f"{machine.user} is in group {group.name}, this login is older: log in anew"
    elif sandbox:
        situation = "not-in-group"
        action = f"start {sandbox.name} with `--group-add {owner.gid}` ({group.name} of the host)"
    else:
        situation = "not-in-group"
        action = f"`sudo usermod -aG {group.name} {machine.user}`, then log in anew"
    return Finding("node", bad, situation, found, wanted, action, facts)
