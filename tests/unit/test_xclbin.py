import os
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed.emulator import xclbin

UUID = bytes(range(16))
INTERFACE = bytes(range(16, 32))
PDI_UUID = bytes(range(32, 48))
IMAGE = bytes.fromhex("DD00000044332211") + b"cdo words here..."

# AMD's argument order: the instructions come fifth.
AMD_XML = b"""<?xml version="1.0" encoding="utf-8"?>
<project name="x"><platform vendor="amd"><device name="d"><core name="c" target="hw">
<kernel name="DPU_1x4" language="c" type="dpu">
  <extended-data subtype="1" functional="0" dpu_kernel_id="0x101"/>
  <arg name="opcode" addressQualifier="0" id="0" size="0x8" offset="0x00" type="uint64_t"/>
  <arg name="ifm" addressQualifier="1" id="1" port="M" size="0x8" offset="0x08" type="char *"/>
  <arg name="param" addressQualifier="1" id="2" size="0x8" offset="0x10" type="char *"/>
  <arg name="ofm" addressQualifier="1" id="3" size="0x8" offset="0x18" type="char *"/>
  <arg name="inter" addressQualifier="1" id="4" size="0x8" offset="0x20" type="char *"/>
  <arg name="instruct" addressQualifier="1" id="5" size="0x8" offset="0x28" type="char *"/>
  <arg name="ninstruct" addressQualifier="0" id="6" size="4" offset="48" type="uint32_t"/>
  <arg name="mc_code" addressQualifier="1" id="7" size="0x8" offset="0x34" type="char *"/>
  <instance name="DPU_1x4_1"/><instance name="DPU_1x4_2"/>
</kernel>
</core></device></platform></project>"""


def topology() -> bytes:
    data = bytearray(88)
    struct.pack_into("<i", data, 0, 2)
    for at, kb, tag in ((8, 0x10000, b"HOST"), (48, 0xC000, b"SRAM")):
        data[at], data[at + 1] = 2, 1
        struct.pack_into("<QQ", data, at + 8, kb, 0x4000000)
        data[at + 24 : at + 28] = tag
    return bytes(data)


def layout(*names: bytes, kernel_id: int = 0x101) -> bytes:
    data = bytearray(8 + 80 * len(names))
    struct.pack_into("<i", data, 0, len(names))
    for i, name in enumerate(names):
        struct.pack_into("<IHHQ", data, 8 + 80 * i, 7, 1, kernel_id, 0xFFFFFFFFFFFFFFFF)
        data[24 + 80 * i : 24 + 80 * i + len(name)] = name
    return bytes(data)


def connectivity(*rows: tuple[int, int, int]) -> bytes:
    flat = [value for row in rows for value in row]
    return struct.pack(f"<i{len(flat)}i", len(rows), *flat)


def partition() -> bytearray:
    """Two PDIs; the first serves kernels 0x101 and 0x102 in two groups, the second 0x103."""
    data = bytearray(1024)
    struct.pack_into("<II", data, 4, 184, 2048)
    struct.pack_into("<QQ", data, 16, 23423, 12345)
    struct.pack_into("<H", data, 32, 4)
    struct.pack_into("<II", data, 40, 2, 192)
    struct.pack_into("<II", data, 120, 2, 200)
    data[184:188] = b"QoS\0"
    struct.pack_into("<HH", data, 192, 0, 4)
    for at, image_at, size, groups, groups_at in ((200, 400, 25, 2, 440), (296, 432, 8, 1, 632)):
        data[at : at + 16] = PDI_UUID
        struct.pack_into("<IIII", data, at + 16, size, image_at, groups, groups_at)
        data[image_at : image_at + size] = IMAGE[:size]
    for at, name_at, kind, ids, ids_at in (
        *((440, 728, 1, 1, 736), (536, 732, 2, 1, 744)),
        (632, 728, 1, 1, 752),
    ):
        struct.pack_into("<I", data, at, name_at)
        data[at + 4] = kind
        struct.pack_into("<QIIII", data, at + 8, 0x10 + at, ids, ids_at, 0, 0)
    struct.pack_into("<II", data, 440 + 24, 2, 760)
    data[728:736] = b"DPU\0PP\0\0"
    struct.pack_into("<QQQII", data, 736, 0x101, 0x102, 0x103, 0xC1, 0xC2)
    return data


def sections() -> dict[int, bytes]:
    return {
        0: b"",
        14: b"{}",
        6: topology(),
        7: connectivity((1, 0, 0), (5, 0, 1), (5, 1, 1), (7, 1, 0), (7, 1, 1)),
        8: layout(b"DPU_1x4:DPU_1x4_1", b"DPU_1x4:DPU_1x4_2"),
        2: AMD_XML,
        32: bytes(partition()),
    }


def container(content: dict[int, bytes]) -> bytes:
    data = bytearray(456 + 40 * len(content))
    for number, (kind, section) in enumerate(content.items()):
        at = 456 + 40 * number
        struct.pack_into("<I", data, at, kind)
        data[at + 4 : at + 8] = b"name"
        if section:
            struct.pack_into("<QQ", data, at + 24, len(data), len(section))
        data += section + bytes(-len(section) % 8)
    data[:8] = b"xclbin2\0"
    struct.pack_into("<i", data, 8, -1)
    data[12:40] = b"\xff" * 28
    struct.pack_into("<Q", data, 304, len(data))
    struct.pack_into("<HBBH", data, 328, 3, 2, 18, 4)
    data[336:352] = INTERFACE
    data[352:367] = b"xilinx_v1_ipu_0"
    data[416:432] = UUID
    struct.pack_into("<I", data, 448, len(content))
    return bytes(data)


def patched(data: bytes, at: int, code: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into("<" + code, changed, at, value)
    return bytes(changed)


def with_section(kind: int, data: bytes) -> bytes:
    return container({**sections(), kind: data})


def with_partition(at: int, code: str, value: int) -> bytes:
    return with_section(32, patched(bytes(partition()), at, code, value))


def with_xml(old: bytes, new: bytes) -> bytes:
    assert old in AMD_XML
    return with_section(2, AMD_XML.replace(old, new))


FILE = container(sections())


def test_the_header_of_a_file_made_by_hand_is_read() -> None:
    parsed = xclbin.parse(FILE)
    assert parsed.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert parsed.interface_uuid == str(uuid.UUID(bytes=INTERFACE))
    assert (parsed.vbnv, parsed.mode, parsed.version) == ("xilinx_v1_ipu_0", 4, (2, 18, 3))


def test_the_section_table_lists_empty_and_unknown_sections_too() -> None:
    parsed = xclbin.parse(FILE)
    assert [section.kind for section in parsed.sections] == [0, 14, 6, 7, 8, 2, 32]
    assert [section.kind_name for section in parsed.sections][:3] == [
        "BITSTREAM",
        "BUILD_METADATA",
        "MEM_TOPOLOGY",
    ]
    metadata = parsed.section(2)
    assert metadata is not None
    assert metadata.name == "name"
    end = metadata.offset_bytes + metadata.size_bytes
    assert FILE[metadata.offset_bytes : end] == AMD_XML
    assert parsed.section(99) is None
    assert xclbin.Section(99, "", 0, 0).kind_name == "kind 99"


def test_memories_and_ips_are_read() -> None:
    parsed = xclbin.parse(FILE)
    assert parsed.memories == (
        xclbin.Memory("HOST", 2, True, 0x10000, 0x4000000, 0),
        xclbin.Memory("SRAM", 2, True, 0xC000, 0x4000000, 1),
    )
    assert [ip.name for ip in parsed.ips] == ["DPU_1x4:DPU_1x4_1", "DPU_1x4:DPU_1x4_2"]
    ip = parsed.ips[0]
    assert (ip.type, ip.subtype, ip.functional, ip.kernel_id) == (7, 1, 0, 0x101)
    assert ip.base_address == 0xFFFFFFFFFFFFFFFF


def test_a_kernel_with_its_instructions_at_argument_5_is_read() -> None:
    kernel = xclbin.parse(FILE).kernel("DPU_1x4")
    assert kernel is not None
    assert (kernel.dpu_kernel_id, kernel.type) == (0x101, "dpu")
    assert kernel.instances == ("DPU_1x4_1", "DPU_1x4_2")
    assert [arg.index for arg in kernel.args] == list(range(8))
    assert [arg.qualifier for arg in kernel.args] == [0, 1, 1, 1, 1, 1, 0, 1]
    assert [arg.offset_bytes for arg in kernel.args] == [0, 8, 16, 24, 32, 40, 48, 52]
    instruct, ninstruct = kernel.args[5:7]
    assert (instruct.name, instruct.type, instruct.size_bytes) == ("instruct", "char *", 8)
    assert (ninstruct.name, ninstruct.type, ninstruct.size_bytes) == ("ninstruct", "uint32_t", 4)


def test_an_argument_knows_the_memories_it_is_connected_to() -> None:
    parsed = xclbin.parse(FILE)
    assert parsed.connectivity[1] == (5, 0, 1)
    connections = {arg.name: arg.connections for arg in parsed.kernels[0].args}
    assert connections["ifm"] == (0,)
    assert connections["instruct"] == (1,)
    assert connections["mc_code"] == (0, 1)
    assert connections["param"] == connections["opcode"] == ()


def test_a_connection_of_another_kernel_is_not_ours() -> None:
    units = layout(b"OTHER:DPU_1x4_1", b"DPU_1x4:DPU_1x4_2")
    args = xclbin.parse(with_section(8, units)).kernels[0].args
    assert args[1].connections == ()
    assert args[5].connections == (1,)


def test_the_partition_and_its_images_are_read() -> None:
    found = xclbin.parse(FILE).partition
    assert found is not None
    assert (found.name, found.column_width, found.start_columns) == ("QoS", 4, (0, 4))
    assert found.ops_per_cycle == 2048
    first, second = found.pdis
    assert first.uuid == str(uuid.UUID(bytes=PDI_UUID))
    assert (first.image, second.image) == (IMAGE, IMAGE[:8])
    assert first.cdo_groups == (
        xclbin.CdoGroup("DPU", 1, 0x10 + 440, (0x101,), (0xC1, 0xC2)),
        xclbin.CdoGroup("PP", 2, 0x10 + 536, (0x102,), ()),
    )
    assert (first.dpu_kernel_ids, second.dpu_kernel_ids) == ((0x101, 0x102), (0x103,))


@pytest.mark.parametrize(("kernel_id", "pdi"), [("0x101", 0), ("0x102", 0), ("259", 1)])
def test_a_kernel_finds_its_image_by_its_id(kernel_id: str, pdi: int) -> None:
    parsed = xclbin.parse(with_xml(b"0x101", kernel_id.encode()))
    assert parsed.partition is not None
    assert parsed.pdi(parsed.kernels[0]) is parsed.partition.pdis[pdi]


def test_a_kernel_without_an_image_finds_none() -> None:
    parsed = xclbin.parse(with_xml(b"0x101", b"0x999"))
    assert parsed.pdi(parsed.kernels[0]) is None
    bare = xclbin.parse(container({2: AMD_XML}))
    assert bare.pdi(bare.kernels[0]) is None
    assert bare.kernel("NOPE") is None


def test_a_file_of_unknown_sections_only_is_readable() -> None:
    parsed = xclbin.parse(container({99: b"x", 100: b""}))
    assert (parsed.kernels, parsed.memories, parsed.partition) == ((), (), None)
    assert [section.size_bytes for section in parsed.sections] == [1, 0]


def test_the_first_section_of_a_kind_counts() -> None:
    data = container({6: topology(), 99: patched(topology(), 0, "i", 1)})
    twice = patched(data, 456 + 40, "I", 6)
    assert len(xclbin.parse(twice).memories) == 2


def test_parts_of_one_argument_are_merged_and_local_ones_left_out() -> None:
    more = (
        b'<arg name="hi" addressQualifier="1" id="7" size="4" offset="0x30"/>'
        b'<arg name="local" addressQualifier="2" id="" size="" offset=""/><instance name="i"/>'
    )
    args = xclbin.parse(with_xml(b'<instance name="DPU_1x4_1"/>', more)).kernels[0].args
    assert len(args) == 8
    assert (args[7].name, args[7].size_bytes, args[7].offset_bytes) == ("mc_code", 12, 0x30)


def test_arguments_are_ordered_by_index_not_by_place() -> None:
    lines = AMD_XML.split(b"\n")
    lines[4:12] = reversed(lines[4:12])
    kernel = xclbin.parse(with_section(2, b"\n".join(lines))).kernels[0]
    assert [arg.index for arg in kernel.args] == list(range(8))


def test_trailing_zero_bytes_and_a_byte_order_mark_of_the_metadata_are_ignored() -> None:
    data = b"\xef\xbb\xbf" + AMD_XML + b"\0\0\0"
    assert xclbin.parse(with_section(2, data)).kernels[0].name == "DPU_1x4"


BOMB = b"""<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>
<project><kernel name="&b;"/></project>"""

BAD_FILES: list[tuple[str, Callable[[], bytes], str]] = [
    ("nothing", lambda: b"", "Invalid xclbin: begins with b''"),
    ("magic", lambda: b"xclbin1\0" + FILE[8:], "Invalid xclbin: begins with b'xclbin1"),
    ("ELF", lambda: b"\x7fELF" + bytes(500), "Invalid xclbin"),
    ("header cut", lambda: FILE[:455], "Invalid xclbin: 455 bytes, wanted a header of 456"),
    ("file cut", lambda: FILE[:-8], "m_length does not match buffer size"),
    ("file longer", lambda: FILE + b"\0", "m_length does not match buffer size"),
    ("sections", lambda: patched(FILE, 448, "I", 0xFFFFFFFF), "4294967295 sections, .*room for"),
    ("section size", lambda: patched(FILE, 456 + 72, "Q", 1 << 63), "BUILD_METADATA.*bytes at"),
    ("section at", lambda: patched(FILE, 456 + 64, "Q", (1 << 64) - 1), "section 1 .*the file has"),
    ("memory count", lambda: with_section(6, patched(topology(), 0, "i", 3)), "3 memories of 40"),
    ("memory count <0", lambda: with_section(6, patched(topology(), 0, "i", -1)), "-1 memories"),
    (
        "memory short",
        lambda: with_section(6, b"\1\0\0"),
        "MEM_TOPOLOGY: the count at byte 0 needs 8",
    ),
    ("ip count", lambda: with_section(8, patched(layout(b"a:b"), 0, "i", 1 << 30)), "IPs of 80"),
    ("rows count", lambda: with_section(7, connectivity((1, 0, 0))[:-1]), "1 connections of 12"),
    (
        "row ip",
        lambda: with_section(7, connectivity((1, 2, 0))),
        "row 0 names IP 2, the file has 2",
    ),
    ("row memory", lambda: with_section(7, connectivity((1, 0, 2))), "names memory 2"),
    ("row negative", lambda: with_section(7, connectivity((1, 0, -1))), "names memory -1"),
    ("partition short", lambda: with_section(32, bytes(183)), "the partition at byte 0 needs 184"),
    ("name outside", lambda: with_partition(4, "I", 1024), "name at byte 1024 has no end"),
    (
        "name endless",
        lambda: with_section(32, bytes(partition()[:187])),
        "has no end|start columns",
    ),
    ("columns count", lambda: with_partition(40, "I", 1 << 31), "start columns of 2 bytes"),
    (
        "columns at",
        lambda: with_partition(44, "I", 1021),
        "2 start columns of 2 bytes at byte 1021",
    ),
    ("pdis count", lambda: with_partition(120, "I", 9), "9 PDIs of 96 bytes"),
    ("image size", lambda: with_partition(216, "I", 0xFFFFFFFF), "image bytes of 1"),
    ("image at", lambda: with_partition(220, "I", 1000), "25 image bytes of 1 bytes at byte 1000"),
    ("groups count", lambda: with_partition(224, "I", 1 << 30), "CDO groups of 96"),
    ("ids at", lambda: with_partition(440 + 20, "I", 1017), "1 DPU kernel ids of 8"),
    ("pre groups", lambda: with_partition(440 + 24, "I", 1 << 29), "pre-CDO groups of 4"),
    ("group name", lambda: with_partition(440, "I", 5000), "CDO group's name at byte 5000"),
    ("xml broken", lambda: with_section(2, AMD_XML[:-4]), "EMBEDDED_METADATA: .*well-formed"),
    ("xml empty", lambda: with_section(2, b"\0"), "EMBEDDED_METADATA: no element found"),
    ("xml latin", lambda: with_section(2, b"<p>\xe9</p>"), "byte 3 is not UTF-8"),
    ("xml utf-16", lambda: with_section(2, "<p/>".encode("utf-16")), "not UTF-8"),
    ("xml bomb", lambda: with_section(2, BOMB), "found <!DOCTYPE"),
    ("kernel name", lambda: with_xml(b'kernel name="DPU_1x4"', b"kernel"), "no attribute 'name'"),
    ("arg id", lambda: with_xml(b'id="5" ', b""), "arg 'instruct': no attribute 'id'"),
    ("arg offset", lambda: with_xml(b' offset="0x28"', b""), "no attribute 'offset'"),
    ("arg gap", lambda: with_xml(b'id="7"', b'id="8"'), "mismatched argument index: found 8"),
    ("arg number", lambda: with_xml(b'size="4"', b'size="-4"'), "size: '-4', wanted a number"),
    ("arg digits", lambda: with_xml(b'size="4"', b'size="%s"' % (b"9" * 5000)), "at most 64 bits"),
    ("kernel id", lambda: with_xml(b"0x101", b"0x"), "dpu_kernel_id: '0x'"),
    ("instance", lambda: with_xml(b'instance name="DPU_1x4_1"', b"instance"), "instance: no attr"),
]


@pytest.mark.parametrize(
    ("make", "words"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES]
)
def test_a_bad_file_is_refused(make: Callable[[], bytes], words: str) -> None:
    with pytest.raises(xclbin.XclbinError, match=words):
        xclbin.parse(make())


def test_many_images_over_the_same_bytes_do_not_unfold() -> None:
    pdis = 2000
    data = bytearray(184 + 96 * pdis)
    struct.pack_into("<II", data, 120, pdis, 184)
    for i in range(pdis):
        struct.pack_into("<II", data, 184 + 96 * i + 16, len(data), 0)
    with pytest.raises(xclbin.XclbinError, match="overlap other arrays"):
        xclbin.parse(container({32: bytes(data)}))


@pytest.mark.parametrize(
    ("kind", "head", "item", "count", "says"),
    [
        (6, b"", bytes(40), 65_537, "MEM_TOPOLOGY: 65537 items with the memories"),
        (8, b"", bytes(80), 65_537, "IP_LAYOUT: 65537 items with the IPs"),
        (7, b"", bytes(12), 65_537, "CONNECTIVITY: 65537 items with the connections"),
        (2, b"<p>", b"<a/>", 1 << 20, "EMBEDDED_METADATA: 4194307 bytes, wanted at most 4194304"),
    ],
)
def test_more_items_than_any_file_has_are_refused_before_they_are_made(
    kind: int, head: bytes, item: bytes, count: int, says: str
) -> None:
    before = {6: 8, 8: 8, 7: 4}.get(kind, 0)  # the count, and what stands before the first item
    counted = struct.pack("<ii", count, 0)[:before] if before else head
    with pytest.raises(xclbin.XclbinError, match=says):
        xclbin.parse(container({kind: counted + item * count}))


def test_arrays_in_arrays_count_together() -> None:
    """Two groups of 40,000 numbers each, which share no byte."""
    data = bytearray(184 + 96 + 2 * 96 + 2 * 4 * 40_000)
    struct.pack_into("<II", data, 120, 1, 184)
    struct.pack_into("<IIII", data, 184 + 16, 0, 0, 2, 280)
    for i in range(2):
        struct.pack_into("<II", data, 280 + 96 * i + 24, 40_000, 472 + 160_000 * i)
    with pytest.raises(xclbin.XclbinError, match="AIE_PARTITION: 80003 items with the pre-CDO"):
        xclbin.parse(container({32: bytes(data)}))


def test_more_sections_than_any_file_has_are_refused() -> None:
    data = bytearray(456 + 40 * 65_537)
    data[:456] = FILE[:456]
    struct.pack_into("<Q", data, 304, len(data))
    struct.pack_into("<I", data, 448, 65_537)
    with pytest.raises(xclbin.XclbinError, match="65537 sections, wanted at most 65536"):
        xclbin.parse(bytes(data))


def test_many_connections_are_read_in_the_time_of_their_rows() -> None:
    """Of one argument to other memories each, and many kernels of its name."""
    arg = b'<arg name="a" id="0" addressQualifier="1" size="8" offset="0"/>'
    xml = b"<p>" + 3000 * (b'<kernel name="k">' + arg + b"</kernel>") + b"</p>"
    rows = [(0, 0, memory) for memory in range(65_000)]
    parts = {2: xml, 8: layout(b"k:k"), 7: connectivity(*rows)}
    begun = time.process_time()
    found = xclbin.parse(container(parts))
    assert time.process_time() - begun < 5, (
        "a second, or minutes where each row looks at all before"
    )
    assert len({id(kernel.args[0].connections) for kernel in found.kernels}) == 1
    assert found.kernels[0].args[0].connections == tuple(range(65_000))


@pytest.mark.slow
def test_metadata_nested_a_hundred_thousand_deep_is_read() -> None:
    deep = b"<a>" * 100_000 + b"</a>" * 100_000
    assert xclbin.parse(container({2: deep})).kernels == ()


def test_reading_names_the_path(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.xclbin", tmp_path / "bad.xclbin"
    good.write_bytes(FILE)
    bad.write_bytes(FILE[:-1])
    assert xclbin.read(good) == xclbin.parse(FILE)
    with pytest.raises(xclbin.XclbinError, match=r"bad\.xclbin: xclbin: m_length"):
        xclbin.read(str(bad))
    with pytest.raises(FileNotFoundError):
        xclbin.read(tmp_path / "none.xclbin")


def at(data: bytes, kind: int) -> int:
    """Where the first section of a kind begins, found without the reader."""
    (count,) = struct.unpack_from("<I", data, 448)
    for header in range(456, 456 + 40 * count, 40):
        if struct.unpack_from("<I", data, header) == (kind,):
            offset: int = struct.unpack_from("<Q", data, header + 24)[0]
            return offset
    raise AssertionError(kind)


def test_a_built_file_has_its_fields_where_xrt_looks_for_them() -> None:
    data = xclbin.build(pdi_image=IMAGE, start_columns=(0, 4))
    assert data[:12] == b"xclbin2\0\xff\xff\xff\xff"
    assert struct.unpack_from("<QQ", data, 304) == (len(data), 0)
    assert struct.unpack_from("<I", data, 448) == (7,)
    assert any(data[416:432])
    starts = struct.unpack_from("<" + "24xQ8x" * 7, data, 456)
    assert [start % 8 for start in starts] == [0] * 7

    memory = at(data, 6)
    assert data[memory : memory + 88] == data[at(data, 26) : at(data, 26) + 88] == topology()

    rows = [(1, 0, 1), *((index, 0, 0) for index in range(3, 8))]
    table = connectivity(*rows)
    assert data[at(data, 7) : at(data, 7) + len(table)] == table
    grouped = connectivity(*(row for row in rows for _ in range(2)))
    assert data[at(data, 27) : at(data, 27) + len(grouped)] == grouped

    unit = layout(b"MLIR_AIE:MLIRAIE", kernel_id=0x901)
    assert data[at(data, 8) : at(data, 8) + 88] == unit

    part = at(data, 32)
    assert struct.unpack_from("<I", data, part + 8) == (2048,)
    assert struct.unpack_from("<H", data, part + 32) == (4,)
    columns, columns_at = struct.unpack_from("<II", data, part + 40)
    assert struct.unpack_from(f"<{columns}H", data, part + columns_at) == (0, 4)
    pdis, pdis_at = struct.unpack_from("<II", data, part + 120)
    assert pdis == 1
    size, image_at, groups, groups_at = struct.unpack_from("<4I", data, part + pdis_at + 16)
    assert data[part + image_at : part + image_at + size] == IMAGE
    assert groups == 1
    assert data[part + groups_at + 4] == 1
    ids, ids_at = struct.unpack_from("<II", data, part + groups_at + 16)
    assert (ids, ids_at % 8) == (1, 0)
    assert struct.unpack_from("<Q", data, part + ids_at) == (0x901,)


def test_a_built_kernel_has_the_arguments_of_mlir_aie() -> None:
    parsed = xclbin.parse(xclbin.build(pdi_image=IMAGE))
    (kernel,) = parsed.kernels
    assert (kernel.name, kernel.instances, kernel.type) == ("MLIR_AIE", ("MLIRAIE",), "dpu")
    assert kernel.dpu_kernel_id == 0x901
    assert [
        (arg.name, arg.qualifier, arg.size_bytes, arg.offset_bytes, arg.type, arg.connections)
        for arg in kernel.args
    ] == [
        ("opcode", 0, 8, 0x00, "uint64_t", ()),
        ("instr", 1, 8, 0x08, "char *", (1,)),
        ("ninstr", 0, 4, 0x10, "uint32_t", ()),
        ("bo0", 1, 8, 0x14, "void*", (0,)),
        ("bo1", 1, 8, 0x1C, "void*", (0,)),
        ("bo2", 1, 8, 0x24, "void*", (0,)),
        ("bo3", 1, 8, 0x2C, "void*", (0,)),
        ("bo4", 1, 8, 0x34, "void*", (0,)),
    ]
    pdi = parsed.pdi(kernel)
    assert pdi is not None
    assert pdi.image == IMAGE


def test_building_twice_gives_the_same_file_and_another_image_another_uuid() -> None:
    first = xclbin.build(pdi_image=IMAGE)
    assert first == xclbin.build(pdi_image=IMAGE)
    other = xclbin.build(pdi_image=IMAGE[:-1] + b"!")
    renamed = xclbin.build(pdi_image=IMAGE, name="other")
    assert len({xclbin.parse(data).uuid for data in (first, other, renamed)}) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pdi_image": b""}, "pdi_image: 0 bytes"),
        ({"kernel_name": ""}, "kernel_name: ''"),
        ({"kernel_name": 'a"b'}, "kernel_name: 'a\"b'"),
        ({"kernel_name": "k" * 56}, "at most 55 characters"),
        ({"column_width": 0}, "column_width: 0, wanted 1 to 65535"),
        ({"start_columns": ()}, "start_columns: \\[\\]"),
        ({"start_columns": (0, -1)}, "start_columns: \\[0, -1\\]"),
        ({"buffers": 0}, "buffers: 0, wanted 1 to 7"),
        ({"buffers": 8}, "buffers: 8, wanted 1 to 7"),
        ({"name": "a\0b"}, "name: 'a\\\\x00b'"),
        ({"name": "\ud800"}, "name: "),
        ({"name": "n" * 256}, "at most 255 printable bytes"),
    ],
)
def test_building_refuses_what_has_no_place_in_the_format(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(xclbin.XclbinError, match=words):
        xclbin.build(**{"pdi_image": IMAGE, **changes})


@given(
    st.binary(min_size=1, max_size=64),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,54}", fullmatch=True),
    st.integers(1, 8),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_what_is_built_parses_to_what_was_given(
    image: bytes, kernel_name: str, width: int, columns: list[int], buffers: int
) -> None:
    parsed = xclbin.parse(
        xclbin.build(
            pdi_image=image,
            kernel_name=kernel_name,
            column_width=width,
            start_columns=columns,
            buffers=buffers,
            name="part",
        )
    )
    kernel = parsed.kernel(kernel_name)
    assert kernel is not None
    assert len(kernel.args) == 3 + buffers
    assert parsed.partition is not None
    assert parsed.partition.name == "part"
    assert parsed.partition.column_width == width
    assert parsed.partition.start_columns == tuple(columns)
    assert [pdi.image for pdi in parsed.partition.pdis] == [image]


def survives(data: bytes) -> None:
    """The reader answers or raises XclbinError, nothing else."""
    try:
        xclbin.parse(data)
    except xclbin.XclbinError:
        pass


@given(st.binary(max_size=64), st.binary(max_size=600))
def test_random_bytes_raise_nothing_but_xclbin_errors(head: bytes, tail: bytes) -> None:
    survives(head + tail)
    body = bytearray(b"xclbin2\0" + bytes(448) + tail)
    struct.pack_into("<Q", body, 304, len(body))
    struct.pack_into("<I", body, 448, len(tail) // 40)
    survives(bytes(body))


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.integers(448, len(FILE) - 4),
            st.sampled_from(["B", "H", "I"]),
            st.one_of(st.integers(0, 255), st.sampled_from([0, 0x7F, 0xFF])),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_mutated_files_raise_nothing_but_xclbin_errors(
    changes: list[tuple[int, str, int]],
) -> None:
    data = FILE
    for place, code, value in changes:
        data = patched(data, place, code, value)
    survives(data)


@given(st.dictionaries(st.sampled_from([2, 6, 7, 8, 32]), st.binary(max_size=300), min_size=1))
def test_random_sections_raise_nothing_but_xclbin_errors(content: dict[int, bytes]) -> None:
    survives(container(content))


def test_a_file_larger_than_any_xclbin_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.xclbin"
    path.write_bytes(b"xclbin2\0")
    os.truncate(path, xclbin.MAX_FILE_BYTES + 1)
    with pytest.raises(xclbin.XclbinError, match="268435457 bytes, wanted at most 268435456"):
        xclbin.read(path)


def test_a_fifo_is_no_xclbin_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(xclbin.XclbinError, match="not a regular file"):
        xclbin.read(tmp_path / "fifo")
