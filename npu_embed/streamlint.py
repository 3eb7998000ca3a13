"""What is wrong with one instruction stream, by itself and for the views its run is given.

A lint: it says more than is needed to refuse a stream, and nothing where a stream does what is not
understood here (memory tiles' channels, registers that send tokens by other ways).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from . import streamcheck
from .emulator import txn

NOT_EXECUTED = (txn.LoadPdi, txn.Other)  # by the emulated array, though they decode

_QUEUES = {0x1D204: (0, 0), 0x1D20C: (0, 1), 0x1D214: (1, 0), 0x1D21C: (1, 1)}
_DIRECTIONS = ("S2MM", "MM2S")
_TOKEN = 1 << 31

_Channel = tuple[int, int, int]  # column, direction as a token numbers it, channel


def problems(
    stream: txn.Stream, views: Mapping[str, int], *, array_programs: bool
) -> Iterator[str]:
    """What is wrong with a stream, a sentence each.

    views: the buffer arguments from bo0 on, name -> words of its view; array_programs: the emulated
    array is to run it, which executes fewer operations than there are.
    """
    if array_programs:
        yield from _operations(stream)
    yield from _arguments(stream, views)
    yield from _extents(stream, views)
    yield from _tokens(stream)


def _operations(stream: txn.Stream) -> Iterator[str]:
    """Operations that decode and that the emulated array does not execute."""
    for index, op in enumerate(stream.ops):
        if isinstance(op, NOT_EXECUTED):
            name = op.name if isinstance(op, txn.Other) else "LOADPDI"
            yield f"op {index} at word {op.word} is {name}, which the emulated array cannot execute"


def _arguments(stream: txn.Stream, views: Mapping[str, int]) -> Iterator[str]:
    for index, op in enumerate(stream.ops):
        if isinstance(op, txn.DdrPatch) and op.arg_index >= len(views):
            yield (
                f"op {index} at word {op.word} patches in buffer {op.arg_index}, the kernel has "
                f"{len(views)} ({', '.join(views)})"
            )


def _extents(stream: txn.Stream, views: Mapping[str, int]) -> Iterator[str]:
    """Arguments that a descriptor leaves, each said once with the furthest word."""
    ends: dict[int, int] = {}
    for move in streamcheck.moves(stream) or ():
        ends[move.arg] = max(ends.get(move.arg, 0), move.end)
    for arg, (name, words) in enumerate(views.items()):
        if ends.get(arg, 0) > words:
            yield f"moves {ends[arg]} words of {name} (buffer {arg}), its view has {words}"


def _tokens(stream: txn.Stream) -> Iterator[str]:
    """Tokens awaited that nothing before has sent, and sent ones that nothing after awaits."""
    sent: Counter[_Channel] = Counter()
    silent: set[_Channel] = set()  # whose last push sends none
    for index, op in enumerate(stream.ops):
        if isinstance(op, txn.Write) and (pushed := _queue(op)) is not None:
            sends = bool(op.value & _TOKEN)
            sent[pushed] += sends
            silent = silent - {pushed} if sends else silent | {pushed}
        for channel in _awaited(op):
            if sent[channel]:
                sent[channel] -= 1
            else:
                yield (
                    f"op {index} at word {op.word} waits for a token of {_name(channel)} that "
                    "nothing before it sends"
                )
    for channel, count in sorted(sent.items()):
        if count:
            yield f"{count} tokens of {_name(channel)} are sent and never awaited"
    for channel in sorted(silent):
        if channel[1] == 0:
            yield f"the last push of {_name(channel)} sends no token: nothing waits for its results"


def _queue(op: txn.Write) -> _Channel | None:
    """The shim channel whose task queue is written to."""
    col, row, offset = txn.split_address(op.address)
    return (col, *_QUEUES[offset]) if row == 0 and offset in _QUEUES else None


def _awaited(op: txn.Op) -> Iterator[_Channel]:
    """The shim channels that an operation waits for a token of."""
    if isinstance(op, txn.Sync) and op.row == 0:
        for col in range(op.col, op.col + max(1, op.ncol)):
            yield col, op.direction & 1, op.channel


def _name(channel: _Channel) -> str:
    col, direction, number = channel
    return f"{_DIRECTIONS[direction]}{number} of column {col}"
