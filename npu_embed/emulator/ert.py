"""ERT command packets: how a run's arguments reach the firmware.

The xclbin's XML gives each argument an offset in a register map; the map, behind a header and a
compute unit mask, is the packet. Offsets need not be aligned.

Source: XRT's ert.h, command ERT_START_CU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from .xclbin import Argument

START_CU = 0
NEW, QUEUED, RUNNING, COMPLETED, ERROR, ABORT, SUBMITTED, TIMEOUT = range(1, 9)
CU_MASK = 1
POINTER_BYTES = 8


def field_bytes(argument: Argument) -> int:
    """How many bytes the argument takes in the register map."""
    return POINTER_BYTES if argument.qualifier == 1 else argument.size_bytes


def encode_start(arguments: Sequence[Argument], values: Mapping[int, int]) -> bytes:
    """The packet that starts a kernel; values: argument index -> scalar or device address."""
    end = max(a.offset_bytes + field_bytes(a) for a in arguments)
    regmap = bytearray(-(-end // 4) * 4)
    for a in arguments:
        size = field_bytes(a)
        value = values.get(a.index, 0) & ((1 << 8 * size) - 1)
        regmap[a.offset_bytes : a.offset_bytes + size] = value.to_bytes(size, "little")
    count = 1 + len(regmap) // 4
    header = NEW | count << 12 | START_CU << 23
    return struct.pack("<II", header, CU_MASK) + bytes(regmap)


def payload_words(packet: bytes) -> int:
    """How many words of arguments a start packet carries: what the firmware's message must hold."""
    return len(packet) // 4 - 2


def decode_start(arguments: Sequence[Argument], packet: bytes) -> Iterator[tuple[Argument, int]]:
    """Each argument with its value in a start packet.

    Raises:
        ValueError: no start packet, or one too short for the arguments.
    """
    header, mask = struct.unpack_from("<II", packet)
    count = header >> 12 & 0x7FF
    if header >> 23 & 0x1F != START_CU or mask != CU_MASK or 4 + 4 * count > len(packet):
        raise ValueError(f"command packet header 0x{header:08X}, wanted ERT_START_CU")
    regmap = memoryview(packet)[8 : 4 + 4 * count]
    for a in arguments:
        field = regmap[a.offset_bytes : a.offset_bytes + field_bytes(a)]
        if len(field) != field_bytes(a):
            raise ValueError(f"command packet of {len(regmap)} bytes ends before {a.name}")
        yield a, int.from_bytes(field, "little")
