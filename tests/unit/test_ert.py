"""Command packets: the register map of the arguments, and back."""

from __future__ import annotations

import struct

import pytest
from boards import copying_xclbin
from hypothesis import given
from hypothesis import strategies as st

from npu_embed.emulator import ert, xclbin
from npu_embed.emulator.xclbin import Argument

ARGUMENTS = xclbin.parse(copying_xclbin()).kernels[0].args
VALUES = {0: 3, 1: 0x4000000, 2: 120, 3: 0x100000000, 4: 0x1_2345_6789, 5: 0, 6: 7, 7: 2**64 - 1}


def test_the_packet_is_header_mask_and_register_map() -> None:
    packet = ert.encode_start(ARGUMENTS, VALUES)
    header, mask = struct.unpack_from("<II", packet)
    assert (header & 0xF, header >> 12 & 0x7FF, header >> 23 & 0x1F, header >> 28) == (1, 16, 0, 0)
    assert mask == 1
    opcode, instr, count, bo0, bo1 = struct.unpack_from("<QQIQQ", packet, 8)
    assert (opcode, instr, count, bo0, bo1) == (3, 0x4000000, 120, 0x100000000, 0x123456789)
    assert len(packet) == 8 + 0x3C


def test_what_goes_in_comes_out() -> None:
    packet = ert.encode_start(ARGUMENTS, VALUES)
    assert {a.index: value for a, value in ert.decode_start(ARGUMENTS, packet)} == VALUES


@given(st.dictionaries(st.integers(1, 7).filter(lambda i: i != 2), st.integers(0, 2**64 - 1)))
def test_any_addresses_survive_and_what_is_not_set_is_zero(values: dict[int, int]) -> None:
    packet = ert.encode_start(ARGUMENTS, values)
    found = {a.index: value for a, value in ert.decode_start(ARGUMENTS, packet)}
    assert found == {a.index: values.get(a.index, 0) for a in ARGUMENTS}


def test_a_negative_scalar_is_its_low_bits() -> None:
    packet = ert.encode_start(ARGUMENTS, {2: -1})
    found = {a.name: value for a, value in ert.decode_start(ARGUMENTS, packet)}
    assert found["ninstr"] == 0xFFFFFFFF


def test_the_xmls_offsets_count_whatever_the_order() -> None:
    arguments = [
        Argument("late", 0, 1, 8, 0x14, "void*"),
        Argument("early", 1, 0, 4, 0x10, "uint32_t"),
    ]
    packet = ert.encode_start(arguments, {0: 0x1122334455667788, 1: 0x99})
    assert struct.unpack_from("<IQ", packet, 8 + 0x10) == (0x99, 0x1122334455667788)


def test_the_firmwares_words_are_counted() -> None:
    assert ert.payload_words(ert.encode_start(ARGUMENTS, {})) == 15
    seven = xclbin.parse(copying_xclbin(buffers=7)).kernels[0].args
    assert ert.payload_words(ert.encode_start(seven, {})) == 19


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: struct.pack("<I", 1 | 15 << 12 | 18 << 23) + p[4:], "wanted ERT_START_CU"),
        (lambda p: p[:4] + struct.pack("<I", 2) + p[8:], "wanted ERT_START_CU"),
        (lambda p: p[:-8], "wanted ERT_START_CU"),
        (lambda p: struct.pack("<I", 1 | 4 << 12) + p[4:], "ends before"),
    ],
)
def test_another_packet_is_refused(change: object, says: str) -> None:
    assert callable(change)
    packet = change(ert.encode_start(ARGUMENTS, VALUES))
    with pytest.raises(ValueError, match=says):
        list(ert.decode_start(ARGUMENTS, packet))
