"""The NPU, its driver and firmware: each way in which they are missing is told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from faked_machines import ADDRESS, KERNEL, Faked

from npu_embed.doctor.findings import Finding
from npu_embed.doctor.hardware import check_driver, check_firmware, check_npus, find_npus

PROTOCOL = (
    f"[    4.1] amdxdna {ADDRESS}: [drm] *ERROR* aie2_check_protocol: "
    "Incompatible firmware protocol major 7 minor 2"
)
NO_FILE = (
    f"[    4.1] amdxdna {ADDRESS}: Direct firmware load for amdnpu/17f0_10/npu.sbin failed "
    "with error -2"
)


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


def npu(faked: Faked, *, node: bool = False, demanded: bool = False) -> Finding:
    return check_npus(find_npus(faked.machine()), node=node, bad="FAIL" if demanded else "WARN")


def driver(faked: Faked) -> Finding:
    machine = faked.machine()
    return check_driver(machine, find_npus(machine), "FAIL")


def firmware(faked: Faked, log: str | None = None) -> Finding:
    machine = replace(faked.machine(), kernel_log=lambda: log)
    return check_firmware(machine, find_npus(machine), "FAIL")


@pytest.mark.parametrize(
    ("device", "revision", "shown"),
    [
        (0x1502, 0x00, "1502 revision 00 (npu1)"),
        (0x17F0, 0x10, "17f0 revision 10 (npu2)"),
        (0x17F0, 0x20, "17f0 revision 20 (npu2)"),
    ],
)
def test_an_npu_is_known_by_its_pci_ids(
    faked: Faked, device: int, revision: int, shown: str
) -> None:
    faked.pci(device, revision)
    found = npu(faked)
    assert (found.status, found.found) == ("PASS", f"{shown} at {ADDRESS}")


def test_an_npu_no_bundle_is_for_is_no_npu_to_use(faked: Faked) -> None:
    faked.pci(0x17F1)
    assert npu(faked, demanded=True).situation == "unknown-generation"


def test_other_devices_of_amd_are_no_npus(faked: Faked) -> None:
    faked.pci(0x1503)
    assert find_npus(faked.machine()) == ()


def test_no_npu_is_no_failure_unless_one_is_demanded(faked: Faked) -> None:
    found = npu(faked)
    assert (found.status, found.situation) == ("WARN", "none")
    assert "runs are emulated" in found.text
    assert npu(faked, demanded=True).status == "FAIL"


def test_a_node_without_a_visible_pci_bus_is_told(faked: Faked) -> None:
    assert npu(faked, node=True).situation == "not-on-pci"


# The driver


def test_a_bound_driver_passes_with_its_version(faked: Faked) -> None:
    faked.pci()
    faked.driver("2.21.0_20251207")
    found = driver(faked)
    assert (found.status, found.found) == ("PASS", "amdxdna 2.21.0_20251207")


def test_the_kernels_own_driver_has_the_kernels_version(faked: Faked) -> None:
    faked.pci()
    faked.driver()
    assert driver(faked).found == f"amdxdna of Linux {KERNEL}"


def test_a_driver_that_does_not_drive_the_npu_fails(faked: Faked) -> None:
    faked.pci()
    faked.driver(bound=False)
    found = driver(faked)
    assert (found.status, found.situation) == ("FAIL", "not-bound")
    assert ADDRESS in found.found
    assert "dmesg" in found.action


@pytest.mark.parametrize("file", ["modules.dep", "modules.builtin"])
def test_a_driver_the_kernel_has_is_to_be_loaded(faked: Faked, file: str) -> None:
    faked.pci()
    faked.write(f"/lib/modules/{KERNEL}/{file}", "kernel/drivers/accel/amdxdna/amdxdna.ko.zst:\n")
    found = driver(faked)
    assert found.situation == "not-loaded"
    assert "sudo modprobe amdxdna" in found.action


@pytest.mark.parametrize("line", ["blacklist amdxdna", "install amdxdna /bin/false"])
def test_a_forbidden_driver_names_the_file(faked: Faked, line: str) -> None:
    faked.pci()
    faked.write("/etc/modprobe.d/no-npu.conf", f"# no\n  {line}\n")
    found = driver(faked)
    assert found.situation == "blacklisted"
    assert "/etc/modprobe.d/no-npu.conf" in found.found


def test_a_comment_forbids_nothing(faked: Faked) -> None:
    faked.pci()
    faked.write("/etc/modprobe.d/a.conf", "# blacklist amdxdna\nblacklist amdxdna_other_thing-x\n")
    faked.write("/etc/modprobe.d/b.conf", "#blacklist amdxdna\n")
    assert driver(faked).situation == "missing"


def test_a_kernel_without_the_driver_is_to_be_replaced(faked: Faked) -> None:
    faked.pci()
    found = driver(faked)
    assert (found.status, found.situation) == ("FAIL", "missing")
    assert "6.14" in found.action


# The firmware


def test_a_running_firmware_passes_with_its_version(faked: Faked) -> None:
    faked.pci(firmware="255.0.5.35")
    assert (firmware(faked).status, firmware(faked).found) == ("PASS", "255.0.5.35")


@pytest.mark.parametrize(
    "line",
    [PROTOCOL, "amdxdna 0: aie2_check_protocol: Firmware minor version smaller than supported"],
)
def test_a_firmware_of_another_protocol_disagrees(faked: Faked, line: str) -> None:
    faked.pci(firmware=None)
    faked.write("/lib/firmware/amdnpu/17f0_10/npu.sbin.zst")
    found = firmware(faked, f"other\n{line}\nlater\n")
    assert (found.status, found.situation) == ("FAIL", "disagrees")
    assert line.partition(": ")[2].rpartition(": ")[2] in found.found
    assert "reboot" in found.action


def test_another_drivers_words_are_not_the_npus(faked: Faked) -> None:
    faked.pci(firmware=None)
    assert firmware(faked, "ivpu: Incompatible firmware protocol major 7").situation == "unknown"


def test_a_firmware_file_the_driver_missed_is_named(faked: Faked) -> None:
    faked.pci(firmware=None)
    found = firmware(faked, NO_FILE)
    assert found.situation == "missing"
    assert "amdnpu/17f0_10/npu.sbin" in found.found


def test_a_system_with_firmware_but_none_for_this_npu_lacks_it(faked: Faked) -> None:
    faked.pci(firmware=None)
    faked.write("/lib/firmware/amdnpu/1502_00/npu.sbin")
    found = firmware(faked)
    assert found.situation == "missing"
    assert "linux-firmware" in found.action


def test_a_container_without_firmware_files_says_nothing_of_the_host(faked: Faked) -> None:
    faked.pci(firmware=None)
    found = firmware(faked)
    assert (found.status, found.situation) == ("WARN", "unknown")
