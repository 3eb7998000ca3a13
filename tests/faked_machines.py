"""Machines made of files in a folder, for the doctor to examine."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_embed.doctor.ioctls import (
    AIE_METADATA,
    HW_CONTEXTS,
    MAX_CONTEXTS,
    METADATA_BYTES,
    RESOURCE_INFO,
)
from npu_embed.doctor.machine import Group, Machine, Owner
from npu_embed.doctor.probe import PyxrtProbe

ADDRESS = "0000:c5:00.1"
KERNEL = "6.14.0-test"
RENDER = 992
ALL_NAMES = frozenset(("device", "bo", "run", "hw_context", "runlist"))
WORKING = PyxrtProbe(
    "done", file="/x/pyxrt.so", names=ALL_NAMES, devices=1, name="NPU Strix", module="None"
)


@dataclass
class Faked:
    """A folder with system files, and who looks at them."""

    root: Path

    def write(self, absolute: str, text: str = "") -> Path:
        """A file of the machine."""
        path = self.root / absolute.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def pci(
        self, device: int = 0x17F0, revision: int = 0x10, firmware: str | None = "1.0.0.166"
    ) -> Path:
        """An NPU on the bus, without a driver."""
        folder = f"/sys/bus/pci/devices/{ADDRESS}"
        self.write(f"{folder}/vendor", "0x1022\n")
        self.write(f"{folder}/device", f"0x{device:04x}\n")
        self.write(f"{folder}/revision", f"0x{revision:02x}\n")
        if firmware is not None:
            self.write(f"{folder}/fw_version", f"{firmware}\n")
        return self.root / folder.lstrip("/")

    def driver(self, version: str | None = None, *, bound: bool = True) -> None:
        """The driver, loaded and bound to the NPU."""
        self.write("/sys/module/amdxdna/refcnt", "0\n")
        if version is not None:
            self.write("/sys/module/amdxdna/version", f"{version}\n")
        if bound:
            drivers = self.root / "sys/bus/pci/drivers/amdxdna"
            drivers.mkdir(parents=True, exist_ok=True)
            (self.root / f"sys/bus/pci/devices/{ADDRESS}/driver").symlink_to(drivers)

    def node(self, name: str = "accel0", owner: str | None = ADDRESS) -> Path:
        """A device node (a plain file), which belongs to a PCI device."""
        if owner is not None:
            device = self.root / f"sys/class/accel/{name}/device"
            device.parent.mkdir(parents=True, exist_ok=True)
            device.symlink_to(self.root / f"sys/bus/pci/devices/{owner}")
        return self.write(f"/dev/accel/{name}")

    def xrt(self, version: str = "2.20.0", plugin: str | None = "2.20.0") -> None:
        """XRT's libraries."""
        self.write(f"/opt/xilinx/xrt/lib/libxrt_coreutil.so.{version}")
        if plugin is not None:
            self.write(f"/opt/xilinx/xrt/lib/libxrt_driver_xdna.so.{plugin}")

    def whole(self) -> Faked:
        """All that an NPU needs."""
        self.pci()
        self.driver()
        self.node()
        self.xrt()
        return self

    def machine(self) -> Machine:
        """The machine as user `ann` sees it, who is in no group of the node's."""
        return Machine(
            root=self.root,
            kernel=KERNEL,
            environ={},
            user="ann",
            groups=frozenset((1000,)),
            memlock=(None, None),
            python=(3, 11),
            import_path=(),
            usable=lambda path: True,
            owner=lambda path: Owner(0, RENDER, 0o660),
            group=lambda gid: Group({0: "root", RENDER: "render"}.get(gid, str(gid))),
            query=DriverSays(),
            kernel_log=lambda: None,
            pyxrt=lambda: WORKING,
        )


@dataclass(frozen=True)
class DriverSays:
    """The driver's answers: columns, the limit of contexts (0: it tells none), who holds some."""

    columns: int = 8
    limit: int | None = 16
    pids: tuple[int, ...] = ()
    errors: Mapping[int, OSError] | None = None

    def __call__(self, node: Path, what: int, size: int) -> bytes:
        if self.errors and what in self.errors:
            raise self.errors[what]
        if what == AIE_METADATA:
            assert size == METADATA_BYTES
            return struct.pack("=IHH", 1 << 25, self.columns, 6).ljust(size, b"\0")
        if what == RESOURCE_INFO:
            return struct.pack("=5Q", 1800, 50, self.limit or 0, 50, len(self.pids))
        assert what == HW_CONTEXTS
        assert size == 64 * MAX_CONTEXTS
        entries = b"".join(
            struct.pack("=IIIIq5Q", i, 0, 4, 0, pid, 9, 9, 0, 0, 0)
            for i, pid in enumerate(self.pids)
        )
        return entries.ljust(size, b"\0")
