"""What is loaded into one hardware context: kernels, patched copies of streams, and runlists.

Runs of a list go off as one, so a stream cannot be patched between them: each number of valid keys
has a copy of its bucket's stream with its own words. The copies are a bounded pool, and what is in
the pool is patched once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from .device import Context, Kernel
from .flights import Flight, together
from .runlists import Launch, RunList

Words = tuple[int, int]  # valid keys, window

MAX_COPIES = 512  # patched copies in a context: 16 MiB of the 64 MiB that every driver's heap has
MAX_LISTS = 64  # kept, to be started again


class LoadedContext:
    """A context, and all that must be released before it is."""

    def __init__(self, context: Context, *, max_copies: int = MAX_COPIES) -> None:
        self.max_copies = max_copies
        self.released = 0  # kernels, so far
        self._context = context
        self._plain: dict[str, Kernel] = {}
        self._copies: OrderedDict[tuple[str, Words], Kernel] = OrderedDict()
        self._lists: OrderedDict[tuple[tuple[int, ...], ...], RunList] = OrderedDict()
        self._flights: list[Flight] = []

    def names(self) -> list[str]:
        """The loaded kernels, a name for all copies of a stream."""
        return sorted({*self._plain, *(name for name, _ in self._copies)})

    def plain(self, name: str, stream: bytes) -> Kernel:
        """The kernel of a stream as it was compiled, loaded if need be."""
        if name not in self._plain:
            self._plain[name] = self._context.load(name, stream)
        return self._plain[name]

    def copy(self, name: str, words: Words, stream: bytes, patch: Mapping[int, int]) -> Kernel:
        """The copy of a stream that holds `words`, loaded and patched if need be.

        At most max_copies may be asked for between two submits.
        """
        key = (name, words)
        if key in self._copies:
            self._copies.move_to_end(key)
            return self._copies[key]
        if len(self._copies) >= self.max_copies:
            self.settle()
            self._release_kernel(self._copies.popitem(last=False)[1])
        kernel = self._context.load(name, stream)
        try:
            kernel.patch(patch)
        except BaseException:
            kernel.release()  # nobody knows what its stream holds
            raise
        self._copies[key] = kernel
        return kernel

    def submit(self, launches: Sequence[Launch], *, as_list: bool) -> Flight:
        """Start runs in this order, as one runlist or one by one."""
        self._flights = [flight for flight in self._flights if not flight.landed]
        flights: list[Flight] = []
        try:
            if as_list:
                flights.append(self._list(launches).start())
            else:
                for kernel, views in launches:
                    flights.append(kernel.start(views))
        finally:  # also where a later one could not be started
            self._flights += flights
        return together(flights)

    def _list(self, launches: Sequence[Launch]) -> RunList:
        key = tuple((id(kernel), *(view.id for view in views)) for kernel, views in launches)
        found = self._lists.get(key)
        if found is not None and not found.busy:
            self._lists.move_to_end(key)
            return found
        if len(self._lists) >= MAX_LISTS:
            self.settle()
            self._lists.popitem(last=False)[1].release()
        made = self._lists[key] = self._context.runlist(launches)
        return made

    def unload(self, name: str) -> bool:
        """Release a kernel and the copies of its stream; whether there was one."""
        if name not in self.names():
            return False
        self.settle()
        if name in self._plain:
            self._release_kernel(self._plain.pop(name))
        for key in [key for key in self._copies if key[0] == name]:
            self._release_kernel(self._copies.pop(key))
        return True

    def _release_kernel(self, kernel: Kernel) -> None:
        self.released += 1
        for key in [key for key, made in self._lists.items() if kernel in made.kernels]:
            self._lists.pop(key).release()
        kernel.release()

    def settle(self) -> None:
        """Wait for everything in flight; errors are kept for those who wait for it."""
        for flight in self._flights:
            flight.settle()
        self._flights.clear()
        for made in self._lists.values():
            made.settle()
        for kernel in (*self._plain.values(), *self._copies.values()):
            kernel.settle()

    def release(self) -> None:
        """Free lists, runs and instruction buffers, kernels, then the context."""
        self.settle()
        for made in self._lists.values():
            made.release()
        self._lists.clear()
        for kernel in (*self._plain.values(), *self._copies.values()):
            kernel.release()
        self._plain.clear()
        self._copies.clear()
        self._context.release()
