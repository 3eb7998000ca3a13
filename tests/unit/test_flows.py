"""Strided views against the words they stand for."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed.emulator.dma import Piece
from npu_embed.emulator.flows import (
    Argument,
    collapse,
    flow_words,
    gather,
    scatter,
    split_dims,
    spread,
    view,
)
from npu_embed.emulator.memory import Memory

MEMORY_BYTES = 1 << 14


def numbered() -> Argument:
    """A buffer whose element i holds i."""
    memory = Memory(MEMORY_BYTES, None)
    memory.host.view(np.uint16)[:] = np.arange(MEMORY_BYTES // 2)
    memory.sync_to_device(0, MEMORY_BYTES)
    return Argument(memory, 0, MEMORY_BYTES)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    shape=shapes,
    strides=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), min_size=4, max_size=4),
    target=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    dense=st.booleans(),
)
def test_a_view_shows_the_elements_the_piece_moves_or_there_is_none(
    shape: list[int], strides: list[int], target: list[int], dense: bool
) -> None:
    if dense:  # so that most targets can be had
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    piece = Piece(0, 5, tuple(shape), tuple(strides[: len(shape)]))
    elements = 2 * piece.words
    target = [*target, max(1, elements // prod(target))]
    if prod(target) != elements:
        return
    args = [numbered()]
    dims = split_dims(piece, target)
    if dims is None:
        assert not dense, "one run of words can be cut in any way"
        return
    found = view(piece, dims).device(args)
    assert found.shape == tuple(target)
    assert (found.reshape(-1) == gather([piece], args)).all()


@settings(max_examples=300, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=4),
)
def test_collapsed_dimensions_step_evenly_or_there_are_none(dims: list[tuple[int, int]]) -> None:
    grid = [0]
    for size, stride in dims:
        grid = [g + i * stride for g in grid for i in range(size)]
    found = collapse(tuple(dims))
    steps = {b - a for a, b in pairwise(grid)}
    if found is None:
        assert len(steps) > 1
    else:
        assert [i * found[1] for i in range(found[0])] == grid


def test_parallel_flows_are_one_piece_and_a_step() -> None:
    flows = [[Piece(0, 10 + 7 * i, (2, 3), (9, 1))] for i in range(3)]
    assert spread(flows) == (flows[0][0], 7)
    assert spread(flows[:1]) == (flows[0][0], 0)


def test_unlike_flows_are_not_merged() -> None:
    first = Piece(0, 10, (2, 3), (9, 1))
    for other in (
        Piece(1, 17, (2, 3), (9, 1)),
        Piece(0, 17, (3, 2), (9, 1)),
        Piece(0, 17, (2, 3), (8, 1)),
        Piece(0, 3, (2, 3), (9, 1)),  # a step back
    ):
        assert spread([[first], [other]]) is None
    even = Piece(0, 17, (2, 3), (9, 1))
    assert spread([[first], [even], [Piece(0, 25, (2, 3), (9, 1))]]) is None
    assert spread([[first], [even, even]]) is None
    assert spread([[], [even]]) is None


def test_scatter_stores_what_gather_reads() -> None:
    args = [numbered(), Argument(Memory(MEMORY_BYTES, None), 64, MEMORY_BYTES - 64)]
    source = [Piece(0, 3, (4, 2), (10, 3)), Piece(0, 100, (5,), (1,))]
    target = [Piece(1, 9, (13,), (2,))]
    assert flow_words(source) == flow_words(target)
    scatter(target, args, gather(source, args))
    assert (gather(target, args) == gather(source, args)).all()
    written = args[1].memory.device.view(np.uint16)
    assert (written[32 + 18 :][:2] == gather(source, args)[:2]).all(), "past the buffer's base"
