"""The bytes of an xclbin with one kernel and one PDI, in the form mlir-aie's files have.

The file depends on the arguments alone: its uuid is a hash of its content and its times are 0, so
the same kernel built twice is the same file.
"""

import hashlib
import re
import uuid
from collections.abc import Sequence

from .xclbin_format import (
    AIE_PARTITION,
    CDO_GROUP,
    CDO_PRIMARY,
    CONNECTION,
    CONNECTION_COUNT,
    CONNECTIVITY,
    COUNT,
    EMBEDDED_METADATA,
    GROUP_CONNECTIVITY,
    GROUP_TOPOLOGY,
    HEADER,
    IP,
    IP_LAYOUT,
    IP_PS_KERNEL,
    MAGIC,
    MEM_DRAM,
    MEM_TOPOLOGY,
    MEMORY,
    PARTITION,
    PDI,
    PREFIX,
    SECTION,
    SUBTYPE_DPU,
    XclbinError,
)

_INSTANCE = "MLIRAIE"
_DPU_KERNEL_ID = 0x901
_OPS_PER_CYCLE = 2048
# mlir-aie writes the same three numbers into every file; XRT compares none of them.
_INFERENCE_FINGERPRINT = 23423
_PRE_POST_FINGERPRINT = 12345
_PRE_CDO_GROUP = 0xC1
_HOST, _SRAM = 0, 1
_BASE_ADDRESS = 0x4000000
_MEMORIES = ((0x10000, b"HOST"), (0xC000, b"SRAM"))
_TOOL_VERSION = (2, 1, 0)
_INSTR_INDEX = 1
_FIRST_BUFFER_INDEX = 3
_FIRST_BUFFER_OFFSET = 0x14
# An execution packet has room for 7 buffer addresses after the three fixed arguments.
_MAX_BUFFERS = 7
_KERNEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,54}")
_MAX_NAME_BYTES = 255
_MAX_U16 = 0xFFFF


def build(
    *,
    pdi_image: bytes,
    kernel_name: str = "MLIR_AIE",
    column_width: int = 4,
    start_columns: Sequence[int] = (0,),
    buffers: int = 5,
    name: str = "npu-embed",
) -> bytes:
    """An xclbin whose kernel takes (opcode, instr, ninstr, bo0, bo1, ...) and runs `pdi_image`.

    column_width columns of the array, from one of start_columns on. name: the partition's.

    Raises:
        XclbinError: an argument has no place in the format.
    """
    _check(pdi_image, kernel_name, column_width, start_columns, buffers, name)
    topology = COUNT.pack(len(_MEMORIES)) + b"".join(
        MEMORY.pack(MEM_DRAM, 1, size_kb, _BASE_ADDRESS, tag) for size_kb, tag in _MEMORIES
    )
    rows = [CONNECTION.pack(_INSTR_INDEX, 0, _SRAM)]
    rows += [CONNECTION.pack(_FIRST_BUFFER_INDEX + i, 0, _HOST) for i in range(buffers)]
    # xclbinutil lists every connection twice in the grouped copy.
    twice = [row for row in rows for _ in range(2)]
    unit = f"{kernel_name}:{_INSTANCE}".encode()
    layout = COUNT.pack(1) + IP.pack(
        IP_PS_KERNEL, SUBTYPE_DPU, _DPU_KERNEL_ID, 0xFFFFFFFFFFFFFFFF, unit
    )
    return _container(
        {
            MEM_TOPOLOGY: topology,
            AIE_PARTITION: _partition(pdi_image, column_width, start_columns, name.encode()),
            EMBEDDED_METADATA: _metadata(kernel_name, buffers).encode(),
            IP_LAYOUT: layout,
            CONNECTIVITY: CONNECTION_COUNT.pack(len(rows)) + b"".join(rows),
            GROUP_CONNECTIVITY: CONNECTION_COUNT.pack(len(twice)) + b"".join(twice),
            GROUP_TOPOLOGY: topology,
        }
    )


def _check(
    pdi_image: bytes,
    kernel_name: str,
    column_width: int,
    start_columns: Sequence[int],
    buffers: int,
    name: str,
) -> None:
    """Refuse what would not fit a field, or what XRT could not load."""
    if not pdi_image:
        raise XclbinError("pdi_image: 0 bytes, wanted the array's image; pass one.")
    if not _KERNEL_NAME.fullmatch(kernel_name):
        raise XclbinError(
            f"kernel_name: {kernel_name!r}, wanted a C identifier of at most 55 characters; "
            "choose another."
        )
    if not 1 <= column_width <= _MAX_U16:
        raise XclbinError(f"column_width: {column_width}, wanted 1 to {_MAX_U16}; pass a width.")
    if not start_columns or not all(0 <= column <= _MAX_U16 for column in start_columns):
        raise XclbinError(
            f"start_columns: {list(start_columns)}, wanted one or more of 0 to {_MAX_U16}; "
            "pass a column."
        )
    if not 1 <= buffers <= _MAX_BUFFERS:
        raise XclbinError(
            f"buffers: {buffers}, wanted 1 to {_MAX_BUFFERS}; a run carries no more buffers."
        )
    if not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
        raise XclbinError(
            f"name: {name[:40]!r}, wanted at most {_MAX_NAME_BYTES} printable bytes; "
            "choose another."
        )


def _metadata(kernel_name: str, buffers: int) -> str:
    """The XML that tells XRT the kernel's arguments."""
    arguments = [
        ("opcode", 0, 8, "0x00", "uint64_t"),
        ("instr", 1, 8, "0x8", "char *"),
        ("ninstr", 0, 4, "0x10", "uint32_t"),
    ]
    # Buffers follow ninstr without a gap: their 64-bit addresses are unaligned on purpose.
    arguments += [
        (f"bo{i}", 1, 8, f"{_FIRST_BUFFER_OFFSET + 8 * i:#x}", "void*") for i in range(buffers)
    ]
    lines = [
        f'          <arg name="{name}" addressQualifier="{qualifier}" id="{index}" '
        f'size="{size:#x}" offset="{offset}" hostOffset="0x0" hostSize="{size:#x}" '
        f'type="{kind}"/>'
        for index, (name, qualifier, size, offset, kind) in enumerate(arguments)
    ]
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            "<project>",
            "  <platform>",
            "    <device>",
            "      <core>",
            f'        <kernel name="{kernel_name}" language="c" type="dpu">',
            '          <extended-data subtype="1" functional="0" '
            f'dpu_kernel_id="{_DPU_KERNEL_ID:#x}"/>',
            *lines,
            f'          <instance name="{_INSTANCE}"/>',
            "        </kernel>",
            "      </core>",
            "    </device>",
            "  </platform>",
            "</project>",
            "",
        ]
    )


def _partition(
    pdi_image: bytes, column_width: int, start_columns: Sequence[int], name: bytes
) -> bytes:
    """AIE_PARTITION: the fixed record, then everything it points to, each on 8 bytes."""
    tail = bytearray()

    def place(data: bytes) -> int:
        offset = PARTITION.size + len(tail)
        tail.extend(_padded(data))
        return offset

    name_at = place(name + b"\0")
    empty_at = place(b"\0")
    columns_at = place(b"".join(column.to_bytes(2, "little") for column in start_columns))
    image_at = place(pdi_image)
    group_name_at = place(b"DPU\0")
    ids_at = place(_DPU_KERNEL_ID.to_bytes(8, "little"))
    pre_groups_at = place(_PRE_CDO_GROUP.to_bytes(4, "little"))
    groups_at = place(CDO_GROUP.pack(group_name_at, CDO_PRIMARY, 1, 1, ids_at, 1, pre_groups_at))
    pdi_uuid = _content_uuid(pdi_image)
    pdis_at = place(PDI.pack(pdi_uuid, len(pdi_image), image_at, 1, groups_at))
    fixed = PARTITION.pack(
        0,
        name_at,
        _OPS_PER_CYCLE,
        _INFERENCE_FINGERPRINT,
        _PRE_POST_FINGERPRINT,
        column_width,
        len(start_columns),
        columns_at,
        1,
        pdis_at,
        empty_at,
    )
    return fixed + bytes(tail)


def _container(sections: dict[int, bytes]) -> bytes:
    """The file: header, section table, sections on 8 bytes each."""
    offset = PREFIX.size + HEADER.size + len(sections) * SECTION.size
    table, body = b"", b""
    for kind, data in sections.items():
        table += SECTION.pack(kind, b"", offset + len(body), len(data))
        body += _padded(data)
    length = offset + len(body)
    prefix = PREFIX.pack(MAGIC, -1, b"\xff" * 28, b"\xff" * 256, 0)
    major, minor, patch = _TOOL_VERSION

    def header(own_uuid: bytes) -> bytes:
        return HEADER.pack(
            *(length, 0, 0, patch, major, minor, 0, 0),
            *(bytes(16), b"", own_uuid, b"", len(sections)),
        )

    own_uuid = _content_uuid(prefix + header(bytes(16)) + table + body)
    return prefix + header(own_uuid) + table + body


def _content_uuid(data: bytes) -> bytes:
    """16 bytes of a well-formed uuid that only this content has."""
    return uuid.UUID(bytes=hashlib.sha256(data).digest()[:16], version=5).bytes


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
