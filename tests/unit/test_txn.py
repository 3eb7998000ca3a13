import contextlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed.emulator import txn, txn_codec

# Word for word in the form mlir-aie writes for npu1 with 4 columns; typed by hand, not assembled.
V0_1 = (
    *(0x06030100, 0x00000104, 9, 4 * 59),
    # 4: WRITE to core (3,4)
    *(0x00000000, 0, 0x06400DEC, 0, 0x42, 24),
    # 10: BLOCKWRITE of shim BD 3 of column 1; only the low byte of word 0 is the opcode
    *(0x00010001, 0x00000101, 0x0201D060, 48, 64, 0, 0, 0x00400000, 0xC0000000, 0, 0, 0x02000000),
    # 22: DDR_PATCH of its word 1, garbage where aie-rt leaves padding
    *(0x00000081, 48, 0xDEADBEEF, 0x55AA55AA, 0, 0x12345678, 0x0201D064, 0, 2, 0, 0x1000, 0x1),
    # 34: MASKWRITE, 28 bytes
    *(0x00000003, 0, 0x0001D200, 0, 0x00000F00, 0x00001F00, 28),
    # 41: MASKPOLL_BUSY as aie-rt writes it, 32 bytes
    *(0x00000007, 0, 0x0021DF00, 0, 1, 3, 32, 0xCAFEF00D),
    # 49: PREEMPT level 2, NOOP
    *(0x00000206, 0x00000005),
    # 51: LOADPDI, 55: TCT
    *(0x00020008, 1024, 0x12345678, 0x00000ABC),
    *(0x00000080, 16, 0x00030401, 0x05010200),
)

V1_0 = (
    *(0x06040001, 0x00000108, 10, 4 * 45),
    *(0x00000000, 0x00300440, 7),
    *(0x00000001, 0x0001D000, 20, 0xA, 0xB),
    *(0x00000003, 0x0001D210, 1, 2),
    *(0x00000004, 0x0001D228, 3, 4),
    # DDR_PATCH in its short form and, inside the same version, in its long one
    *(0x00000081, 24, 0x0001D004, 0xABCDEF01, 0x40, 0),
    *(0x00000081, 48, 9, 9, 0, 9, 0x0001D024, 0, 3, 0, 0x80, 0),
    *(0x00000083, 12, 77),
    *(0x00000005,),
    *(0x00000009, 5),
    *(0x0000000D,),
)


def packed(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def stream(*ops: int, num_ops: int = 1, version: int = 0x0100) -> bytes:
    return packed((0x06040000 | version, 0x00000104, num_ops, 16 + 4 * len(ops), *ops))


def test_a_version_0_1_stream_of_mlir_aie_decodes_to_its_fields() -> None:
    decoded = txn.decode(packed(V0_1))
    header = decoded.header
    assert (header.major, header.minor, header.dev_gen) == (0, 1, 3)
    assert (header.num_rows, header.num_cols, header.num_memtile_rows) == (6, 4, 1)
    write, block, patch, mask, poll, preempt, noop, pdi, sync = decoded.ops
    assert isinstance(write, txn.Write)
    assert (write.address, write.value, write.word, write.value_word) == (0x06400DEC, 0x42, 4, 8)
    assert isinstance(block, txn.BlockWrite)
    assert (block.address, block.word, block.data_word) == (0x0201D060, 10, 14)
    assert block.data == (64, 0, 0, 0x00400000, 0xC0000000, 0, 0, 0x02000000)
    assert isinstance(patch, txn.DdrPatch)
    assert (patch.address, patch.arg_index, patch.arg_plus) == (0x0201D064, 2, 0x100001000)
    assert isinstance(mask, txn.MaskWrite)
    assert (mask.address, mask.value, mask.mask) == (0x1D200, 0xF00, 0x1F00)
    assert isinstance(poll, txn.MaskPoll)
    assert (poll.address, poll.value, poll.mask, poll.busy) == (0x21DF00, 1, 3, True)
    assert isinstance(preempt, txn.Preempt)
    assert preempt.level == 2
    assert isinstance(noop, txn.Noop)
    assert isinstance(pdi, txn.LoadPdi)
    assert (pdi.pdi_id, pdi.size_bytes, pdi.address) == (2, 1024, 0xABC12345678)
    assert isinstance(sync, txn.Sync)
    assert (sync.direction, sync.row, sync.col) == (1, 4, 3)
    assert (sync.nrow, sync.ncol, sync.channel) == (2, 1, 5)


def test_a_version_1_0_stream_decodes_its_short_ops_and_both_patch_sizes() -> None:
    ops = txn.decode(packed(V1_0)).ops
    write, block, mask, poll, short, long, timer, noop, start, scratch = ops
    assert isinstance(write, txn.Write)
    assert (write.address, write.value, write.value_word) == (0x300440, 7, 6)
    assert isinstance(block, txn.BlockWrite)
    assert (block.address, block.data, block.data_word) == (0x1D000, (0xA, 0xB), 10)
    assert isinstance(mask, txn.MaskWrite)
    assert (mask.value, mask.mask) == (1, 2)
    assert isinstance(poll, txn.MaskPoll)
    assert (poll.value, poll.mask, poll.busy) == (3, 4, False)
    assert isinstance(short, txn.DdrPatch)
    assert (short.address, short.arg_index, short.arg_plus) == (0x1D004, 1, 0x40)
    assert isinstance(long, txn.DdrPatch)
    assert (long.address, long.arg_index, long.arg_plus) == (0x1D024, 3, 0x80)
    assert isinstance(noop, txn.Noop)
    others = [op for op in (timer, start, scratch) if isinstance(op, txn.Other)]
    assert [op.name for op in others] == ["RECORD_TIMER", "LOAD_PM_START", "UPDATE_SCRATCH"]
    assert [op.opcode for op in others] == [0x83, 0x09, 0x0D]


@pytest.mark.parametrize("words", [V0_1, V1_0])
def test_decoding_and_encoding_is_byte_exact_with_garbage_in_reserved_words(
    words: tuple[int, ...],
) -> None:
    assert txn.decode(packed(words)).encode() == packed(words)


def test_the_outer_wrapper_is_kept_and_counts_in_word_indices() -> None:
    data = packed((0, 4 * len(V0_1) + 8, *V0_1))
    decoded = txn.decode(data)
    assert decoded.wrapper == (0, 4 * len(V0_1) + 8)
    assert decoded.encode() == data
    first = decoded.ops[0]
    assert isinstance(first, txn.Write)
    assert struct.unpack_from("<I", data, 4 * first.value_word) == (first.value,)


def test_every_op_stands_where_its_word_says() -> None:
    for op in txn.decode(packed(V0_1)).ops:
        assert V0_1[op.word : op.word + len(op.raw)] == op.raw


def test_zero_padding_after_the_stream_is_kept() -> None:
    data = packed(V1_0) + bytes(20)
    decoded = txn.decode(data)
    assert decoded.padding_words == 5
    assert decoded.encode() == data


def test_an_instruction_buffer_may_be_longer_than_its_stream_when_not_exact() -> None:
    buffer = np.full(1024, 0xFFFFFFFF, np.uint32)
    buffer[: len(V0_1)] = V0_1
    assert txn.decode(buffer, exact=False) == txn.decode(packed(V0_1))
    with pytest.raises(txn.TxnError, match="wanted nothing or zeros") as caught:
        txn.decode(buffer)
    assert caught.value.word == len(V0_1)


def test_bytes_views_and_arrays_decode_alike() -> None:
    data = packed(V0_1)
    array = np.array(V0_1, np.uint32)
    for form in (bytearray(data), memoryview(data), array.data, array):
        assert txn.decode(form) == txn.decode(data)


WRITE_0_1 = (0, 0, 0x1D204, 0, 1, 24)

BAD_STREAMS: list[tuple[str, bytes, str, int, int]] = [
    ("no bytes", b"", "0 words, wanted 4", -1, 0),
    ("odd length", b"\0\1\2", "wanted a multiple of 4", -1, 0),
    ("half a header", packed((0x06030100, 0x104)), "2 words, wanted 4", -1, 2),
    ("zeros", bytes(64), "version 0.0", -1, 2),
    ("other version", stream(5, version=0x0002), "version 2.0, wanted 0.1 or 1.0", -1, 0),
    ("size below header", packed((0x06030100, 0x104, 0, 12)), "size 12 bytes", -1, 3),
    ("size odd", packed((0x06030100, 0x104, 0, 17, 0)), "size 17 bytes", -1, 3),
    ("size beyond", packed((0x06030100, 0x104, 0, 0xFFFFFFFC)), "to the 16 there are", -1, 3),
    ("wrapper size", packed((0, 99, *V0_1)), "wrapper size 99", -1, 1),
    ("trailing data", stream(5) + packed((0, 7)), "data after the stream's 20", -1, 6),
    ("trailing op", stream(5, 5), "1 ops end at word 5, wanted word 6", 1, 5),
    ("missing op", stream(5, num_ops=2), "2 ops, found 1", 1, 5),
    ("op count huge", stream(5, num_ops=0xFFFFFFFF), "4294967295 ops, wanted at most", -1, 2),
    ("BLOCKSET", stream(2, 0, 0), r"op 0 at word 4: unknown opcode 0x02", 0, 4),
    ("unknown op", stream(5, 0x99, num_ops=2), r"op 1 at word 5: unknown opcode 0x99", 1, 5),
    ("WRITE size 0", stream(0, 0, 4, 0, 1, 0), r"\(WRITE\).*size 0 bytes, wanted 24", 0, 9),
    ("WRITE cut", stream(0, 0, 4), r"needs 6 words, 3 are left", 0, 4),
    ("WRITE high", stream(0, 0, 4, 1, 1, 24), "0x1 in the upper half", 0, 7),
    ("WRITE 1.0 cut", stream(0, 4, version=1), "needs 3 words, 2 are left", 0, 4),
    ("BLOCKWRITE size 0", stream(1, 0, 4, 0), "size 0 bytes, wanted a multiple of 4 from 16", 0, 7),
    ("BLOCKWRITE size 18", stream(1, 0, 4, 18, 1), "size 18 bytes", 0, 7),
    ("BLOCKWRITE over", stream(1, 0, 4, 24, 1), "needs 6 words, 5 are left", 0, 4),
    ("BLOCKWRITE huge", stream(1, 0, 4, 0xFFFFFFFC, 1), "needs 1073741823 words", 0, 4),
    ("BLOCKWRITE 1.0 size 0", stream(1, 4, 0, version=1), "from 12 on", 0, 6),
    ("MASKWRITE size 24", stream(3, 0, 4, 0, 1, 1, 24), "wanted 28 or 32", 0, 10),
    ("MASKPOLL cut", stream(4, 0, 4, 0, 1, 1, 32), "needs 8 words, 7 are left", 0, 4),
    ("TCT size 12", stream(0x80, 12, 0), "size 12 bytes, wanted 16", 0, 5),
    ("DDR_PATCH size 0", stream(0x81, 0), "size 0 bytes, wanted 24 or 48", 0, 5),
    ("DDR_PATCH size 28", stream(0x81, 28, 0, 0, 0, 0, 0), "wanted 24 or 48", 0, 5),
    ("DDR_PATCH high", stream(0x81, 48, *[0] * 7, 1, 0, 0), "upper half", 0, 13),
    ("READ_REGS size 0", stream(0x82, 0), "size 0 bytes", 0, 5),
    ("LOADPDI cut", stream(8, 0, 0), "needs 4 words, 3 are left", 0, 4),
    ("second op", stream(*WRITE_0_1, *WRITE_0_1[:5], 20, num_ops=2), "op 1 .*size 20", 1, 15),
]


@pytest.mark.parametrize(
    ("data", "words", "op_index", "word"),
    [case[1:] for case in BAD_STREAMS],
    ids=[case[0] for case in BAD_STREAMS],
)
def test_a_bad_stream_is_refused_with_op_and_word(
    data: bytes, words: str, op_index: int, word: int
) -> None:
    with pytest.raises(txn.TxnError, match=words) as caught:
        txn.decode(data)
    assert (caught.value.op_index, caught.value.word) == (op_index, word)


def test_an_array_of_other_words_is_refused() -> None:
    with pytest.raises(txn.TxnError, match="dtype uint8, wanted uint32"):
        txn.decode(np.zeros(16, np.uint8))


def test_the_constructors_write_the_words_of_mlir_aie() -> None:
    assert txn.write(0x06400DEC, 0x42).raw == (0, 0, 0x06400DEC, 0, 0x42, 24)
    assert txn.block_write(0x0201D060, [1, 2]).raw == (1, 0, 0x0201D060, 24, 1, 2)
    assert txn.mask_write(0x1D200, 0xF00, 0x1F00).raw == (3, 0, 0x1D200, 0, 0xF00, 0x1F00, 28)
    assert txn.sync(1, 4, 3, 2, 1, 5).raw == (0x80, 16, 0x00030401, 0x05010200)
    patch = txn.ddr_patch(0x0201D064, 2, 0x100001000)
    assert patch.raw == (0x81, 48, 0, 0, 0, 0, 0x0201D064, 0, 2, 0, 0x1000, 1)


def test_assembling_places_the_ops_and_encodes_a_decodable_stream() -> None:
    ops: list[txn.Op] = [
        txn.block_write(txn.address(1, 0, 0x1D000), np.arange(8, dtype=np.uint32)),
        txn.ddr_patch(txn.address(1, 0, 0x1D004), 4, 4096),
        txn.write(txn.address(1, 0, 0x1D214), 0x80000000),
        txn.mask_write(txn.address(0, 0, 0x1D200), 0xF00, 0x1F00),
        txn.sync(0, 0, 1, 1, 1, 0),
    ]
    made = txn.assemble(ops, dev_gen=4, num_cols=4)
    assert [op.word for op in made.ops] == [4, 16, 28, 34, 41]
    assert [op.raw for op in made.ops] == [op.raw for op in ops]
    data = made.encode()
    assert struct.unpack_from("<4I", data) == (0x06040100, 0x00000104, 5, len(data))
    assert txn.decode(data) == made


def test_assembling_refuses_an_op_of_the_other_version() -> None:
    short = txn.decode(packed(V1_0)).ops[0]
    with pytest.raises(txn.TxnError):
        txn.assemble([short], dev_gen=4, num_cols=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: txn.write(-1, 0), "address: found -1, wanted 0 to 4294967295"),
        (lambda: txn.write(0, 1 << 32), "value: found 4294967296"),
        (lambda: txn.block_write(0, [0, -5]), "data: found -5"),
        (lambda: txn.mask_write(0, 0, 1 << 32), "mask: found"),
        (lambda: txn.sync(2, 0, 0, 1, 1, 0), "direction: found 2, wanted 0 to 1"),
        (lambda: txn.sync(0, 0, 0, 256, 1, 0), "nrow: found 256, wanted 0 to 255"),
        (lambda: txn.ddr_patch(0, 0, 1 << 48), "argument offset: found"),
        (lambda: txn.address(128, 0, 0), "column: found 128, wanted 0 to 127"),
        (lambda: txn.address(0, 32, 0), "row: found 32, wanted 0 to 31"),
        (lambda: txn.address(0, 0, 1 << 20), "register offset: found"),
        (lambda: txn.assemble([], dev_gen=4, num_cols=256), "num_cols: found 256, wanted 0 to 255"),
    ],
)
def test_a_value_without_room_in_its_field_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(txn.TxnError, match=words):
        make()


def test_an_address_splits_into_column_row_and_offset() -> None:
    assert txn.address(3, 4, 0xDEC) == 0x06400DEC
    assert txn.split_address(0x06400DEC) == (3, 4, 0xDEC)
    assert txn.split_address(0x0201D064) == (1, 0, 0x1D064)


def test_a_disassembly_names_tile_register_and_values_a_line_an_op() -> None:
    assert list(txn.disassemble(txn.decode(packed(V0_1)))) == [
        "     4  WRITE         (3,4) core data memory +0xdec = 0x00000042",
        "    10  BLOCKWRITE    (1,0) shim BD 3 word 0 = 8 words: 00000040 00000000 00000000 "
        "00400000 c0000000 00000000 00000000 02000000",
        "    22  DDR_PATCH     (1,0) shim BD 3 word 1 = argument 2 + 0x100001000",
        "    34  MASKWRITE     (0,0) shim control S2MM0 = 0x00000f00 mask 0x00001f00",
        "    41  MASKPOLL_BUSY (0,2) core register 0x1df00 == 0x00000001 mask 0x00000003",
        "    49  PREEMPT       level 2",
        "    50  NOOP",
        "    51  LOADPDI       id 2, 1024 bytes at 0xabc12345678",
        "    55  SYNC          (3,4) MM2S5, 1 columns x 2 rows",
    ]
    assert (
        list(txn.disassemble(txn.decode(packed(V1_0))))[6]
        == "    38  RECORD_TIMER  0000000c 0000004d"
    )


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (0x0001D204, "(0,0) shim queue S2MM0"),
        (0x0001D20C, "(0,0) shim queue S2MM1"),
        (0x0001D214, "(0,0) shim queue MM2S0"),
        (0x0001D21C, "(0,0) shim queue MM2S1"),
        (0x0001D210, "(0,0) shim control MM2S0"),
        (0x0001D22C, "(0,0) shim status MM2S1"),
        (0x0001D1FC, "(0,0) shim BD 15 word 7"),
        (0x00014020, "(0,0) shim lock 2"),
        (0x0001F004, "(0,0) shim demux"),
        (0x0003F008, "(0,0) shim stream switch +0x8"),
        (0x021A05E0, "(1,1) memtile BD 47 word 0"),
        (0x001A0604, "(0,1) memtile queue S2MM0"),
        (0x001A0634, "(0,1) memtile queue MM2S0"),
        (0x00100010, "(0,1) memtile memory +0x10"),
        (0x00200400, "(0,2) core data memory +0x400"),
        (0x00220010, "(0,2) core program memory +0x10"),
        (0x0021D024, "(0,2) core BD 1 word 1"),
        (0x00000008, "(0,0) shim register 0x00008"),
    ],
)
def test_known_registers_have_names(register: int, name: str) -> None:
    assert txn.register_name(register) == name


def test_a_queue_push_shows_descriptor_repeat_and_token() -> None:
    made = txn.assemble([txn.write(0x1D204, 0x80070003)], dev_gen=4, num_cols=1)
    assert list(txn.disassemble(made)) == [
        "     4  WRITE         (0,0) shim queue S2MM0 = 0x80070003 (BD 3, repeat 7, token)"
    ]


LEGACY_PROLOG = (
    *(0x00000011, 0x01000405, 0x01000100, 0x0B590100, 0x000055FF, 0x00000001, 0x00000010),
    *(0x314E5A5F, 0x635F5F31, 0x676E696C, 0x39354E5F, 0x6E693131, 0x5F727473, 0x64726F77),
    *(0x00004573, 0x07BD9630, 0x000055FF),
)
LEGACY_OPS = (
    *(0x060304A6, 0, 1, 2, 0, 0x00600005, 0x80800007, 9, 0x2CD0000C, 0x2E107041),
    *(0x02030400, 0x0001D204, 0x42),
    *(0x03030401, 0x05010200),
)


@pytest.mark.parametrize("prolog", [LEGACY_PROLOG, ()])
def test_a_stream_older_than_txn_decodes_with_and_without_its_prolog(
    prolog: tuple[int, ...],
) -> None:
    data = packed((*prolog, *LEGACY_OPS))
    assert txn.is_legacy(data)
    decoded = txn.decode_legacy(data)
    assert decoded.prolog == prolog
    bd, write, sync = decoded.ops
    assert isinstance(bd, txn.LegacyWriteBd)
    assert (bd.col, bd.ncol, bd.ddr_id, bd.bd_id) == (3, 4, 10, 6)
    assert bd.data == (1, 2, 0, 0x00600005, 0x80800007, 9, 0x2CD0000C, 0x2E107041)
    assert isinstance(write, txn.Write)
    assert (write.address, write.value) == (txn.address(3, 4, 0x1D204), 0x42)
    assert write.value_word == len(prolog) + 12
    assert isinstance(sync, txn.Sync)
    assert (sync.direction, sync.row, sync.col) == (1, 4, 3)
    assert (sync.nrow, sync.ncol, sync.channel) == (2, 1, 5)


@pytest.mark.parametrize("data", [packed(V0_1), packed(V1_0), b"", b"\1", bytes(64)])
def test_anything_else_is_not_legacy(data: bytes) -> None:
    assert not txn.is_legacy(data)


def test_a_stream_of_one_write_is_txn_though_its_words_make_a_legacy_descriptor() -> None:
    data = stream(*WRITE_0_1)
    assert isinstance(txn.decode_legacy(data).ops[0], txn.LegacyWriteBd)
    assert not txn.is_legacy(data)


@pytest.mark.parametrize(
    ("words", "message", "word"),
    [
        (LEGACY_PROLOG, "no ops", 17),
        (LEGACY_OPS[:9], "op 0 at word 0: 9 words, wanted 10", 0),
        ((*LEGACY_OPS, 0x07000000), "op 3 at word 15: unknown legacy opcode 7", 15),
    ],
)
def test_a_bad_legacy_stream_is_refused(words: tuple[int, ...], message: str, word: int) -> None:
    with pytest.raises(txn.TxnError, match=message) as caught:
        txn.decode_legacy(packed(words))
    assert caught.value.word == word


def test_the_text_form_of_insts_reads_as_the_binary_form() -> None:
    text = "# made by hand\n\n" + "".join(f"{word:08X}  # word\r\n" for word in V0_1)
    assert txn.read_insts(text.encode()) == packed(V0_1)
    assert txn.read_insts(packed(V0_1)) == packed(V0_1)
    assert txn.read_insts(b"0x0000002a\n7") == packed((42, 7))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no words"),
        (b"# only a comment\n", "no words"),
        (b"00000001\nhello\n", "line 2: 'hello', wanted one 32-bit word"),
        (b"00000001 00000002\n", "line 1"),
        (b"123456789\n", "line 1"),
        (b"\xff\xfe12\n", "line 1"),
        (packed(V0_1)[:-1], "wanted a multiple of 4"),
    ],
)
def test_a_bad_insts_file_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(txn.TxnError, match=words):
        txn.read_insts(data)


def survives(data: bytes) -> None:
    """Every reader either answers or raises TxnError; what decodes encodes to the same bytes."""
    try:
        decoded = txn.decode(data)
    except txn.TxnError:
        pass
    else:
        assert decoded.encode() == data
        assert sum(1 for _ in txn.disassemble(decoded)) == len(decoded.ops)
    readers: list[Callable[[bytes], object]] = [txn.decode_legacy, txn.read_insts]
    for read in readers:
        with contextlib.suppress(txn.TxnError):
            read(data)
    txn.is_legacy(data)


@given(st.binary(max_size=256))
def test_random_bytes_raise_nothing_but_txn_errors(data: bytes) -> None:
    survives(data)


@settings(max_examples=300)
@given(
    st.sampled_from([V0_1, V1_0, (0, 4 * len(V0_1) + 8, *V0_1), (*LEGACY_PROLOG, *LEGACY_OPS)]),
    st.lists(
        st.tuples(
            st.integers(0, 63),
            st.one_of(st.integers(0, 64), st.sampled_from([0x80, 0x81, 0x84, 0xFFFFFFFC])),
        ),
        max_size=3,
    ),
    st.integers(0, 300),
)
def test_mutated_streams_raise_nothing_but_txn_errors(
    words: tuple[int, ...], changes: list[tuple[int, int]], length: int
) -> None:
    mutated = list(words)
    for place, value in changes:
        mutated[place % len(mutated)] = value
    data = packed(tuple(mutated))
    survives(data)
    survives(data[:length])


@given(
    st.lists(
        st.one_of(
            st.builds(txn.write, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
            st.builds(
                txn.block_write,
                st.integers(0, 2**32 - 1),
                st.lists(st.integers(0, 2**32 - 1), max_size=8),
            ),
            st.builds(txn.mask_write, *[st.integers(0, 2**32 - 1)] * 3),
            st.builds(txn.sync, st.integers(0, 1), *[st.integers(0, 255)] * 5),
            st.builds(txn.ddr_patch, *[st.integers(0, 2**32 - 1)] * 2, st.integers(0, 2**48 - 1)),
        ),
        max_size=12,
    )
)
def test_what_is_assembled_decodes_to_the_same_fields(ops: list[txn.Op]) -> None:
    decoded = txn.decode(txn.assemble(ops, dev_gen=4, num_cols=8).encode())
    assert [type(op) for op in decoded.ops] == [type(op) for op in ops]
    for found, wanted in zip(decoded.ops, ops, strict=True):
        fields = [name for name in type(wanted).__dataclass_fields__ if name != "word"]
        assert [getattr(found, f) for f in fields] == [getattr(wanted, f) for f in fields]


def test_more_operations_than_a_stream_has_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noops = (0x06040100, 0x00000108, 3, 28, 5, 5, 5)
    assert len(txn.decode(packed(noops)).ops) == 3
    monkeypatch.setattr(txn_codec, "MAX_OPS", 2)
    with pytest.raises(txn.TxnError, match="3 ops, wanted at most 2") as info:
        txn.decode(packed(noops))
    assert info.value.word == 2
