"""Buffer descriptors against a shim that counts one word after another."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import bd
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed.emulator.dma import (
    BadDescriptor,
    Piece,
    decode_descriptor,
    pushed,
    words_view,
)


def offsets(words: list[int], repeats: int) -> list[int]:
    """Every word the channel moves, in order, from the descriptor's own words."""
    length, w3, w4, w5, w6 = words[0], *words[3:7]
    d0, d1 = w3 >> 20, w4 >> 20 & 0x3FF
    s0, s1, s2 = (w3 & 0xFFFFF) + 1, (w4 & 0xFFFFF) + 1, (w5 & 0xFFFFF) + 1
    size, step, current = (w6 >> 20 & 0x3F) + 1, (w6 & 0xFFFFF) + 1, w6 >> 26
    found = []
    for _ in range(repeats):
        i0 = i1 = i2 = 0
        for _ in range(length):
            found.append(current * step + i2 * s2 + i1 * s1 + i0 * s0)
            i0 += 1
            if d0 and i0 == d0:
                i0, i1 = 0, i1 + 1
                if d1 and i1 == d1:
                    i1, i2 = 0, i2 + 1
        current = (current + 1) % size
    return found


def moved(pieces: list[Piece]) -> list[int]:
    """Every word the pieces move, in order."""
    memory = np.arange(4 * max(p.end for p in pieces), dtype=np.uint32).view(np.uint8)
    found: list[int] = []
    for piece in pieces:
        halves = words_view(piece, memory, 0)
        found += np.ascontiguousarray(halves).view(np.uint32).reshape(-1).tolist()
    return found


sizes = st.integers(0, 5)
strides = st.integers(1, 9)


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 70),
    d0=st.tuples(sizes, strides),
    d1=st.tuples(sizes, strides),
    d2_stride=strides,
    iteration=st.tuples(st.integers(1, 4), strides),
    current=st.integers(0, 3),
    repeats=st.integers(1, 9),
)
def test_pieces_move_the_words_the_descriptor_names_in_its_order(
    length: int,
    d0: tuple[int, int],
    d1: tuple[int, int],
    d2_stride: int,
    iteration: tuple[int, int],
    current: int,
    repeats: int,
) -> None:
    if d0[0] == 0:
        d1 = (0, d1[1])  # the compiler writes no second dimension without a first
    words = bd(length, d0, d1, d2_stride, iteration, min(current, iteration[0] - 1))
    pieces = pushed(decode_descriptor(words), 0, 0, repeats)
    wanted = offsets(words, repeats)
    assert moved(pieces) == wanted
    assert max(p.end for p in pieces) == max(wanted) + 1
    assert sum(p.words for p in pieces) == len(wanted)
    assert moved([p.tidied() for p in pieces]) == wanted


def test_one_regular_descriptor_is_one_piece() -> None:
    words = bd(4 * 3 * 2, (4, 1), (3, 10), 100, (5, 1000))
    (piece,) = pushed(decode_descriptor(words), 2, 7, 5)
    assert piece == Piece(2, 7, (5, 2, 3, 4), (1000, 100, 10, 1))


def test_repeats_without_an_iteration_move_the_same_words() -> None:
    (piece,) = pushed(decode_descriptor(bd(6)), 0, 0, 3)
    assert piece.shape[0] == 3
    assert piece.strides[0] == 0
    assert moved([piece]) == list(range(6)) * 3


def test_the_fields_are_where_the_hardware_has_them() -> None:
    # A descriptor as the hardware's own compiler wrote it.
    words = [1024, 0, 0, 0x01000000, 0x8200007F, 0x0000000F, 0x0070000F, 0x02000000]
    found = decode_descriptor(words)
    assert (found.d0_size, found.d0_stride) == (16, 1)
    assert (found.d1_size, found.d1_stride) == (32, 128)
    assert found.d2_stride == 16
    assert (found.iteration_size, found.iteration_stride, found.iteration_current) == (8, 16, 0)
    assert found.next_bd is None
    assert decode_descriptor([*words[:7], 0x02000000 | 1 << 26 | 9 << 27]).next_bd == 9


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (7, 0, "valid"),
        (0, 0, "length is 0"),
        (2, 1 << 30, "packet"),
        (7, 1 << 25 | 1 << 12, "locks"),
    ],
)
def test_what_is_invalid_or_not_emulated_is_refused(word: int, value: int, says: str) -> None:
    words = bd(16)
    words[word] = value
    with pytest.raises(BadDescriptor, match=says):
        decode_descriptor(words)
