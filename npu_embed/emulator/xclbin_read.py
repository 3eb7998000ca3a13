"""Bytes of an xclbin -> Xclbin. Files come from strangers: every size and offset is checked first.

Written from the format, so files of xclbinutil, mlir-aie and AMD are read as well as our own.
"""

import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from struct import Struct
from typing import Any

from .xclbin_format import (
    AIE_PARTITION,
    CDO_GROUP,
    CONNECTION,
    CONNECTION_COUNT,
    CONNECTIVITY,
    COUNT,
    EMBEDDED_METADATA,
    GLOBAL,
    HEADER,
    IP,
    IP_LAYOUT,
    MAGIC,
    MEM_TOPOLOGY,
    MEMORY,
    PARTITION,
    PDI,
    PREFIX,
    SECTION,
    CdoGroup,
    Ip,
    KernelInfo,
    Memory,
    Partition,
    Pdi,
    Section,
    Xclbin,
    XclbinError,
)
from .xclbin_xml import parse_kernels

_TABLE_BYTES = PREFIX.size + HEADER.size
_MAX_NAME_BYTES = 256
MAX_FILE_BYTES = 256 << 20  # real ones have a few megabytes
MAX_METADATA_BYTES = 4 << 20  # of XML, whose elements take twenty times their text; real: some KB
MAX_ITEMS = 1 << 16  # of all arrays of a section, and sections of a file; real ones have dozens
_REMEDY = "the file is damaged, make or download it again."


class _Block:
    """One section's bytes, read with every access checked against its end.

    Arrays together may hold no more bytes than the section: a small file whose arrays all name the
    same bytes would otherwise unfold into gigabytes.
    """

    def __init__(self, name: str, data: memoryview) -> None:
        self.name = name
        self.data = data
        self._budget_bytes = len(data)
        self._items = 0

    def unpack(self, layout: Struct, offset: int, what: str) -> tuple[Any, ...]:
        """The fields at `offset`."""
        if offset + layout.size > len(self.data):
            raise XclbinError(
                f"{self.name}: {what} at byte {offset} needs {layout.size} bytes, the section has "
                f"{len(self.data)}; {_REMEDY}"
            )
        return layout.unpack_from(self.data, offset)

    def array(self, count: int, offset: int, item_bytes: int, what: str) -> memoryview:
        """The bytes of `count` items at `offset`; of an empty array the offset does not matter."""
        size = count * item_bytes
        if count == 0:
            return self.data[:0]
        if count < 0 or offset + size > len(self.data):
            raise XclbinError(
                f"{self.name}: {count} {what} of {item_bytes} bytes at byte {offset}, the section "
                f"has {len(self.data)} bytes; {_REMEDY}"
            )
        self._budget_bytes -= size
        if self._budget_bytes < 0:
            raise XclbinError(
                f"{self.name}: {what} at byte {offset} overlap other arrays, wanted each byte used "
                f"once; {_REMEDY}"
            )
        return self.data[offset : offset + size]

    def rows(self, layout: Struct, count: int, offset: int, what: str) -> Iterator[tuple[Any, ...]]:
        """The fields of `count` items at `offset`."""
        items = self.array(count, offset, layout.size, what)
        self._items += count
        if self._items > MAX_ITEMS:
            raise XclbinError(
                f"{self.name}: {self._items} items with the {what}, wanted at most {MAX_ITEMS}; "
                f"{_REMEDY}"
            )
        return layout.iter_unpack(items)

    def integers(self, code: str, count: int, offset: int, what: str) -> tuple[int, ...]:
        """`count` integers of the struct code at `offset`."""
        return tuple(value for (value,) in self.rows(Struct("<" + code), count, offset, what))

    def text(self, offset: int, what: str) -> str:
        """The zero-terminated text at `offset`."""
        found = bytes(self.data[offset : offset + _MAX_NAME_BYTES])
        if b"\0" not in found:
            raise XclbinError(
                f"{self.name}: {what} at byte {offset} has no end within {len(found)} bytes, "
                f"wanted a zero byte; {_REMEDY}"
            )
        return _text(found)


def read(path: str | os.PathLike[str]) -> Xclbin:
    """The parsed xclbin at `path`.

    Raises:
        OSError: the file cannot be read.
        XclbinError: as parse(), with the path in front; larger than MAX_FILE_BYTES, or no regular
            file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise XclbinError(f"{os.fspath(path)}: not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise XclbinError(
            f"{os.fspath(path)}: {status.st_size} bytes, wanted at most {MAX_FILE_BYTES}; {_REMEDY}"
        )
    data = Path(path).read_bytes()
    try:
        return parse(data)
    except XclbinError as error:
        raise XclbinError(f"{os.fspath(path)}: {error}") from error


def parse(data: bytes | bytearray | memoryview) -> Xclbin:
    """The parsed xclbin in `data`.

    Raises:
        XclbinError: `data` is no xclbin, or a size, offset or field in it is wrong; in XRT's words
            where XRT checks the same.
    """
    view = memoryview(bytes(data))
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise XclbinError(
            f"Invalid xclbin: begins with {bytes(view[: len(MAGIC)])!r}, wanted {MAGIC!r}; "
            "pass an xclbin file."
        )
    if len(view) < _TABLE_BYTES:
        raise XclbinError(
            f"Invalid xclbin: {len(view)} bytes, wanted a header of {_TABLE_BYTES}; {_REMEDY}"
        )
    (length, _, _, patch, major, minor, mode, _, interface_uuid, vbnv, own_uuid, _, count) = (
        HEADER.unpack_from(view, PREFIX.size)
    )
    if length != len(view):
        raise XclbinError(
            f"xclbin: m_length does not match buffer size: {length} bytes in the header, "
            f"{len(view)} in the file; {_REMEDY}"
        )
    sections = _parse_sections(view, count)
    blocks: dict[int, _Block] = {}
    for section in sections:
        end = section.offset_bytes + section.size_bytes
        # XRT takes the first section of a kind.
        if section.size_bytes and section.kind not in blocks:
            part = view[section.offset_bytes : end]
            blocks[section.kind] = _Block(section.kind_name, part)

    memories = _parse_memories(blocks.get(MEM_TOPOLOGY))
    ips = _parse_ips(blocks.get(IP_LAYOUT))
    connectivity = _parse_connectivity(blocks.get(CONNECTIVITY), len(ips), len(memories))
    metadata = blocks.get(EMBEDDED_METADATA)
    if metadata and len(metadata.data) > MAX_METADATA_BYTES:
        raise XclbinError(
            f"{metadata.name}: {len(metadata.data)} bytes, wanted at most {MAX_METADATA_BYTES}; "
            f"{_REMEDY}"
        )
    kernels = parse_kernels(bytes(metadata.data)) if metadata else ()
    return Xclbin(
        uuid=str(uuid.UUID(bytes=own_uuid)),
        interface_uuid=str(uuid.UUID(bytes=interface_uuid)),
        vbnv=_text(vbnv),
        mode=mode,
        version=(major, minor, patch),
        sections=sections,
        kernels=_connect(kernels, ips, connectivity),
        memories=memories,
        ips=ips,
        connectivity=connectivity,
        partition=_parse_partition(blocks.get(AIE_PARTITION)),
    )


def _parse_sections(view: memoryview, count: int) -> tuple[Section, ...]:
    """The section table, every section inside the file."""
    room = (len(view) - _TABLE_BYTES) // SECTION.size
    if count > room:
        raise XclbinError(
            f"Invalid xclbin: {count} sections, the file has room for {room} headers; {_REMEDY}"
        )
    if count > MAX_ITEMS:
        raise XclbinError(
            f"Invalid xclbin: {count} sections, wanted at most {MAX_ITEMS}; {_REMEDY}"
        )
    table = view[_TABLE_BYTES : _TABLE_BYTES + count * SECTION.size]
    sections = []
    for number, (kind, name, offset, size) in enumerate(SECTION.iter_unpack(table)):
        section = Section(kind, _text(name), offset, size)
        if size and offset + size > len(view):
            raise XclbinError(
                f"Invalid xclbin: section {number} ({section.kind_name}) has {size} bytes at byte "
                f"{offset}, the file has {len(view)}; {_REMEDY}"
            )
        sections.append(section)
    return tuple(sections)


def _parse_memories(block: _Block | None) -> tuple[Memory, ...]:
    if block is None:
        return ()
    (count,) = block.unpack(COUNT, 0, "the count")
    return tuple(
        Memory(_text(tag), kind, bool(used), size_kb, base, index)
        for index, (kind, used, size_kb, base, tag) in enumerate(
            block.rows(MEMORY, count, COUNT.size, "memories")
        )
    )


def _parse_ips(block: _Block | None) -> tuple[Ip, ...]:
    if block is None:
        return ()
    (count,) = block.unpack(COUNT, 0, "the count")
    return tuple(
        Ip(_text(name), kind, bits & 3, bits >> 4 & 3, kernel_id & 0xFFF, base)
        for kind, bits, kernel_id, base, name in block.rows(IP, count, COUNT.size, "IPs")
    )


def _parse_connectivity(
    block: _Block | None, ips: int, memories: int
) -> tuple[tuple[int, int, int], ...]:
    """The rows, their indices inside the other two sections where the file has those."""
    if block is None:
        return ()
    (count,) = block.unpack(CONNECTION_COUNT, 0, "the count")
    found = []
    for number, (arg, ip, memory) in enumerate(
        block.rows(CONNECTION, count, CONNECTION_COUNT.size, "connections")
    ):
        for what, index, limit in (("IP", ip, ips), ("memory", memory, memories)):
            if index < 0 or (limit and index >= limit):
                raise XclbinError(
                    f"CONNECTIVITY: row {number} names {what} {index}, the file has {limit}; "
                    f"{_REMEDY}"
                )
        found.append((arg, ip, memory))
    return tuple(found)


def _connect(
    kernels: tuple[KernelInfo, ...], ips: tuple[Ip, ...], rows: tuple[tuple[int, int, int], ...]
) -> tuple[KernelInfo, ...]:
    """The kernels with each global argument's memories filled in."""
    found: dict[tuple[str, int], dict[int, None]] = {}
    for arg, ip, memory in rows:
        if ip < len(ips):
            kernel_name = ips[ip].name.partition(":")[0]
            found.setdefault((kernel_name, arg), {})[memory] = None
    # One tuple each, whatever the number of kernels of one name.
    connections = {key: tuple(memories) for key, memories in found.items()}
    return tuple(
        replace(
            kernel,
            args=tuple(
                replace(arg, connections=connections.get((kernel.name, arg.index), ()))
                if arg.qualifier == GLOBAL
                else arg
                for arg in kernel.args
            ),
        )
        for kernel in kernels
    )


def _parse_partition(block: _Block | None) -> Partition | None:
    if block is None:
        return None
    fields = block.unpack(PARTITION, 0, "the partition")
    (_, name, ops_per_cycle, _, _, column_width, columns, columns_at, pdis, pdis_at, _) = fields
    return Partition(
        name=block.text(name, "the partition's name"),
        column_width=column_width,
        start_columns=block.integers("H", columns, columns_at, "start columns"),
        pdis=tuple(_parse_pdi(block, row) for row in block.rows(PDI, pdis, pdis_at, "PDIs")),
        ops_per_cycle=ops_per_cycle,
    )


def _parse_pdi(block: _Block, row: tuple[Any, ...]) -> Pdi:
    own_uuid, size, image_at, groups, groups_at = row
    return Pdi(
        uuid=str(uuid.UUID(bytes=own_uuid)),
        image=bytes(block.array(size, image_at, 1, "image bytes")),
        cdo_groups=tuple(
            _parse_cdo_group(block, group)
            for group in block.rows(CDO_GROUP, groups, groups_at, "CDO groups")
        ),
    )


def _parse_cdo_group(block: _Block, row: tuple[Any, ...]) -> CdoGroup:
    name, kind, pdi_id, ids, ids_at, pre_groups, pre_groups_at = row
    return CdoGroup(
        name=block.text(name, "a CDO group's name"),
        type=kind,
        pdi_id=pdi_id,
        dpu_kernel_ids=block.integers("Q", ids, ids_at, "DPU kernel ids"),
        pre_cdo_groups=block.integers("I", pre_groups, pre_groups_at, "pre-CDO groups"),
    )


def _text(raw: bytes) -> str:
    """The text before the first zero byte."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace")
