"""XRT, its plugin and the driver: missing, too old, or not of one version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from faked_machines import Faked

from npu_embed.doctor.findings import Finding
from npu_embed.doctor.xrt import check_xrt


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


def xrt(faked: Faked, **environ: str) -> Finding:
    return check_xrt(replace(faked.machine(), environ=environ), "FAIL")


def test_xrt_with_its_plugin_passes(faked: Faked) -> None:
    faked.xrt("2.20.0", "2.20.0")
    found = xrt(faked)
    assert (found.status, found.found) == (
        "PASS",
        "XRT 2.20.0 in /opt/xilinx/xrt/lib, plugin 2.20.0",
    )


def test_no_xrt_fails(faked: Faked) -> None:
    found = xrt(faked)
    assert (found.status, found.situation) == ("FAIL", "missing")
    assert "xrt_plugin-amdxdna" in found.action


def test_no_plugin_is_another_thing_than_no_xrt(faked: Faked) -> None:
    faked.xrt("2.20.0", None)
    found = xrt(faked)
    assert (found.status, found.situation) == ("FAIL", "no-plugin")
    assert found.found == "XRT 2.20.0 in /opt/xilinx/xrt/lib, no libxrt_driver_xdna.so"


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.13.478", "FAIL"), ("2.9.1", "FAIL"), ("2.16.0", "PASS"), ("3.0.0", "PASS")],
)
def test_xrt_before_2_16_is_too_old(faked: Faked, version: str, status: str) -> None:
    faked.xrt(version, version)
    found = xrt(faked)
    assert found.status == status
    assert (found.situation == "too-old") == (status == "FAIL")


def test_a_plugin_of_another_version_is_told(faked: Faked) -> None:
    faked.xrt("2.20.0", "2.19.0")
    found = xrt(faked)
    assert (found.status, found.situation) == ("WARN", "plugin-differs")
    assert "2.20.0" in found.found
    assert "2.19.0" in found.found


@pytest.mark.parametrize(
    ("driver", "situation"),
    [
        ("2.20.0_20251103, 0123abcd", "ok"),
        ("2.20.251103.53.release", "ok"),
        ("2.21.0_20251207, 71dd5c67", "driver-differs"),
        ("0.6", "ok"),  # numbered otherwise: says nothing of the plugin
        (None, "ok"),
    ],
)
def test_a_driver_of_amds_package_must_be_of_the_plugins_version(
    faked: Faked, driver: str | None, situation: str
) -> None:
    faked.whole()
    if driver is not None:
        faked.write("/sys/module/amdxdna/version", driver)
    assert xrt(faked).situation == situation


def test_a_distributions_folders_are_searched(faked: Faked) -> None:
    faked.write("/usr/lib/libxrt_coreutil.so.2.21.75")
    faked.write("/usr/lib/x86_64-linux-gnu/libxrt_driver_xdna.so.2.21.75")
    assert xrt(faked).found == "XRT 2.21.75 in /usr/lib, plugin 2.21.75"


def test_xilinx_xrt_goes_before(faked: Faked) -> None:
    faked.xrt("2.20.0")
    faked.write("/home/ann/xrt/lib/libxrt_coreutil.so.2.23.1")
    assert xrt(faked, XILINX_XRT="/home/ann/xrt").facts["version"] == "2.23.1"


def test_a_version_may_be_in_the_name_a_link_leads_to(faked: Faked) -> None:
    real = faked.write("/usr/lib/elsewhere/libxrt_coreutil.so.2.18.0")
    for name in ("libxrt_coreutil.so", "libxrt_driver_xdna.so"):
        (real.parent.parent / name).symlink_to(real)
    assert xrt(faked).facts == {"version": "2.18.0", "plugin": "2.18.0", "driver": None}


def test_libraries_without_a_version_are_no_failure(faked: Faked) -> None:
    for name in ("libxrt_coreutil.so", "libxrt_driver_xdna.so"):
        faked.write(f"/usr/lib64/{name}")
    found = xrt(faked)
    assert (found.status, found.found) == (
        "PASS",
        "XRT of unknown version in /usr/lib64, plugin of unknown version",
    )
