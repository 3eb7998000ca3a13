"""The words an MHA record says to patch, checked against the stream they are patched in."""

from __future__ import annotations

from collections.abc import Sequence

from .emulator import txn
from .specs import MhaSpec

CORE_MEMORY_BYTES = 0x10000

Place = tuple[int, int, int]  # column, row, offset in the core's data memory


class _Problem(Exception):
    """What is wrong with a record's words."""


def find_problem(spec: MhaSpec, stream: txn.Stream, no_window: int) -> str | None:
    """What is wrong with a bucket's kv and window words, for a person; None where nothing is.

    Each must be the value of a WRITE of the stream into a core's data memory, hold the
    bucket's rows or `no_window` as compiled, and there must be one of each kind, at one offset, in
    every core of the columns they name: a core that is left out computes with the old value.
    """
    try:
        kv = _places(stream, "kv", spec.kv_words, spec.rows)
        window = _places(stream, "window", spec.win_words, no_window)
        if {place[:2] for place in kv} != {place[:2] for place in window}:
            raise _Problem("kv and window words are not in the same cores")
        if kv[0][2] == window[0][2]:
            raise _Problem(f"kv and window words are both at data memory +{kv[0][2]:#x}")
    except _Problem as problem:
        return f"manifest.txt:{spec.line}: {problem}; re-export the bundle."
    return None


def _places(stream: txn.Stream, kind: str, words: Sequence[int], compiled: int) -> list[Place]:
    """Where the words of one kind are written."""
    writes = {op.value_word: op for op in stream.ops if isinstance(op, txn.Write)}
    memtiles = stream.header.num_memtile_rows
    places: list[Place] = []
    for word in words:
        op = writes.get(word)
        if op is None:
            raise _Problem(f"{kind} word {word} is no value of a WRITE, wanted one")
        place = txn.split_address(op.address)
        if place[1] <= memtiles or place[2] >= CORE_MEMORY_BYTES:
            raise _Problem(
                f"{kind} word {word} goes to {txn.register_name(op.address)}, wanted core memory"
            )
        if op.value != compiled:
            raise _Problem(f"{kind} word {word} holds {op.value}, wanted {compiled} as compiled")
        places.append(place)
    offsets = sorted({offset for _, _, offset in places})
    if len(offsets) > 1:
        found = ", ".join(f"+{offset:#x}" for offset in offsets)
        raise _Problem(f"{kind} words are at data memory {found}, wanted one offset in all cores")
    columns = {col for col, _, _ in places}
    written = {txn.split_address(op.address) for op in writes.values()}
    wanted = {p for p in written if p[0] in columns and p[1] > memtiles and p[2] == offsets[0]}
    if left_out := sorted(wanted - set(places)):
        col, row, _ = left_out[0]
        raise _Problem(f"no {kind} word for core ({col},{row}), wanted one for each of its column")
    return places
