"""Streams are decoded and their descriptors followed here, word by word, as a shim would.

The little shim below is written from the register layout; it shares nothing with the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.emulator import txn
from npu_embed.exporters.descriptors import Channel, ShimBd, Transfer
from npu_embed.exporters.streams import active_columns, gemm_stream, head_shares, mha_stream

Indices = NDArray[np.int64]

QUEUES = {0x1D204: "S2MM0", 0x1D20C: "S2MM1", 0x1D214: "MM2S0", 0x1D21C: "MM2S1"}
S2MM0_CONTROL = 0x1D200
NO_WINDOW = 0xFFFFFFFF


def bd_words(words: tuple[int, ...], repeats: int) -> Indices:
    """The buffer's 32-bit words in the order the descriptor moves them."""
    length = words[0]
    d0_size, d0_stride = words[3] >> 20 & 0x3FF, (words[3] & 0xFFFFF) + 1
    d1_size, d1_stride = words[4] >> 20 & 0x3FF, (words[4] & 0xFFFFF) + 1
    d2_stride = (words[5] & 0xFFFFF) + 1
    iterations, step = (words[6] >> 20 & 0x3F) + 1, (words[6] & 0xFFFFF) + 1
    assert words[6] >> 26 == 0, "iteration begins at 0"
    assert words[7] == 1 << 25, "valid, no locks, no next descriptor"
    i = np.arange(length)
    if d0_size == 0:
        assert d1_size == 0
        once = i * d0_stride
    else:
        assert d1_size > 0
        rows = i // d0_size
        once = i % d0_size * d0_stride + rows % d1_size * d1_stride + rows // d1_size * d2_stride
    return np.concatenate([once + r % iterations * step for r in range(repeats)])


def elements(words: Indices) -> Indices:
    """The two bf16 elements of every word."""
    return np.stack([2 * words, 2 * words + 1], axis=-1).reshape(-1)


@dataclass
class Shim:
    """What a stream made the shim and the cores' memories do."""

    rtp: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    moved: dict[tuple[int, str, int], list[Indices]] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)
    pushed: list[tuple[int, str]] = field(default_factory=list)

    def elements(self, col: int, channel: str, arg: int) -> Indices:
        (words,) = self.moved[col, channel, arg]
        return elements(words)


def run(stream: txn.Stream) -> Shim:
    """Follow a stream, from its bytes."""
    shim = Shim()
    bds: dict[tuple[int, int], tuple[int, ...]] = {}
    patches: dict[tuple[int, int], tuple[int, int]] = {}
    tokens_set_up: set[int] = set()
    for op in txn.decode(stream.encode()).ops:
        if isinstance(op, txn.Sync):
            assert (op.direction, op.row, op.nrow, op.ncol, op.channel) == (0, 0, 1, 1, 0)
            shim.waited.append(op.col)
            continue
        assert isinstance(op, txn.Write | txn.BlockWrite | txn.MaskWrite | txn.DdrPatch)
        assert not shim.waited, "nothing follows the first wait but waits"
        col, row, offset = txn.split_address(op.address)
        if isinstance(op, txn.BlockWrite):
            assert row == 0
            assert len(op.data) == 8
            bds[col, (offset - 0x1D000) // 0x20] = op.data
        elif isinstance(op, txn.DdrPatch):
            bd = (offset - 0x1D004) // 0x20
            assert (row, offset) == (0, 0x1D004 + 0x20 * bd)
            assert (col, bd) in bds, "the patch follows its descriptor"
            patches[col, bd] = (op.arg_index, op.arg_plus)
        elif isinstance(op, txn.MaskWrite):
            assert (row, offset, op.value, op.mask) == (0, S2MM0_CONTROL, 0xF00, 0x1F00)
            tokens_set_up.add(col)
        elif row >= 2:
            assert not shim.pushed, "run-time words come before any data"
            shim.rtp.setdefault((col, row), {})[(offset - 1024) // 4] = op.value
        else:
            channel = QUEUES[offset]
            bd, repeats, token = op.value & 0xF, (op.value >> 16 & 0xFF) + 1, op.value >> 31
            assert op.value & ~0x80FF000F == 0
            assert token == (channel == "S2MM0")
            assert not token or col in tokens_set_up
            arg, plus = patches.pop((col, bd))
            assert plus % 4 == 0
            words = bd_words(bds[col, bd], repeats) + plus // 4
            shim.moved.setdefault((col, channel, arg), []).append(words)
            shim.pushed.append((col, channel))
    assert not patches
    return shim


def a_order(core_row: int, chunks: int, rows_per_core: int, k: int, lda: int) -> Indices:
    """[chunk][k_block][row][k], the elements core row `core_row` is given."""
    chunk, block, row, kk = np.ogrid[:chunks, : k // 64, :rows_per_core, :64]
    first = (chunk * 4 + core_row) * rows_per_core
    return np.asarray((first + row) * lda + block * 64 + kk).reshape(-1)


def c_order(first: int, width: int, rows: int, c_stride: int) -> Indices:
    """[row][column], the elements a column of the array gives."""
    row, column = np.ogrid[:rows, :width]
    return np.asarray(row * c_stride + first + column).reshape(-1)


GEMMS = [
    # chunks, k, n, lda, c_stride, epilogue, bias, columns that work
    (1, 64, 64, 64, 64, 0, True, 1),
    (3, 128, 192, 128, 192, 1, True, 3),
    (2, 64, 128, 96, 200, 2, False, 2),
    (5, 192, 320, 192, 320, 4, True, 1),  # 5 blocks: only one column divides them
    (2, 64, 512, 64, 256, 3, False, 4),  # a GeGLU pair writes half
    (32, 128, 512, 128, 512, 1, True, 4),
    (2, 64, 64 * 36, 64, 64 * 36, 0, True, 4),  # 288 words a row
    (2, 64, 64 * 132, 64, 64 * 132, 0, True, 4),  # 1056 words a row, cut into two parts
    (1, 64, 64 * 5 * 7 * 11, 64, 64 * 5 * 7 * 11, 0, True, 1),  # 12320 words, cut into 14
    (1, 64, 64, 40000, 40000, 0, True, 1),  # one chunk has no stride to the next
]


@pytest.mark.parametrize("rows_per_core", [4, 12, 16])
@pytest.mark.parametrize(
    ("chunks", "k", "n", "lda", "c_stride", "epilogue", "bias", "columns"), GEMMS
)
def test_a_gemm_moves_every_element_once_in_the_documented_order(
    chunks: int,
    k: int,
    n: int,
    lda: int,
    c_stride: int,
    epilogue: int,
    bias: bool,
    columns: int,
    rows_per_core: int,
) -> None:
    sizes = (chunks, k, n, lda, c_stride)
    shim = run(gemm_stream(*sizes, epilogue, bias, dev_gen=4, rows_per_core=rows_per_core))
    rows = chunks * 4 * rows_per_core
    blocks = n // 64 // columns
    width = blocks * (32 if epilogue == 3 else 64)

    words = dict(enumerate((chunks, k // 64, blocks, epilogue, int(bias), rows_per_core)))
    assert set(shim.rtp) == {(col, row) for col in range(4) for row in range(2, 6)}
    for (col, _), rtp in shim.rtp.items():
        assert rtp == (words if col < columns else {**words, 2: 0})

    for core_row in range(4):
        order = a_order(core_row, chunks, rows_per_core, k, lda)
        np.testing.assert_array_equal(shim.elements(core_row, "MM2S0", 0), order)

    column_words = blocks * (k * 64 * 2 + 256 * bias) // 4
    written = []
    for col in range(columns):
        (b_words,) = shim.moved[col, "MM2S1", 1]
        share = np.arange(column_words) + col * column_words
        np.testing.assert_array_equal(b_words, np.tile(share, chunks))
        order = c_order(col * width, width, rows, c_stride)
        np.testing.assert_array_equal(shim.elements(col, "S2MM0", 2), order)
        written.append(order)
    everything = c_order(0, columns * width, rows, c_stride)
    np.testing.assert_array_equal(np.sort(np.concatenate(written)), np.sort(everything))
    assert len(shim.moved) == 4 + 2 * columns
    assert shim.waited == list(range(columns))


@pytest.mark.parametrize(("dev_gen", "num_cols"), [(4, 8), (3, 4)])
def test_the_header_names_the_device(dev_gen: int, num_cols: int) -> None:
    header = txn.decode(gemm_stream(1, 64, 64, 64, 64, 0, True, dev_gen).encode()).header
    assert (header.major, header.minor, header.dev_gen) == (0, 1, dev_gen)
    assert (header.num_rows, header.num_cols, header.num_memtile_rows) == (6, num_cols, 1)


def heads_order(first: int, count: int, rows: int, d: int, stride: int, start: int) -> Indices:
    """[head][row][column]."""
    head, row, column = np.ogrid[first : first + count, :rows, :d]
    return np.asarray(start + row * stride + head * d + column).reshape(-1)


MHAS = [
    # rows, heads, kv_heads, head_dim, (q, k, v, o strides), (q, k, v, o columns), q shares
    (16, 4, 4, 16, (192, 192, 192, 64), (0, 64, 128, 0), [(0, 1), (1, 1), (2, 1), (3, 1)]),
    (512, 12, 12, 32, (1152, 1152, 1152, 384), (0, 384, 768, 0), [(0, 3), (3, 3), (6, 3), (9, 3)]),
    (64, 3, 1, 32, (160, 160, 160, 96), (0, 96, 128, 0), [(0, 1), (1, 1), (2, 1)]),
    (4, 6, 2, 2, (20, 24, 28, 12), (2, 14, 18, 0), [(0, 2), (2, 2), (4, 1), (5, 1)]),
    (8, 8, 2, 6, (100, 40, 40, 60), (0, 0, 12, 10), [(0, 2), (2, 2), (4, 2), (6, 2)]),
    (8, 1, 1, 64, (64, 64, 64, 64), (0, 0, 0, 0), [(0, 1)]),
    # More rows than one dimension of a descriptor counts; the last with rows as wide as to need
    # a finer split than the count alone.
    (1024, 6, 2, 4, (40, 40, 40, 24), (0, 24, 32, 0), [(0, 2), (2, 2), (4, 1), (5, 1)]),
    (2048, 3, 1, 8, (64, 64, 64, 64), (0, 24, 32, 0), [(0, 1), (1, 1), (2, 1)]),
    (2048, 4, 1, 2, (6144, 6144, 6144, 8), (0, 8, 10, 0), [(0, 1), (1, 1), (2, 1), (3, 1)]),
]


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "d", "strides", "starts", "shares"), MHAS)
def test_an_mha_moves_every_head_once_in_the_documented_order(
    rows: int,
    heads: int,
    kv_heads: int,
    d: int,
    strides: tuple[int, int, int, int],
    starts: tuple[int, int, int, int],
    shares: list[tuple[int, int]],
) -> None:
    stream, kv_words, window_words = mha_stream(
        rows, heads, kv_heads, d, *strides, *starts, dev_gen=4
    )
    shim = run(stream)
    assert sum(count for _, count in shares) == heads
    for col in range(4):
        first, count = shares[col] if col < len(shares) else (0, 0)
        for row in range(2, 6):
            words = dict(enumerate((rows, rows, NO_WINDOW, first, count)))
            assert shim.rtp[col, row] == words
    for col, (first, count) in enumerate(shares):
        group = heads // kv_heads
        kv = sorted({head // group for head in range(first, first + count)})
        wanted = [("MM2S0", first, count), ("MM2S1", kv[0], len(kv)), ("MM2S1", kv[0], len(kv))]
        for arg, (channel, head, number) in enumerate([*wanted, ("S2MM0", first, count)]):
            order = heads_order(head, number, rows, d, strides[arg], starts[arg])
            np.testing.assert_array_equal(shim.elements(col, channel, arg), order)
    assert len(shim.moved) == 4 * len(shares)
    assert shim.waited == list(range(len(shares)))
    assert len(kv_words) == len(window_words) == 4 * len(shares)


def test_k_is_pushed_before_v() -> None:
    stream, _, _ = mha_stream(16, 4, 4, 16, 64, 64, 64, 64, 0, 0, 0, 0, dev_gen=4)
    patched = [op.arg_index for op in stream.ops if isinstance(op, txn.DdrPatch)]
    assert [arg for arg in patched if arg in (1, 2)] == [1, 2] * 4


def test_the_patch_words_hold_kv_and_window_of_every_core() -> None:
    stream, kv_words, window_words = mha_stream(
        32, 6, 2, 8, 80, 80, 80, 48, 0, 48, 64, 0, dev_gen=4
    )
    words = np.frombuffer(stream.encode(), dtype="<u4").copy()
    assert (words[list(kv_words)] == 32).all()
    assert (words[list(window_words)] == NO_WINDOW).all()
    words[list(kv_words)] = np.arange(100, 100 + len(kv_words))
    words[list(window_words)] = np.arange(200, 200 + len(window_words))
    rtp = run(txn.decode(words)).rtp
    assert sorted(core[1] for core in rtp.values()) == list(range(100, 116))
    assert sorted(core[2] for core in rtp.values()) == list(range(200, 216))
    assert all(core[0] == 32 for core in rtp.values())


@pytest.mark.parametrize(
    ("heads", "shares"),
    [
        (1, ((0, 1), (0, 0), (0, 0), (0, 0))),
        (4, ((0, 1), (1, 1), (2, 1), (3, 1))),
        (7, ((0, 2), (2, 2), (4, 2), (6, 1))),
        (16, ((0, 4), (4, 4), (8, 4), (12, 4))),
    ],
)
def test_heads_are_spread_evenly(heads: int, shares: tuple[tuple[int, int], ...]) -> None:
    assert head_shares(heads) == shares


@pytest.mark.parametrize(("blocks", "columns"), [(1, 1), (2, 2), (6, 3), (7, 1), (8, 4), (36, 4)])
def test_active_columns_divide_the_blocks(blocks: int, columns: int) -> None:
    assert active_columns(blocks) == columns


GEMM: dict[str, Any] = {
    "chunks": 2,
    "k": 64,
    "n": 128,
    "lda": 64,
    "c_stride": 128,
    "epilogue": 0,
    "bias": True,
    "dev_gen": 4,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 96}, "k is 96, wanted a multiple of 64"),
        ({"k": 0}, "k is 0"),
        ({"n": 100}, "n is 100, wanted a multiple of 64"),
        ({"lda": 65}, "lda is 65 elements, wanted an even number"),
        ({"c_stride": 129}, "c_stride is 129 elements, wanted an even number"),
        ({"lda": 62}, "lda 62 and c_stride 128, wanted at least 64 and 128"),
        ({"c_stride": 126}, "c_stride 126, wanted at least 64 and 128"),
        ({"epilogue": 5}, "5 is not a valid Epilogue"),
        ({"dev_gen": 2}, "dev_gen is 2, wanted one of 3, 4"),
        ({"rows_per_core": 0}, "rows_per_core is 0, wanted a multiple of 4"),
        ({"rows_per_core": 6}, "rows_per_core is 6, wanted a multiple of 4"),
        ({"rows_per_core": 20}, "rows_per_core is 20, wanted at most 16"),
        ({"chunks": 0}, "iterations is 0, wanted 1 to 64"),
        ({"chunks": 65}, "iterations is 65, wanted 1 to 64"),
        ({"lda": 32770}, "iteration_stride is 1048640, wanted 1 to 1048576"),
        ({"chunks": 1, "lda": 1 << 22}, "d1_stride is 2097152, wanted 1 to 1048576"),
    ],
)
def test_a_gemm_the_array_cannot_run_is_refused(change: dict[str, int], words: str) -> None:
    gemm_stream(**GEMM)
    with pytest.raises(ValueError, match=words):
        gemm_stream(**{**GEMM, **change})


MHA: dict[str, Any] = {
    "rows": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "q_stride": 128,
    "k_stride": 128,
    "v_stride": 128,
    "o_stride": 64,
    "q_col": 0,
    "k_col": 64,
    "v_col": 96,
    "o_col": 0,
    "dev_gen": 4,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 18}, "rows is 18, wanted a multiple of 4"),
        ({"rows": 0}, "rows is 0"),
        ({"rows": 1024, "q_stride": 1 << 22}, "d1_stride is 2097152, wanted 1 to 1048576"),
        ({"rows": 1024, "heads": 260, "kv_heads": 1}, "iterations is 65, wanted 1 to 64"),
        ({"heads": 5}, "heads is 5, wanted a multiple of 2"),
        ({"head_dim": 15}, "head_dim is 15, wanted a multiple of 2"),
        ({"head_dim": 2048}, "d0_size is 1024, wanted 0 to 1023"),
        ({"q_stride": 127}, "q_stride is 127 elements, wanted an even number"),
        ({"v_col": 97}, "v_col is 97 elements, wanted an even number"),
        ({"q_col": -2}, "offset_bytes is -4"),
        ({"o_stride": 1 << 22}, "d1_stride is 2097152, wanted 1 to 1048576"),
    ],
)
def test_an_mha_the_array_cannot_run_is_refused(change: dict[str, int], words: str) -> None:
    mha_stream(**MHA)
    with pytest.raises(ValueError, match=words):
        mha_stream(**{**MHA, **change})


def test_descriptor_words_are_those_of_a_real_stream() -> None:
    bd = ShimBd(
        4096, d0_size=16, d1_size=32, d1_stride=128, d2_stride=16, iterations=8, iteration_stride=16
    )
    assert bd.words() == (4096, 0, 0, 0x01000000, 0x8200007F, 15, 0x0070000F, 1 << 25)


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (Transfer(0, Channel.MM2S0, 16, ShimBd(4), 0, 0), "bd_id is 16, wanted 0 to 15"),
        (Transfer(0, Channel.MM2S0, 0, ShimBd(4), 0, 0, 257), "repeat is 257, wanted 1 to 256"),
        (Transfer(0, Channel.MM2S0, 0, ShimBd(4), 0, 1 << 48), "offset_bytes is 281474976710656"),
    ],
)
def test_a_transfer_that_does_not_fit_is_refused(transfer: Transfer, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(transfer.ops())


@pytest.mark.parametrize("length", [0, 1 << 32])
def test_a_descriptor_length_must_fit(length: int) -> None:
    with pytest.raises(ValueError, match=f"length is {length}, wanted 1 to 4294967295"):
        ShimBd(length)
