"""Who listens to this process: what NPU_EMBED_DEBUG, NPU_EMBED_TRACE and --trace ask for."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import events, settings
from .chrometrace import ChromeTrace
from .debuglines import DebugLines
from .errors import InputError

log = logging.getLogger("npu_embed")


@dataclass(slots=True)
class _Started:
    """What was started for the settings; of one process, since a forked child has a trace anew."""

    process: int = 0
    debug: int = 0
    file: Path | None = None
    lines: DebugLines | None = None
    trace: ChromeTrace | None = None


_started = _Started()
_lock = threading.Lock()


def start_from_settings() -> None:
    """Listen as the settings say; called again, as they say now.

    Raises:
        SettingError: a value that is not accepted.
    """
    debug, file = settings.debug(), settings.trace_file()
    with _lock:
        if _started.debug != debug:
            if _started.lines is not None:
                events.remove(_started.lines)
            _started.lines = DebugLines(debug) if debug else None
            if _started.lines is not None:
                events.add(_started.lines)
            _started.debug = debug
        if _started.file != file or (file and _started.process != os.getpid()):
            if _started.trace is not None:
                _write(_started.trace)
                events.remove(_started.trace)
            _started.trace = ChromeTrace(file) if file is not None else None
            if _started.trace is not None:
                events.add(_started.trace)
            _started.file, _started.process = file, os.getpid()


def write_trace() -> None:
    """Write the trace that NPU_EMBED_TRACE asks for, as far as it goes now; at exit once more."""
    if _started.trace is not None:
        _write(_started.trace)


atexit.register(write_trace)


def _write(trace: ChromeTrace) -> None:
    try:
        trace.write()
    except OSError as error:  # what was computed is more than its trace
        log.warning("NPU_EMBED_TRACE=%s: not written (%s)", trace.path, error.strerror)


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Write a trace of the block to a file, also where it raises; None writes nothing.

    Raises:
        InputError: there is no such folder.
        OSError: the file cannot be written.
    """
    if path is None:
        yield
        return
    path = path.absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"--trace {path}: no file can be made there, wanted one in a folder that exists."
        )
    trace = ChromeTrace(path)
    try:
        with events.listening(trace):
            yield
    finally:
        trace.write()
