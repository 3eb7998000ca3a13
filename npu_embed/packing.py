"""Packing: which texts share a forward, and where each begins in its row buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from . import events
from .errors import InputError, InputTypeError


@dataclass(frozen=True, slots=True)
class Pack:
    """Texts that share a forward: their indices, and the row each begins at; rows in all.

    Starts ascend. Texts stand one after another without padding.
    """

    indices: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int


def checked_rows(pack_rows: int | None, longest: int, most: int) -> int:
    """The rows of a pack: pack_rows, from the longest text's on; None is the most there can be.

    Raises:
        InputError, InputTypeError: it is no integer, or out of that range.
    """
    if pack_rows is None:
        return most
    if isinstance(pack_rows, bool) or not isinstance(pack_rows, int):
        raise InputTypeError(f"pack_rows={pack_rows!r}: wanted an integer.")
    if not longest <= pack_rows <= most:
        raise InputError(f"pack_rows={pack_rows}: wanted {longest} (the longest text) to {most}.")
    return pack_rows


@contextmanager
def noted(group: Sequence[Pack], first: int) -> Iterator[None]:
    """Tell who listens of packs that run in step in the block; `first` is the index of text 0."""
    begin = perf_counter()
    try:
        yield
    finally:
        if events.listeners:
            seen = [events.PackSeen(tuple(first + i for i in p.indices), p.lengths) for p in group]
            events.note(events.PacksEnded(tuple(seen), begin, perf_counter()))


def make_packs(lengths: Sequence[int], max_rows: int) -> list[Pack]:
    """Packs of at most max_rows rows that hold every text once, texts of like length together.

    lengths: rows of each text, 1 to max_rows. Sorted by length (then by index, so that the same
    call makes the same packs), longest first: the short ones fill what is left.

    Raises:
        ValueError: a text has no rows, or more than a pack holds.
    """
    for index, rows in enumerate(lengths):
        if not 1 <= rows <= max_rows:
            raise ValueError(f"texts[{index}]: {rows} rows, a pack holds 1 to {max_rows}")
    packs: list[Pack] = []
    current: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if used + lengths[index] > max_rows:
            packs.append(_pack(current, lengths))
            current, used = [], 0
        current.append(index)
        used += lengths[index]
    if current:
        packs.append(_pack(current, lengths))
    return packs


def _pack(indices: Sequence[int], lengths: Sequence[int]) -> Pack:
    starts = []
    row = 0
    for index in indices:
        starts.append(row)
        row += lengths[index]
    return Pack(tuple(indices), tuple(starts), tuple(lengths[i] for i in indices), row)
