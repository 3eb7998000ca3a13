"""Shim DMA: what a buffer descriptor makes the channel move, and in which order.

A descriptor is eight words; its access pattern has up to three dimensions and an iteration that
steps with each repeat of a push. Sizes and strides count 32-bit words; the hardware stores strides
(and the iteration's size) minus one. The outermost dimension has no size: it runs until the
length is spent.

Source: the register layout of AIE2's shim DMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

BD_BASE = 0x1D000
BD_BYTES = 0x20
BD_COUNT = 16
BD_WORDS = 8
WORD_BYTES = 4


class BadDescriptor(ValueError):
    """A descriptor the hardware would refuse, or one that uses what is not emulated."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided run of words of one kernel argument, in the order the channel moves them.

    `offset` and `strides` count words from the argument's first byte; strides may be 0 (a repeat
    without iteration).
    """

    arg: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def words(self) -> int:
        """How many words move."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the highest word touched; strides are never negative."""
        return (
            self.offset
            + 1
            + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        )

    def tidied(self) -> Piece:
        """The same words in the same order, in as few dimensions as they need."""
        shape: list[int] = []
        strides: list[int] = []
        for n, s in zip(self.shape, self.strides, strict=True):
            if n == 1:
                continue
            if shape and strides[-1] == n * s:
                shape[-1] *= n
                strides[-1] = s
            else:
                shape.append(n)
                strides.append(s)
        return replace(self, shape=tuple(shape) or (1,), strides=tuple(strides) or (1,))


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A decoded buffer descriptor; sizes of 0 mean an unused dimension."""

    length: int
    d0_size: int
    d0_stride: int
    d1_size: int
    d1_stride: int
    d2_stride: int
    iteration_size: int
    iteration_stride: int
    iteration_current: int
    next_bd: int | None


def decode_descriptor(words: Sequence[int]) -> Descriptor:
    """The descriptor in eight register words; the address in words 1 and 2 is left aside.

    Raises:
        BadDescriptor: not valid, no length, or packets or locks (which are not emulated).
    """
    w0, _, w2, w3, w4, w5, w6, w7 = words
    if not w7 >> 25 & 1:
        raise BadDescriptor("the valid bit is not set")
    if w0 == 0:
        raise BadDescriptor("its length is 0")
    if w2 >> 30 & 1:
        raise BadDescriptor("packet headers are not emulated")
    if w7 >> 12 & 1:
        raise BadDescriptor("shim locks are not emulated")
    return Descriptor(
        length=w0,
        d0_size=w3 >> 20 & 0x3FF,
        d0_stride=(w3 & 0xFFFFF) + 1,
        d1_size=w4 >> 20 & 0x3FF,
        d1_stride=(w4 & 0xFFFFF) + 1,
        d2_stride=(w5 & 0xFFFFF) + 1,
        iteration_size=(w6 >> 20 & 0x3F) + 1,
        iteration_stride=(w6 & 0xFFFFF) + 1,
        iteration_current=w6 >> 26 & 0x3F,
        next_bd=w7 >> 27 & 0xF if w7 >> 26 & 1 else None,
    )


def _once(bd: Descriptor, arg: int, offset: int) -> list[Piece]:
    """One pass of the descriptor: a regular block, then the ragged rest the length leaves."""
    d0 = bd.d0_size or bd.length
    d1 = bd.d1_size or -(-bd.length // d0)
    pieces = []
    left = bd.length
    full, left = divmod(left, d0 * d1)
    if full:
        strides = (bd.d2_stride, bd.d1_stride, bd.d0_stride)
        pieces.append(Piece(arg, offset, (full, d1, d0), strides))
        offset += full * bd.d2_stride
    rows, left = divmod(left, d0)
    if rows:
        pieces.append(Piece(arg, offset, (rows, d0), (bd.d1_stride, bd.d0_stride)))
        offset += rows * bd.d1_stride
    if left:
        pieces.append(Piece(arg, offset, (left,), (bd.d0_stride,)))
    return pieces


def pushed(bd: Descriptor, arg: int, offset: int, repeats: int) -> list[Piece]:
    """What a push moves: `repeats` passes, each stepped by the iteration."""
    once = _once(bd, arg, offset)
    steps = [(bd.iteration_current + i) % bd.iteration_size for i in range(repeats)]
    regular = all(b - a == steps[1] - steps[0] for a, b in pairwise(steps))
    if len(once) == 1 and regular and (repeats == 1 or steps[1] >= steps[0]):
        piece = once[0]
        step = (steps[1] - steps[0]) * bd.iteration_stride if repeats > 1 else 0
        return [
            Piece(
                arg,
                piece.offset + steps[0] * bd.iteration_stride,
                (repeats, *piece.shape),
                (step, *piece.strides),
            )
        ]
    return [
        replace(piece, offset=piece.offset + step * bd.iteration_stride)
        for step in steps
        for piece in once
    ]


def words_view(piece: Piece, memory: NDArray[np.uint8], base_bytes: int) -> NDArray[np.uint16]:
    """A bf16 view of the piece in a memory side: shape [*piece.shape, 2], nothing copied."""
    over: NDArray[np.uint16] = np.ndarray(
        (*piece.shape, 2),
        np.uint16,
        memory,
        base_bytes + piece.offset * WORD_BYTES,
        (*(s * WORD_BYTES for s in piece.strides), 2),
    )
    return over
