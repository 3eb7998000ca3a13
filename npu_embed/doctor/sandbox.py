"""Whether this process runs in a container, and how that one is given an NPU."""

from __future__ import annotations

from dataclasses import dataclass

from .findings import Finding, passed
from .machine import Machine


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A kind of container: how it is given the device node, and how unlimited locked memory."""

    name: str
    node_hint: str
    memlock_hint: str


DOCKER = Sandbox(
    "docker",
    "start it with `docker run --device /dev/accel/accel0`",
    "start it with `docker run --ulimit memlock=-1:-1`",
)
PODMAN = Sandbox(
    "podman",
    "start it with `podman run --device /dev/accel/accel0 --group-add keep-groups`",
    "start it with `podman run --ulimit memlock=-1:-1`",
)
FLATPAK = Sandbox(
    "flatpak",
    "give it devices with `flatpak override --user --device=all APP`",
    "raise the limit of the session outside, which it inherits",
)
SNAP = Sandbox(
    "snap",
    "install it with `--classic` or `--devmode`, or run outside of it",
    "raise the limit of the session outside, which it inherits",
)
WSL = Sandbox(
    "WSL",
    "WSL's kernel has no amdxdna driver; run on Linux itself",
    "set `* - memlock unlimited` in /etc/security/limits.conf",
)
KUBERNETES = Sandbox(
    "kubernetes",
    "have a device plugin give the pod /dev/accel/accel0",
    "raise the container runtime's LimitMEMLOCK on the node",
)
OTHER = Sandbox(
    "a container",
    "pass /dev/accel/accel0 of the host on to it",
    "raise its limit of locked memory where it is started",
)


def find_sandbox(machine: Machine) -> Sandbox | None:
    """The container this process runs in, None where nothing shows one."""
    kernel = machine.kernel.lower()
    said = machine.environ.get("container", "")
    if machine.path("/.flatpak-info").exists():
        return FLATPAK
    if "SNAP_NAME" in machine.environ:
        return SNAP
    if "KUBERNETES_SERVICE_HOST" in machine.environ:
        return KUBERNETES
    if machine.path("/run/.containerenv").exists() or said == "podman":
        return PODMAN
    if machine.path("/.dockerenv").exists() or said == "docker":
        return DOCKER
    if said:
        return OTHER
    return WSL if "microsoft" in kernel or "wsl" in kernel else None


def check_sandbox(sandbox: Sandbox | None, *, node: bool) -> Finding:
    """Whether a container keeps the NPU from this process. node: one is here."""
    if sandbox is None:
        return passed("container", "none")
    if node:
        return passed("container", f"in {sandbox.name}, with a device node", kind=sandbox.name)
    return Finding(
        "container",
        "WARN",
        "no-node",
        f"in {sandbox.name}, without /dev/accel",
        "the host's device node",
        f"to use an NPU, {sandbox.node_hint}",
        {"kind": sandbox.name},
    )
