"""The cores of this machine: jobs over rows that threads take in turn, one BLAS thread in each.

BLAS' own threads split one product after another and wait for each other in a spin in between:
slower than threads with a product each, and on a busy machine many times so. numpy and compiled
kernels let other threads run while they compute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Scratch:
    """Float32 work arrays, kept and grown: fresh pages cost more than arithmetic on them."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.float32]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A C-contiguous float32 array with any content; valid until `name` is next taken."""
        size = prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, dtype=np.float32)
        return array[:size].reshape(shape)


Job = Callable[[Scratch], None]

LEAST_MICROSECONDS = 120  # of work for a thread: as long as waking one may take


class _Blas:
    """The BLAS that numpy uses, held at one thread while jobs compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1
        self._libraries: list[Any] | None = None

    def _found(self) -> list[Any]:
        if self._libraries is None:
            from threadpoolctl import ThreadpoolController  # a few ms, on the first run only

            found = ThreadpoolController().select(user_api="blas").lib_controllers
            # Other packages bring their own BLAS, whose threads are none of our business.
            numpys = [lib for lib in found if "numpy" in (lib.filepath or "")]
            self._libraries = numpys or (found if len(found) == 1 else [])
        return self._libraries

    def _threads(self) -> int:
        return max((lib.num_threads for lib in self._found()), default=1)

    def threads(self) -> int:
        """How many threads the user lets it have; 1 where that cannot be told."""
        with self._lock:
            return self._before if self._users else self._threads()

    @contextmanager
    def single(self) -> Iterator[None]:
        """Hold it at one thread; what was set before is set again after the last user."""
        with self._lock:
            if self._users == 0:
                self._before = self._threads()
                self._set(1)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._set(self._before)

    def _set(self, threads: int) -> None:
        if self._before > 1:
            for lib in self._found():
                # threadpoolctl's own takes it from the first thread only, whose limit it holds for
                # a whole; ours begins and ends in whichever thread comes first and last.
                getattr(lib, "_real_set_num_threads", lib.set_num_threads)(threads)

    def before_fork(self) -> None:
        """Let who looks for libraries end: a child would wait for ever for his import's lock."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let them go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The threads that were computing are the parent's."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._set(self._before)


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class _Helper:
    """What another thread does of a caller's jobs, if it begins before the caller is done."""

    def __init__(self, waiting: Iterator[Job]) -> None:
        self._waiting = waiting
        self._begin = threading.Lock()  # taken once: by who begins, or by who wants it no more
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def __call__(self) -> None:
        if self._begin.acquire(blocking=False):
            try:
                _work(self._waiting)
            except BaseException as error:
                self._error = error
            finally:
                self._ended.set()

    def settle(self) -> BaseException | None:
        """Its error once it has ended; one that has not begun never will, and is not waited for."""
        if self._begin.acquire(blocking=False):
            return None
        self._ended.wait()
        error, self._error = self._error, None  # whose traceback has this helper
        return error


class _Threads:
    """The threads that help callers with their jobs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0

    def start(self, count: int, waiting: Iterator[Job]) -> list[_Helper]:
        """So many helpers; fewer where no more threads can be had, none at Python's end."""
        helpers: list[_Helper] = []
        if count < 1:
            return helpers
        with self._lock:
            if self._pool is None or self._size < count:
                self._pool = ThreadPoolExecutor(count, thread_name_prefix="npu_embed-cores")
                self._size = count
            try:
                for _ in range(count):
                    # Before it is submitted: where its thread cannot start it stays in the queue,
                    # and another thread may come to it.
                    helpers.append(_Helper(waiting))
                    self._pool.submit(helpers[-1])
            except RuntimeError:
                pass
            return helpers

    def after_fork(self) -> None:
        """In a child: a fork takes no threads along."""
        self._lock = threading.Lock()
        self._pool = None


def count() -> int:
    """How many jobs run at a time: as many as the user lets numpy's BLAS have threads."""
    return _blas.threads()


def worth(microseconds: float) -> int:
    """How many threads so much work of one core is worth."""
    if microseconds < 2 * LEAST_MICROSECONDS:
        return 1  # asking for the count takes 5 us
    return count() if microseconds == inf else min(count(), int(microseconds // LEAST_MICROSECONDS))


def run(jobs: Sequence[Job], microseconds: float = inf, *, blas: bool = False) -> None:
    """Do all jobs, in any order; each is given work arrays that no other uses meanwhile.

    microseconds: what all of them take one core, about; blas: whether they compute with it.

    Raises:
        MemoryError: or what else a job raises; no other is running then.
    """
    waiting = iter(jobs)
    with _blas.single() if blas else nullcontext():
        helpers = _threads.start(min(len(jobs), worth(microseconds)) - 1, waiting)
        try:
            _work(waiting)
        finally:
            for _ in waiting:  # after an error nobody starts another job
                pass
            errors = [helper.settle() for helper in helpers]
    for error in filter(None, errors):
        try:
            raise error
        finally:
            # Its traceback has this frame: a cycle that would keep the jobs' buffers.
            del error, errors, helpers


def _work(waiting: Iterator[Job]) -> None:
    scratch = _own.scratch
    # Rows past the texts hold whatever was there, NaN included; they are computed as on hardware.
    with np.errstate(all="ignore"):
        for job in waiting:
            job(scratch)


def one_blas_thread() -> AbstractContextManager[None]:
    """Hold BLAS at one thread; for a job that may use it where run() was not told so."""
    return _blas.single()


_own = _Own()
_blas = _Blas()
_threads = _Threads()
os.register_at_fork(
    before=_blas.before_fork,
    after_in_parent=_blas.after_fork_in_parent,
    after_in_child=_blas.after_fork_in_child,
)
os.register_at_fork(after_in_child=_threads.after_fork)


BLOCK_ROWS = 96  # float32 operands of a block stay in the cache; a multiple of 6: Registers.rows
JOBS_A_CORE = 3  # so that none waits long for the last one
LEAST_ELEMS = 1 << 16  # of rows to go through for another thread

Block = tuple[int, int, int, int]  # rows [start, stop) and columns [start, stop) of a product


def cut_product(rows: int, columns: int, tile: int, microseconds: float) -> list[Block]:
    """Blocks of a product of so many rows and columns for all cores, columns cut at tiles.

    Each core gets several where there are enough, so that none waits long for the last one.
    microseconds: what all of it takes one core, about.
    """
    tops = range(0, rows, BLOCK_ROWS)
    wanted = 1
    if worth(microseconds) > 1:
        wanted = int(min(JOBS_A_CORE * count(), microseconds // LEAST_MICROSECONDS))
    size = -(-columns // (-(-wanted // len(tops)) * tile)) * tile
    return [
        (top, min(top + BLOCK_ROWS, rows), left, min(left + size, columns))
        for top in tops
        for left in range(0, columns, size)
    ]


def run_rows(rows: int, width: int, part: Callable[[int, int], None]) -> None:
    """Call part(start, stop) for all rows, in parts on all cores where there are many."""
    parts = rows * width // LEAST_ELEMS
    if parts > 1:  # asking for the count takes 5 us
        parts = min(count(), parts)
    if parts < 2:
        part(0, rows)
        return
    size = -(-rows // parts)

    def job(start: int) -> Job:
        return lambda scratch: part(start, min(start + size, rows))

    run([job(start) for start in range(0, rows, size)])
