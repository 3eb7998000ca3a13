"""Which texts share a forward."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_embed.packing import Pack, make_packs

MAX_ROWS = 40
LENGTHS = st.lists(st.integers(1, MAX_ROWS), max_size=60)


@given(LENGTHS)
def test_every_text_is_in_one_pack_and_no_pack_is_too_long(lengths: list[int]) -> None:
    packs = make_packs(lengths, MAX_ROWS)
    assert sorted(i for pack in packs for i in pack.indices) == list(range(len(lengths)))
    for pack in packs:
        assert pack.lengths == tuple(lengths[i] for i in pack.indices)
        assert pack.rows == sum(pack.lengths) <= MAX_ROWS


@given(LENGTHS)
def test_starts_ascend_without_gap_or_overlap(lengths: list[int]) -> None:
    for pack in make_packs(lengths, MAX_ROWS):
        row = 0
        for start, length in zip(pack.starts, pack.lengths, strict=True):
            assert start == row
            row += length


@given(LENGTHS)
def test_longer_texts_come_first_and_equal_ones_in_their_order(lengths: list[int]) -> None:
    order = [i for pack in make_packs(lengths, MAX_ROWS) for i in pack.indices]
    assert order == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


@given(LENGTHS)
def test_two_packs_in_a_row_would_not_fit_in_one(lengths: list[int]) -> None:
    packs = make_packs(lengths, MAX_ROWS)
    for one, following in itertools.pairwise(packs):
        assert one.rows + following.lengths[0] > MAX_ROWS


def test_no_texts_make_no_pack() -> None:
    assert make_packs([], MAX_ROWS) == []


def test_a_pack_says_where_each_text_begins() -> None:
    assert make_packs([3, 5, 3, 9], 12) == [
        Pack((3,), (0,), (9,), 9),
        Pack((1, 0, 2), (0, 5, 8), (5, 3, 3), 11),
    ]


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_a_text_that_fits_no_pack_is_named(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"texts\[1\]: {rows} rows, a pack holds 1 to 40"):
        make_packs([1, rows], MAX_ROWS)
