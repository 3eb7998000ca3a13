"""Attentions that follow each other, computed at once where that gives the same."""

from __future__ import annotations

from collections.abc import Sequence

from .. import cores
from ..cores import Job
from .flows import Arguments
from .mha_call import MhaCall, Span


def compute_list(calls: Sequence[tuple[MhaCall, Arguments]]) -> None:
    """Do attentions as if one after another, all at once where that gives the same."""
    written = _rows_written(calls)
    if written is None:
        for call, args in calls:
            call(args)
        return
    jobs: list[Job] = []
    microseconds = 0.0
    for (call, args), (first, _), visible in zip(
        calls, written, visible_spans(written), strict=True
    ):
        jobs += call.jobs(args, [(start - first, stop - first) for start, stop in visible])
        microseconds += call.microseconds(sum(stop - start for start, stop in visible))
    cores.run(jobs, microseconds, blas=any(call.uses_blas for call, _ in calls))
    for call, args in calls:
        call.wrote(args)


def _rows_written(calls: Sequence[tuple[MhaCall, Arguments]]) -> list[Span] | None:
    """The rows of one buffer that each call writes, ascending; None where they are not such.

    Or where a call reads what another writes.
    """
    spans: list[Span] = []
    places, written, read = set(), set(), set()
    for call, args in calls:
        o = call.output
        if o is None or not call.in_place(args):
            return None
        heads = o.heads(args)
        if not heads.row_stride:
            return None
        row, column = divmod(heads.first, heads.row_stride)
        places.add((column, heads.head_stride, heads.row_stride, o.shape[0], o.shape[2]))
        written.add(id(args[o.arg].memory))
        read |= {id(args[arg].memory) for arg in call.read}
        if spans and row < spans[-1][0]:
            return None
        spans.append((row, row + call.rows))
    ((_, head_stride, row_stride, heads_count, _),) = places if len(places) == 1 else [(0,) * 5]
    # Heads side by side in a row: no row holds a part of another one.
    apart = 0 < head_stride * heads_count <= row_stride
    return spans if apart and len(written) == 1 and not written & read else None


def visible_spans(written: Sequence[Span]) -> list[list[Span]]:
    """What nobody writes again later of the spans that are written in this order; they ascend.

    A bucket's rows past its text are written over by the next text's run: nobody ever sees them, so
    they need not be computed.
    """
    spans: list[list[Span]] = []
    covered: list[Span] = []  # by what comes later; ascending and apart
    for first, end in reversed(written):
        own: list[Span] = []
        at = first
        for start, stop in covered:
            if start >= end:
                break
            if start > at:
                own.append((at, start))
            at = max(at, stop)
        if at < end:
            own.append((at, end))
        spans.append(own)
        while covered and covered[0][0] <= end:
            end = max(end, covered.pop(0)[1])
        covered.insert(0, (first, end))
    return spans[::-1]
