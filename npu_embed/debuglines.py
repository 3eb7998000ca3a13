"""NPU_EMBED_DEBUG: what the engine does, a line of key=value pairs each, on stderr.

| level | lines |
|---|---|
| 1 | open, context, load: what is opened and loaded |
| 2 | run: one a kernel execution |
| 3 | drop, patch: contexts released, words written into streams |
| 4 | op: every op of a stream that is loaded |

Each level says what the lower ones do. docs/tracing.md has the keys of each line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import TypeAlias

from . import events
from .emulator import txn

OPENS, RUNS, DROPS, OPS = 1, 2, 3, 4

Pairs: TypeAlias = dict[str, str | int]


class _Stderr(logging.Handler):
    """Writes a record's message as a line to whatever stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.write(record.getMessage() + "\n")
        except Exception:
            self.handleError(record)


def logger() -> logging.Logger:
    """The logger of these lines, which go to stderr and to no handler of another logger."""
    found = logging.getLogger("npu_embed.debug")
    if not found.handlers:
        found.addHandler(_Stderr())
        found.setLevel(logging.DEBUG)
        found.propagate = False
    return found


class DebugLines:
    """A listener that logs a line an event, up to a level of the ladder."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._log = logger()
        self._start = perf_counter()

    def note(self, event: events.Event) -> None:
        """Log what the level says of it."""
        for name, at, pairs in _lines(event, self.level):
            shown = {"event": name, "t": f"{at - self._start:.6f}", **pairs}
            self._log.debug("%s", " ".join(f"{key}={_quoted(v)}" for key, v in shown.items()))


def _quoted(value: str | int) -> str:
    """The value without white space or control characters, in quotes where it had any."""
    text = str(value)
    if text and all(c.isprintable() and c not in ' "' for c in text):
        return text
    shown = "".join(c if c.isprintable() and c != '"' else "?" for c in text)
    return f'"{shown}"'


def _lines(event: events.Event, level: int) -> Iterator[tuple[str, float, Pairs]]:
    """(event's name, when, its pairs) of every line."""
    if isinstance(event, events.RunsEnded):
        if level >= RUNS:
            for pairs in _runs(event):
                yield "run", event.end, pairs
    elif isinstance(event, events.Opened):
        opened: Pairs = {"bundle": event.bundle, "family": event.family, "device": event.device}
        yield "open", perf_counter(), {**opened, "name": event.device_name}
    elif isinstance(event, events.ContextMade):
        yield "context", event.end, {"context": event.context, "us": _us(event)}
    elif isinstance(event, events.StreamLoaded):
        yield from _load(event, level)
    elif level >= DROPS and isinstance(event, events.ContextDropped):
        yield "drop", event.at, {"context": event.context, "why": event.why}
    elif level >= DROPS and isinstance(event, events.WordsPatched):
        words = ",".join(f"{index}:{value}" for index, value in sorted(event.words.items()))
        yield "patch", event.at, {"kernel": event.kernel, "context": event.context, "words": words}


def _load(event: events.StreamLoaded, level: int) -> Iterator[tuple[str, float, Pairs]]:
    of: Pairs = {"kernel": event.kernel, "context": event.context}
    yield "load", event.end, {**of, "words": len(event.stream) // 4, "us": _us(event)}
    if level >= OPS:
        for op in txn.disassemble(txn.decode(event.stream)):
            word, text = op.split(maxsplit=1)
            yield "op", event.end, {**of, "word": word, "op": " ".join(text.split())}


def _runs(event: events.RunsEnded) -> Iterator[Pairs]:
    """A run each. Those of a list were not timed one by one: they have the list's time."""
    timed = "list_us" if event.listed else "us"
    for number, run in enumerate(event.runs, start=1):
        first = number == 1
        yield {
            "kernel": run.kernel,
            "context": event.context,
            "rows": run.rows,
            "padded_rows": run.padded_rows,
            timed: _us(event),
            "list": f"{number}/{len(event.runs)}" if event.listed else "no",
            "switch": int(event.switched and first),
            "swap": int(event.swapped and first),
            "failed": int(event.failed),
        }


def _us(event: events.RunsEnded | events.ContextMade | events.StreamLoaded) -> int:
    return round(1e6 * (event.end - event.begin))
