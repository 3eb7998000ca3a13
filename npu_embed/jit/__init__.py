"""Element-wise kernels compiled by numba, once a process has work enough to pay for loading them.

numpy makes a pass over memory for each operation of a norm, a softmax or a GELU; a compiled loop
makes one. But numba takes half a second to import, and some seconds to compile on a machine's
first use (its cache keeps the result), so a thread loads it after WARM_ROWS rows, and callers use
their numpy versions until `kernels` is there, or for ever where numba is not installed.

Both give the same bits: the compiled loops do the same float32 operations in the same order (no
contraction, no reassociation; see `lanes`), and exp, which numpy computes fast and in its own way,
is left to it in both. So no vector depends on when loading ended. The emulated array's code is not
numba's: emulator.llvm.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
from typing import Any

from .. import settings

log = logging.getLogger("npu_embed")

WARM_ROWS = 2048  # tokens: about as long in numpy as loading takes from the cache

# The module of loaded kernels, or None: use numpy. Any: numba's functions have no types.
kernels: Any = None


class _Loader:
    """Loads the kernels at most once in a process, in a thread."""

    def __init__(self) -> None:
        self.rows = 0
        self.stopping = False
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start loading, unless that was done before or is not wanted."""
        with self._lock:
            if self._started:
                return
            self._started = True
            if settings.compiled() != "off":
                self.thread = threading.Thread(target=self._load, name="npu_embed-jit", daemon=True)
                self.thread.start()

    def _load(self) -> None:
        global kernels
        try:
            # Numba is an extra, and slow to import.
            compiled = importlib.import_module(".compiled", __name__)
            if compiled.compile_all(lambda: self.stopping):
                kernels = compiled
        except ImportError as error:
            # numpy computes the same, only slower: whoever wants it faster finds it in the README.
            log.debug("no compiled kernels: %s", error)
        except Exception:
            log.warning("numba cannot compile here; computing with numpy", exc_info=True)

    def after_fork(self) -> None:
        """In a child: the lock is the parent's, as are modules' locks of a thread in mid-import."""
        self._lock = threading.Lock()
        if kernels is None:
            self.thread = None

    def stop(self) -> None:
        """Wait for the kernel being compiled: LLVM must not run while the process is taken down."""
        self.stopping = True
        if self.thread is not None:
            self.thread.join()


_loader = _Loader()


def note_rows(rows: int) -> None:
    """Count rows that are about to be computed; from WARM_ROWS on the kernels are wanted."""
    if kernels is None:
        _loader.rows += rows
        if _loader.rows >= WARM_ROWS:
            _loader.start()


def load() -> bool:
    """Load the kernels now and wait for them; whether there are any."""
    _loader.start()
    if _loader.thread is not None:
        _loader.thread.join()
    return kernels is not None


atexit.register(lambda: _loader.stop())
os.register_at_fork(after_in_child=lambda: _loader.after_fork())
