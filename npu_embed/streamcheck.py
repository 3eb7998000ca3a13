"""What an instruction stream moves between memory and the array, for checks before it runs.

Only streams that say it plainly are understood: shim descriptors written whole, an argument's
address patched in, pushes of single descriptors. Of any other, nothing is known and nothing said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .emulator import txn
from .specs import GemmSpec

B, C = 1, 2  # arguments of a GEMM
WORD_BYTES = 4
WORD_ELEMS = 2

_BD_BASE, _BD_BYTES, _BD_WORDS, _BD_COUNT = 0x1D000, 0x20, 8, 16
_BD_END = _BD_BASE + _BD_BYTES * _BD_COUNT
_OUT_QUEUES = frozenset({0x1D204, 0x1D20C})  # S2MM: out of the array
_IN_QUEUES = frozenset({0x1D214, 0x1D21C})  # MM2S


class _NotUnderstood(Exception):
    """The stream does more than is known here."""


@dataclass(frozen=True, slots=True)
class Move:
    """A push: `words` words into the array or out of it, all before word `end` of an argument."""

    arg: int
    out: bool
    words: int
    end: int


@dataclass(slots=True)
class _Descriptor:
    """A shim descriptor as written: its words, and the argument and byte offset patched in."""

    words: tuple[int, ...]
    patch: tuple[int, int] | None = None
    pushed: bool = False


@dataclass(slots=True)
class _Shim:
    """The descriptors of the shim, by their address."""

    descriptors: dict[int, _Descriptor] = field(default_factory=dict)

    def write(self, op: txn.Write | txn.BlockWrite | txn.MaskWrite) -> None:
        """Note descriptors written whole; a part of one, or more than them, is not understood."""
        col, _, offset = txn.split_address(op.address)
        if isinstance(op, txn.BlockWrite):
            self.descriptors.update(_written(col, offset, op.data))
        elif _BD_BASE <= offset < _BD_END:
            raise _NotUnderstood

    def patch(self, op: txn.DdrPatch) -> None:
        """Note the argument of a descriptor."""
        bd = self.descriptors.get(op.address - WORD_BYTES)
        if bd is None:
            raise _NotUnderstood
        bd.patch = op.arg_index, op.arg_plus

    def push(self, queue: int, word: int) -> Move:
        """What a word written to a task queue moves."""
        col, _, offset = txn.split_address(queue)
        bd = self.descriptors.get(txn.address(col, 0, _BD_BASE + _BD_BYTES * (word & 0xF)))
        if bd is None or bd.patch is None:
            raise _NotUnderstood
        w0, _, _, w3, w4, w5, w6, w7 = bd.words
        repeats, iterations = (word >> 16 & 0xFF) + 1, (w6 >> 20 & 0x3F) + 1
        chained, current = w7 >> 26 & 1, w6 >> 26 & 0x3F
        if w0 == 0 or chained or current or (bd.pushed and iterations > 1):
            raise _NotUnderstood
        bd.pushed = True
        last = 0  # the last word's distance from the first
        left, sizes = w0, (w3 >> 20 & 0x3FF, w4 >> 20 & 0x3FF, 0)
        for size, stride in zip(sizes, (w3, w4, w5), strict=True):
            count = size or left
            if left % count:
                raise _NotUnderstood
            left //= count
            last += (count - 1) * ((stride & 0xFFFFF) + 1)
        last += (min(repeats, iterations) - 1) * ((w6 & 0xFFFFF) + 1)
        arg, plus = bd.patch
        end = plus // WORD_BYTES + last + 1
        return Move(arg, offset in _OUT_QUEUES, w0 * repeats, end)


def moves(stream: txn.Stream) -> tuple[Move, ...] | None:
    """Every push of a stream, in order; None where it does more than is understood here."""
    try:
        return tuple(_moves(stream))
    except _NotUnderstood:
        return None


def find_problem(gemm: GemmSpec, file: str, stream: txn.Stream, *, exact: bool) -> str | None:
    """What is wrong with how much a GEMM's stream writes, for a person; None where nothing is.

    exact: the record says how many columns are results. Where it does not, half of N may be left
    of pairs, and the stream must write at least that.
    """
    found = words_out(stream)
    if found is None:
        return None
    told = gemm.stream_of(file)
    columns = gemm.n_out if exact else min(gemm.n_out, gemm.N // 2)
    wanted = told.rows * columns // WORD_ELEMS
    if found == wanted or (found > wanted and not exact):
        return None
    least = "" if exact else "at least "
    return (
        f"{file}: writes {found} words of C, wanted {least}{wanted} for {told.rows} rows "
        f"of {columns} columns (manifest.txt:{told.line}, gemm {gemm.key}); "
        "re-export the bundle."
    )


def words_out(stream: txn.Stream) -> int | None:
    """How many words a GEMM's stream writes to C; None where that is not understood."""
    known = moves(stream)
    return None if known is None else sum(m.words for m in known if m.out and m.arg == C)


def packed_bytes(stream: txn.Stream) -> int | None:
    """How many bytes of packed B a GEMM's stream reads; None where that is not understood."""
    ends = [m.end for m in moves(stream) or () if m.arg == B and not m.out]
    return max(ends) * WORD_BYTES if ends else None


def _moves(stream: txn.Stream) -> Iterator[Move]:
    shim, memtiles = _Shim(), stream.header.num_memtile_rows
    for op in stream.ops:
        if isinstance(op, txn.Write | txn.BlockWrite | txn.MaskWrite):
            _, row, offset = txn.split_address(op.address)
            if 1 <= row <= memtiles:
                raise _NotUnderstood
            if row == 0 and isinstance(op, txn.Write) and offset in _OUT_QUEUES | _IN_QUEUES:
                yield shim.push(op.address, op.value)
            elif row == 0:
                shim.write(op)
        elif isinstance(op, txn.DdrPatch):
            shim.patch(op)
        elif not isinstance(op, txn.Sync | txn.MaskPoll | txn.Noop | txn.Preempt):
            raise _NotUnderstood


def _written(col: int, offset: int, data: Sequence[int]) -> Mapping[int, _Descriptor]:
    """The descriptors that words written to the shim from `offset` on are, by address."""
    start, count = offset - _BD_BASE, len(data) // _BD_WORDS
    if start < 0 or start % _BD_BYTES or len(data) % _BD_WORDS or not count:
        raise _NotUnderstood
    if offset + _BD_BYTES * count > _BD_END:
        raise _NotUnderstood
    return {
        txn.address(col, 0, offset + _BD_BYTES * i): _Descriptor(
            tuple(data[_BD_WORDS * i : _BD_WORDS * (i + 1)])
        )
        for i in range(count)
    }
