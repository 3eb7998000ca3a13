"""Who may use the device node, how much memory may be locked, and what containers keep out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from faked_machines import RENDER, Faked

from npu_embed.doctor.findings import Finding
from npu_embed.doctor.hardware import find_npus
from npu_embed.doctor.machine import Group, Machine, Owner
from npu_embed.doctor.memlock import HEAP_BYTES, check_memlock
from npu_embed.doctor.node import check_node, find_nodes
from npu_embed.doctor.sandbox import DOCKER, PODMAN, Sandbox, check_sandbox, find_sandbox

MIB = 1 << 20


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


def node(faked: Faked, sandbox: Sandbox | None = None, machine: Machine | None = None) -> Finding:
    machine = machine or faked.machine()
    return check_node(machine, find_nodes(machine, find_npus(machine)), sandbox, "FAIL")


def closed(
    faked: Faked,
    mode: int = 0o660,
    gid: int = RENDER,
    sandbox: Sandbox | None = None,
    machine: Machine | None = None,
) -> Finding:
    faked.whole()
    machine = replace(
        machine or faked.machine(), usable=lambda _: False, owner=lambda _: Owner(0, gid, mode)
    )
    return node(faked, sandbox, machine)


def test_a_usable_node_passes_and_names_its_group(faked: Faked) -> None:
    faked.whole()
    found = node(faked)
    assert (found.status, found.found) == ("PASS", "/dev/accel/accel0 (crw-rw----, group render)")


def test_no_node_fails(faked: Faked) -> None:
    faked.pci()
    found = node(faked)
    assert (found.status, found.situation) == ("FAIL", "missing")
    assert "see `driver`" in found.action


def test_no_node_in_docker_says_how_to_pass_it_on(faked: Faked) -> None:
    faked.pci()
    assert "docker run --device /dev/accel/accel0" in node(faked, DOCKER).action


def test_the_node_of_another_accelerator_is_none(faked: Faked) -> None:
    faked.pci()
    faked.write("/sys/bus/pci/devices/0000:00:0b.0/vendor", "0x8086")
    faked.node("accel0", owner="0000:00:0b.0")
    assert node(faked).situation == "missing"
    faked.node("accel1")
    assert node(faked).facts["node"] == "/dev/accel/accel1"


def test_a_node_whose_device_cannot_be_seen_may_be_the_npus(faked: Faked) -> None:
    faked.node(owner=None)
    assert node(faked).status == "PASS"


def test_a_closed_node_names_the_group_to_join(faked: Faked) -> None:
    assert closed(faked, mode=0o664).situation == "not-in-group"


def test_a_closed_node_says_how_and_to_whom(faked: Faked) -> None:
    found = closed(faked)
    assert (found.status, found.situation) == ("FAIL", "not-in-group")
    assert found.found == "/dev/accel/accel0 (crw-rw----, group render) is closed to user ann"
    assert "sudo usermod -aG render ann" in found.action


def test_a_closed_node_in_a_container_names_the_hosts_group(faked: Faked) -> None:
    assert f"--group-add {RENDER}" in closed(faked, sandbox=DOCKER).action


def test_a_member_who_joined_after_the_login_is_told_to_log_in_anew(faked: Faked) -> None:
    machine = replace(faked.machine(), group=lambda _: Group("render", ("bob", "ann")))
    found = closed(faked, machine=machine)
    assert found.situation == "not-logged-in-anew"


@pytest.mark.parametrize(("mode", "gid"), [(0o600, 0), (0o660, 0), (0o640, RENDER)])
def test_a_node_that_lets_no_group_in_needs_a_rule(faked: Faked, mode: int, gid: int) -> None:
    found = closed(faked, mode=mode, gid=gid)
    assert found.situation == "no-group"
    assert 'SUBSYSTEM=="accel"' in found.action


@pytest.mark.parametrize("sandbox", [None, DOCKER])
def test_a_node_closed_against_its_mode_is_closed_by_something_else(
    faked: Faked, sandbox: Sandbox | None
) -> None:
    found = closed(faked, mode=0o666, sandbox=sandbox)
    assert found.situation == "denied"
    assert ("--device" if sandbox else "SELinux") in found.action


def test_a_member_of_the_group_who_is_kept_out_is_not_told_to_join(faked: Faked) -> None:
    machine = replace(faked.machine(), groups=frozenset((RENDER,)))
    assert closed(faked, machine=machine).situation == "denied"


def test_a_node_that_vanishes_is_a_finding(faked: Faked) -> None:
    faked.whole()

    def gone(path: Path) -> Owner:
        raise FileNotFoundError(2, "No such file or directory")

    assert node(faked, machine=replace(faked.machine(), owner=gone)).situation == "gone"


# Locked memory


def memlock(
    faked: Faked,
    soft: int | None,
    hard: int | None = None,
    weights: int = 0,
    sandbox: Sandbox | None = None,
) -> Finding:
    machine = replace(faked.machine(), memlock=(soft, hard))
    return check_memlock(machine, weights, sandbox, "FAIL")


def test_unlimited_memory_passes(faked: Faked) -> None:
    assert memlock(faked, None).status == "PASS"


def test_8_mib_are_too_little_and_the_line_to_write_is_told(faked: Faked) -> None:
    found = memlock(faked, 8 * MIB, 8 * MIB)
    assert (found.status, found.situation) == ("FAIL", "too-small")
    assert found.found == "8 MiB may be locked"
    assert "at least 64 MiB" in found.wanted
    assert "write `ann - memlock unlimited` to /etc/security/limits.d/" in found.action
    assert "LimitMEMLOCK=infinity" in found.action
    assert "ulimit" not in found.action  # the hard limit would not let them


def test_weights_count_too(faked: Faked) -> None:
    assert memlock(faked, HEAP_BYTES, HEAP_BYTES).status == "PASS"
    found = memlock(faked, HEAP_BYTES + MIB, None, weights=2 * MIB)
    assert found.status == "FAIL"
    assert "at least 66 MiB" in found.wanted
    assert found.action.startswith("`ulimit -l unlimited`")


def test_a_hard_limit_that_is_enough_is_named(faked: Faked) -> None:
    assert memlock(faked, 8 * MIB, 128 * MIB).action.startswith("`ulimit -l 131072`")


def test_in_a_container_it_is_the_containers_limit(faked: Faked) -> None:
    assert "--ulimit memlock=-1:-1" in memlock(faked, MIB, MIB, sandbox=PODMAN).action


@pytest.mark.parametrize(
    ("capabilities", "status"),
    [("000001ffffffffff", "PASS"), ("0000000000004000", "PASS"), ("00000000a80425fb", "FAIL"),
     ("junk", "FAIL")],
)  # fmt: skip
def test_a_capability_lifts_the_limit(faked: Faked, capabilities: str, status: str) -> None:
    faked.write("/proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    assert memlock(faked, MIB, MIB).status == status


# Containers


@pytest.mark.parametrize(
    ("files", "environ", "kernel", "name"),
    [
        (["/.dockerenv"], {}, "6.14", "docker"),
        (["/run/.containerenv"], {}, "6.14", "podman"),
        ([], {"container": "podman"}, "6.14", "podman"),
        ([], {"container": "docker"}, "6.14", "docker"),
        (["/.flatpak-info"], {"container": "flatpak"}, "6.14", "flatpak"),
        ([], {"SNAP_NAME": "code"}, "6.14", "snap"),
        (["/.dockerenv"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "6.14", "kubernetes"),
        ([], {"container": "systemd-nspawn"}, "6.14", "a container"),
        ([], {}, "5.15.167.4-microsoft-standard-WSL2", "WSL"),
        ([], {}, "4.4.0-19041-Microsoft", "WSL"),
        ([], {}, "6.14.0-generic", None),
    ],
)
def test_a_container_is_known_by_its_signs(
    faked: Faked, files: list[str], environ: dict[str, str], kernel: str, name: str | None
) -> None:
    for file in files:
        faked.write(file)
    found = find_sandbox(replace(faked.machine(), environ=environ, kernel=kernel))
    assert (found.name if found else None) == name
    if found:
        without = check_sandbox(found, node=False)
        assert (without.status, without.situation) == ("WARN", "no-node")
        assert found.node_hint in without.action
    assert check_sandbox(found, node=True).status == "PASS"
