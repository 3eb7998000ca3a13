"""The NPUs on the PCI bus, their driver and their firmware."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding, Status, passed
from .machine import Machine, read_text

AMD = 0x1022
# PCI device -> the NPU generation that a bundle's target names. Source: the amdxdna driver's table.
GENERATIONS = {0x1502: "npu1", 0x17F0: "npu2"}
LATER_NPUS = range(0x17F1, 0x17F4)  # of generations no bundle is for
DRIVER = "amdxdna"
FIRST_KERNEL = "6.14"  # whose source has the driver

_DISAGREE = re.compile(r"Incompatible firmware protocol.*|Firmware minor version smaller.*")
_NO_FIRMWARE = re.compile(r"(?:firmware load for|request_firmware|request fw) (amdnpu/\S+).*")


@dataclass(frozen=True, slots=True)
class Npu:
    """An NPU on the PCI bus: `0000:c5:00.1`, its ids, and the driver that is bound to it.

    generation is None for one that no bundle is for.
    """

    address: str
    folder: Path
    device: int
    revision: int
    driver: str | None

    @property
    def generation(self) -> str | None:
        """`npu1` or `npu2`."""
        return GENERATIONS.get(self.device)

    @property
    def shown(self) -> str:
        """For people: `17f0 revision 10 (npu2) at 0000:c5:00.1`."""
        return (
            f"{self.device:04x} revision {self.revision:02x} "
            f"({self.generation or 'of no known generation'}) at {self.address}"
        )


def find_npus(machine: Machine) -> tuple[Npu, ...]:
    """The NPUs on the PCI bus, by address."""
    found = []
    for folder in sorted(machine.path("/sys/bus/pci/devices").glob("*")):
        device = _hex(folder / "device")
        if _hex(folder / "vendor") != AMD or not (device in GENERATIONS or device in LATER_NPUS):
            continue
        link = folder / "driver"
        driver = link.resolve().name if link.exists() else None
        revision = _hex(folder / "revision") or 0
        found.append(Npu(folder.name, folder, device or 0, revision, driver))
    return tuple(found)


def _hex(path: Path) -> int | None:
    try:
        return int(read_text(path) or "", 16)
    except ValueError:
        return None


def check_npus(npus: tuple[Npu, ...], *, node: bool, bad: Status) -> Finding:
    """Whether there is an NPU. node: there is a device node; bad: how bad it is if not."""
    if not npus and node:
        return Finding(
            "npu",
            "WARN",
            "not-on-pci",
            "a device node, but no NPU this user sees on the PCI bus",
            "both",
            "in a container, let it see the host's /sys",
        )
    if not npus:
        return Finding(
            "npu",
            bad,
            "none",
            "no XDNA NPU on the PCI bus",
            "one" if bad == "FAIL" else "",
            "runs are emulated; where the processor has an NPU, enable it in the BIOS"
            if bad == "WARN"
            else "where the processor has one, enable it in the BIOS",
        )
    unknown = [npu for npu in npus if npu.generation is None]
    shown = "; ".join(npu.shown for npu in npus)
    if unknown:
        return Finding(
            "npu", bad, "unknown-generation", shown, "npu1 or npu2", "use the emulated NPU"
        )
    return passed("npu", shown, generations=[str(npu.generation) for npu in npus])


def check_driver(machine: Machine, npus: tuple[Npu, ...], bad: Status) -> Finding:
    """Whether the kernel's driver is loaded and bound to every NPU."""
    version = machine.text(f"/sys/module/{DRIVER}/version")
    if not machine.path(f"/sys/module/{DRIVER}").exists():
        return _not_loaded(machine, bad)
    unbound = [npu.address for npu in npus if npu.driver != DRIVER]
    shown = f"{DRIVER} {version}" if version else f"{DRIVER} of Linux {machine.kernel}"
    if unbound:
        return Finding(
            "driver",
            bad,
            "not-bound",
            f"{shown} is loaded, but does not drive {', '.join(unbound)}",
            "it to have started the NPU",
            f"read why: `sudo dmesg | grep {DRIVER}`; see `firmware` below",
            {"version": version},
        )
    return passed("driver", shown, version=version, kernel=machine.kernel)


def _not_loaded(machine: Machine, bad: Status) -> Finding:
    for file in sorted(machine.path("/etc/modprobe.d").glob("*.conf")):
        if re.search(rf"^\s*(?:blacklist|install)\s+{DRIVER}\b", read_text(file) or "", re.M):
            return Finding(
                "driver",
                bad,
                "blacklisted",
                f"{DRIVER} is not loaded: /etc/modprobe.d/{file.name} forbids it",
                "it loaded",
                f"take that line out, then `sudo modprobe {DRIVER}`",
            )
    folder = f"/lib/modules/{machine.kernel}"
    known = (machine.text(f"{folder}/{name}") for name in ("modules.dep", "modules.builtin"))
    if any(f"{DRIVER}.ko" in (text or "") for text in known):
        return Finding(
            "driver",
            bad,
            "not-loaded",
            f"Linux {machine.kernel} has {DRIVER}, not loaded",
            "it loaded",
            f"`sudo modprobe {DRIVER}`; if it fails, `sudo dmesg | tail` says why "
            "(with Secure Boot: a module that is not signed)",
        )
    return Finding(
        "driver",
        bad,
        "missing",
        f"Linux {machine.kernel} has no {DRIVER} for this user to see",
        "the driver",
        f"boot Linux {FIRST_KERNEL} or later with it, or install AMD's package of the driver; in "
        "a container, look on the host",
    )


def check_firmware(machine: Machine, npus: tuple[Npu, ...], bad: Status) -> Finding:
    """Whether the NPUs run a firmware their driver can talk to."""
    running = {npu.address: read_text(npu.folder / "fw_version") for npu in npus}
    if all(running.values()) and running:
        versions = sorted(set(map(str, running.values())))
        return passed("firmware", ", ".join(versions), versions=versions)
    log = [line for line in (machine.kernel_log() or "").splitlines() if DRIVER in line]
    for line in reversed(log):
        if said := _DISAGREE.search(line):
            return Finding(
                "firmware",
                bad,
                "disagrees",
                f'driver and firmware disagree: "{said[0].strip()}"',
                "a firmware of the protocol this driver speaks",
                "install linux-firmware and kernel (or AMD's driver package, which brings its own "
                "firmware) of about the same date, then reboot",
                {"log": line.strip()},
            )
    folders = [npu for npu in npus if _lacks_firmware(machine, npu)]
    missing = next((m[1] for line in reversed(log) if (m := _NO_FIRMWARE.search(line))), None)
    if folders or missing:
        wanted = missing or f"amdnpu/{folders[0].device:04x}_{folders[0].revision:02x}/npu.sbin"
        return Finding(
            "firmware",
            bad,
            "missing",
            f"no /lib/firmware/{wanted}",
            "the NPU's firmware",
            "install your distribution's linux-firmware, then reboot",
        )
    return Finding(
        "firmware",
        "WARN",
        "unknown",
        "its version cannot be read here",
        "the driver to tell it",
        f"see `driver`; `sudo dmesg | grep {DRIVER}` says what the driver made of it",
        {"log": log[-1].strip() if log else None},
    )


def _lacks_firmware(machine: Machine, npu: Npu) -> bool:
    """Whether the system has firmware files, but none for this NPU; a container may have none."""
    root = machine.path("/lib/firmware")
    folder = root / "amdnpu" / f"{npu.device:04x}_{npu.revision:02x}"
    return root.exists() and not any(folder.glob("npu*.sbin*"))
