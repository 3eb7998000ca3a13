"""The xclbin2 container: its binary layouts, and what a reader makes of them.

All numbers are little endian; offsets inside AIE_PARTITION count from the start of that section.

Source: struct axlf and the section structs in Xilinx/XRT, include/xrt/detail/xclbin.h.
"""

from dataclasses import dataclass, field
from struct import Struct

MAGIC = b"xclbin2\0"

# magic, signature length, 0xFF fill, key block, unique id
PREFIX = Struct("<8s i 28s 256s Q")
# length, timestamp, feature ROM timestamp, patch, major, minor, mode, action mask, interface uuid,
# platform name, uuid, debug name, section count
HEADER = Struct("<QQQ HBB HH 16s 64s 16s 16s I 4x")
# kind, name, offset, size
SECTION = Struct("<I 16s 4x QQ")
COUNT = Struct("<i 4x")
# CONNECTIVITY alone has rows of 4-byte fields, so no padding follows its count
CONNECTION_COUNT = Struct("<i")
# type, used, size in KiB, base address, tag
MEMORY = Struct("<BB 6x QQ 16s")
# argument index, IP index, memory index
CONNECTION = Struct("<iii")
# type, subtype in bits 1:0 and functional in bits 5:4, kernel id in bits 11:0, base address, name
IP = Struct("<I HH Q 64s")
# schema, name, operations a cycle, fingerprints, column width, start columns (count, offset), PDIs
# (count, offset), commit id
PARTITION = Struct("<B 3x II 4x QQ H 6x II 72x II I 52x")
# uuid, image (size, offset), CDO groups (count, offset)
PDI = Struct("<16s II II 64x")
# name, type, PDI id, DPU kernel ids (count, offset), pre-CDO groups (count, offset)
CDO_GROUP = Struct("<I B 3x Q II II 64x")

EMBEDDED_METADATA = 2
MEM_TOPOLOGY = 6
CONNECTIVITY = 7
IP_LAYOUT = 8
GROUP_TOPOLOGY = 26
GROUP_CONNECTIVITY = 27
AIE_PARTITION = 32

_KIND_NAMES = {
    0: "BITSTREAM",
    EMBEDDED_METADATA: "EMBEDDED_METADATA",
    MEM_TOPOLOGY: "MEM_TOPOLOGY",
    CONNECTIVITY: "CONNECTIVITY",
    IP_LAYOUT: "IP_LAYOUT",
    14: "BUILD_METADATA",
    15: "KEYVALUE_METADATA",
    16: "USER_METADATA",
    22: "SYSTEM_METADATA",
    25: "AIE_METADATA",
    GROUP_TOPOLOGY: "GROUP_TOPOLOGY",
    GROUP_CONNECTIVITY: "GROUP_CONNECTIVITY",
    AIE_PARTITION: "AIE_PARTITION",
}

MEM_DRAM = 2
IP_PS_KERNEL = 7
SUBTYPE_DPU = 1
CDO_PRIMARY = 1

SCALAR = 0
GLOBAL = 1


class XclbinError(ValueError):
    """An xclbin is malformed, or cannot be built from these arguments."""


@dataclass(frozen=True, slots=True)
class Section:
    """One row of the section table: size_bytes at offset_bytes of the file."""

    kind: int
    name: str
    offset_bytes: int
    size_bytes: int

    @property
    def kind_name(self) -> str:
        """XRT's name of the kind; `kind <n>` for one no NPU file has."""
        return _KIND_NAMES.get(self.kind, f"kind {self.kind}")


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory bank; index is its place in MEM_TOPOLOGY, the bank number of XRT's group ids."""

    tag: str
    type: int
    used: bool
    size_kb: int
    base_address: int
    index: int


@dataclass(frozen=True, slots=True)
class Ip:
    """A compute unit, named KERNEL:INSTANCE."""

    name: str
    type: int
    subtype: int
    functional: int
    kernel_id: int
    base_address: int


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel argument, at offset_bytes of the register map; qualifier 0 scalar, 1 global.

    connections: indices of the memories the argument's buffer may lie in; none for a scalar.
    """

    name: str
    index: int
    qualifier: int
    size_bytes: int
    offset_bytes: int
    type: str
    connections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A kernel as the metadata describes it; args[i].index == i."""

    name: str
    args: tuple[Argument, ...]
    instances: tuple[str, ...]
    dpu_kernel_id: int | None
    type: str = ""


@dataclass(frozen=True, slots=True)
class CdoGroup:
    """Which kernels a PDI serves; type 1 primary, 2 lite, 3 pre/post."""

    name: str
    type: int
    pdi_id: int
    dpu_kernel_ids: tuple[int, ...]
    pre_cdo_groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pdi:
    """An image that configures the array."""

    uuid: str
    image: bytes = field(repr=False)
    cdo_groups: tuple[CdoGroup, ...] = ()

    @property
    def dpu_kernel_ids(self) -> tuple[int, ...]:
        """The ids of the kernels this image serves, over all its groups."""
        return tuple(kernel_id for group in self.cdo_groups for kernel_id in group.dpu_kernel_ids)


@dataclass(frozen=True, slots=True)
class Partition:
    """The columns a hardware context needs, and the images it runs."""

    name: str
    column_width: int
    start_columns: tuple[int, ...]
    pdis: tuple[Pdi, ...]
    ops_per_cycle: int


@dataclass(frozen=True, slots=True)
class Xclbin:
    """A parsed xclbin. connectivity: (argument index, IP index, memory index) rows.

    vbnv: the platform's name (XRT: xsa name). mode: 0 flat, 4 hardware emulation. version: major,
    minor, patch of the tool. A file without metadata has no kernels, one without AIE_PARTITION no
    partition.
    """

    uuid: str
    interface_uuid: str
    vbnv: str
    mode: int
    version: tuple[int, int, int]
    sections: tuple[Section, ...]
    kernels: tuple[KernelInfo, ...]
    memories: tuple[Memory, ...]
    ips: tuple[Ip, ...]
    connectivity: tuple[tuple[int, int, int], ...]
    partition: Partition | None

    def section(self, kind: int) -> Section | None:
        """The first section of a kind, the one XRT uses; None where there is none."""
        return next((section for section in self.sections if section.kind == kind), None)

    def kernel(self, name: str) -> KernelInfo | None:
        """The kernel of that name; None where there is none."""
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    def pdi(self, kernel: KernelInfo) -> Pdi | None:
        """The image that serves a kernel, found by its DPU kernel id; None where none does."""
        pdis = self.partition.pdis if self.partition else ()
        return next((pdi for pdi in pdis if kernel.dpu_kernel_id in pdi.dpu_kernel_ids), None)
