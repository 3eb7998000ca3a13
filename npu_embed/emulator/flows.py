"""From DMA pieces to the arrays a program computes with.

A program knows its streams as logical shapes ([chunk][k_block][row][k]); the descriptors know
strides. Where a stream is one regular piece, the logical array is a numpy view of device memory and
nothing is copied; where it is not, its words are gathered in order. Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..bf16 import RowBuffer
from .dma import WORD_BYTES, Piece, words_view
from .heads import Heads
from .memory import Memory

U16 = NDArray[np.uint16]
Dims = tuple[tuple[int, int], ...]  # (size, stride in elements), outermost first


@dataclass(frozen=True, slots=True)
class Argument:
    """A buffer bound to a run: the allocation it lies in, where, and how long it is."""

    memory: Memory
    base_bytes: int
    size_bytes: int


Arguments = Sequence[Argument]


def split_dims(piece: Piece, target: Sequence[int]) -> Dims | None:
    """The piece's elements (two a word) in dimensions `target`; None if strides forbid it."""
    tidy = piece.tidied()
    dims = [(n, 2 * s) for n, s in zip(tidy.shape, tidy.strides, strict=True)]
    if dims[-1][1] == 2:
        dims[-1] = (dims[-1][0] * 2, 1)
    else:
        dims.append((2, 1))
    result: list[tuple[int, int]] = []
    size, stride = dims.pop()
    for wanted in reversed(target):
        while size == 1 and dims and wanted > 1:
            size, stride = dims.pop()
        if size % wanted:
            return None
        result.append((wanted, stride))
        size //= wanted
        stride *= wanted
    return tuple(reversed(result))


def collapse(dims: Dims) -> tuple[int, int] | None:
    """Several dimensions as one (size, stride); None if they are not evenly spaced."""
    size, stride = 1, 1
    for n, s in reversed(dims):
        if n == 1:
            continue
        if size == 1:
            size, stride = n, s
        elif s == size * stride:
            size *= n
        else:
            return None
    return size, stride


def spread(flows: Sequence[Sequence[Piece]]) -> tuple[Piece, int] | None:
    """Parallel flows as (the first one's piece, words from each to the next); None if not alike."""
    if any(len(flow) != 1 for flow in flows):
        return None
    first = flows[0][0]
    step = flows[1][0].offset - first.offset if len(flows) > 1 else 0
    for i, (piece,) in enumerate(flows):
        alike = (piece.arg, piece.shape, piece.strides) == (first.arg, first.shape, first.strides)
        if not alike or piece.offset != first.offset + i * step:
            return None
    return (first, step) if step >= 0 else None


@dataclass(frozen=True, slots=True)
class View:
    """A strided bf16 array in an argument; offset and strides in bytes."""

    arg: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def device(self, args: Arguments) -> U16:
        """The view over the device's side of memory."""
        a = args[self.arg]
        over: U16 = np.ndarray(
            self.shape,
            np.uint16,
            a.memory.device,
            a.base_bytes + self.offset,
            self.strides,
        )
        return over

    def rows(self, args: Arguments) -> RowBuffer:
        """A view [rows, width], a row's elements side by side, as a row buffer on the device."""
        a = args[self.arg]
        return a.memory.elements, (a.base_bytes + self.offset) // 2, self.strides[0] // 2

    def heads(self, args: Arguments) -> Heads:
        """A view [heads, rows, width], a row's elements side by side, as heads on the device."""
        a = args[self.arg]
        first = (a.base_bytes + self.offset) // 2
        return Heads(a.memory.elements, first, self.strides[0] // 2, self.strides[1] // 2)

    def wrote(self, args: Arguments) -> None:
        """Tell the memory that the device wrote this view."""
        a = args[self.arg]
        a.memory.device_wrote(a.base_bytes + self.offset, self.shape, self.strides, 2)


def view(piece: Piece, dims: Dims) -> View:
    """A view that begins where the piece does."""
    return View(
        piece.arg,
        piece.offset * WORD_BYTES,
        tuple(n for n, _ in dims),
        tuple(2 * s for _, s in dims),
    )


def gather(flow: Sequence[Piece], args: Arguments) -> U16:
    """The flow's elements in the order they enter the array, copied."""
    parts = [
        words_view(p, args[p.arg].memory.device, args[p.arg].base_bytes).reshape(-1) for p in flow
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def scatter(flow: Sequence[Piece], args: Arguments, elements: U16) -> None:
    """Store elements in the order they leave the array."""
    start = 0
    for p in flow:
        a = args[p.arg]
        target = words_view(p, a.memory.device, a.base_bytes)
        stop = start + 2 * p.words
        target[...] = elements[start:stop].reshape(target.shape)
        start = stop
        a.memory.device_wrote(a.base_bytes + p.offset * WORD_BYTES, target.shape, target.strides, 2)


def flow_words(flow: Sequence[Piece]) -> int:
    """How many words a flow moves."""
    return sum(prod(p.shape) for p in flow)
