"""ChromeTrace: what the engine does as a Chrome JSON trace, for Perfetto or chrome://tracing.

Three processes: the host's threads with their stages; the NPU with a thread a context; packs, two
of which run in step. Counters: tokens, runs, switches, swaps.

Source: "Trace Event Format", the JSON that Perfetto still imports.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from . import events

log = logging.getLogger("npu_embed")

MAX_RECORDS = 200_000  # some 30 MB in memory, and 22 in the file; more with long lists

HOST, NPU, PACKS = 1, 2, 3
SERIES = "total"  # of a counter; Perfetto shows `runs total`

Args: TypeAlias = dict[str, Any]


class ChromeTrace:
    """A listener that keeps what it is told and writes it to a file.

    Past max_records nothing more is kept; how much that was stands in the file and is said once.
    """

    def __init__(self, path: Path, max_records: int = MAX_RECORDS) -> None:
        self.path = path
        self.dropped = 0
        self._max_records = max_records
        self._process = os.getpid()
        self._start = perf_counter()
        self._lock = threading.RLock()  # an event may come from a signal handler
        self._records: list[str] = []  # as JSON: a tenth of the memory of dicts
        self._tracks: dict[tuple[int, str], int] = {}
        self._counts = dict.fromkeys(("tokens", "runs", "switches", "swaps"), 0)
        for process, name in ((HOST, "host"), (NPU, "NPU"), (PACKS, "packs")):
            self._keep("M", "process_name", process, 0, 0.0, {"name": name})

    def note(self, event: events.Event) -> None:
        """Keep it."""
        with self._lock:
            self._note(event)

    def _note(self, event: events.Event) -> None:
        thread = self._track(HOST, threading.current_thread().name)
        if isinstance(event, events.StageEnded):
            waits = {"waits": event.waits}
            self._slice(event.stage, HOST, thread, event.begin, event.end, waits)
        elif isinstance(event, events.RunsEnded):
            self._runs(event)
        elif isinstance(event, events.PacksEnded):
            self._packs(event)
        elif isinstance(event, events.ContextMade):
            self._slice(f"context {event.context}", HOST, thread, event.begin, event.end, {})
        elif isinstance(event, events.StreamLoaded):
            loaded = {"context": event.context, "words": len(event.stream) // 4}
            self._slice(f"load {event.kernel}", HOST, thread, event.begin, event.end, loaded)
        elif isinstance(event, events.WordsPatched):
            patched = {
                "context": event.context,
                "words": {str(i): v for i, v in event.words.items()},
            }
            self._instant(f"patch {event.kernel}", HOST, thread, event.at, patched)
        elif isinstance(event, events.ContextDropped):
            name = "swap" if event.why == "swap" else f"dropped ({event.why})"
            self._instant(name, NPU, self._track(NPU, event.context), event.at, {})
            if event.why == "swap":
                self._count(event.at, swaps=1)
        else:
            of = {"family": event.family, "device": event.device, "name": event.device_name}
            self._instant(f"open {event.bundle}", HOST, thread, perf_counter(), of)

    def _runs(self, event: events.RunsEnded) -> None:
        track = self._track(NPU, event.context)
        kernels = list(dict.fromkeys(run.kernel for run in event.runs))
        name = (
            kernels[0] if not event.listed else f"list of {len(event.runs)}: {', '.join(kernels)}"
        )
        args: Args = {
            "runs": [[run.kernel, run.rows, run.padded_rows] for run in event.runs],
            "rows": sum(run.rows for run in event.runs),
            "padded_rows": sum(run.padded_rows for run in event.runs),
            "list": event.listed,
            "switch": event.switched,
            "swap": event.swapped,
            "failed": event.failed,
        }
        if event.switched:
            self._instant("switch", NPU, track, event.begin, {})
        self._slice(name, NPU, track, event.begin, event.end, args)
        self._count(event.end, runs=len(event.runs), switches=int(event.switched))

    def _packs(self, event: events.PacksEnded) -> None:
        for slot, pack in enumerate(event.packs):
            rows = sum(pack.tokens)
            args = {"texts": pack.texts, "tokens": pack.tokens, "rows": rows}
            name = f"pack of {len(pack.texts)} texts"
            track = self._track(PACKS, f"slot {slot}")
            self._slice(name, PACKS, track, event.begin, event.end, args)
        self._count(event.end, tokens=sum(sum(pack.tokens) for pack in event.packs))

    def _track(self, process: int, name: str) -> int:
        """The thread of that name, numbered from 1 in its process."""
        key = process, name
        if key not in self._tracks:
            self._tracks[key] = 1 + sum(p == process for p, _ in self._tracks)
            self._keep("M", "thread_name", process, self._tracks[key], 0.0, {"name": name})
        return self._tracks[key]

    def _slice(
        self, name: str, process: int, track: int, begin: float, end: float, args: Args
    ) -> None:
        begin = max(begin, self._start)  # of what was under way when the trace began, the rest
        self._keep("X", name, process, track, begin, args, dur=_us(end - begin))

    def _instant(self, name: str, process: int, track: int, at: float, args: Args) -> None:
        self._keep("i", name, process, track, at, args, s="t")

    def _count(self, at: float, **more: int) -> None:
        for name, by in more.items():
            if by:
                self._counts[name] += by
                self._keep("C", name, NPU, 0, at, {SERIES: self._counts[name]})

    def _keep(
        self, kind: str, name: str, process: int, track: int, at: float, args: Args, **more: object
    ) -> None:
        # The tracks' names are few, and without them the rest cannot be read.
        if len(self._records) >= self._max_records and kind != "M":
            if not self.dropped:
                log.warning(
                    "%s: the trace is full with %d events; what follows is left out",
                    self.path,
                    self._max_records,
                )
            self.dropped += 1
            return
        at = 0.0 if kind == "M" else max(0.0, _us(at - self._start))
        record = {"ph": kind, "name": name, "pid": process, "tid": track, "ts": at, **more}
        self._records.append(json.dumps({**record, "args": args}, separators=(",", ":")))

    def write(self) -> None:
        """Write what there is so far: whole, or not at all. A forked child writes nothing.

        Raises:
            OSError: it cannot be written; a file that was there is left as it was.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            records, dropped = list(self._records), self.dropped
        handle, name = tempfile.mkstemp(".part", f".{self.path.name}.", self.path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write('{"traceEvents":[\n')
                file.write(",\n".join(records))
                file.write(f'\n],"displayTimeUnit":"ms","otherData":{{"dropped":{dropped}}}}}\n')
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _umask() -> int:
    """The process's, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
