"""Connection: uvicorn's, which is closed when its client has stopped halfway."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED_S = 30.0
SLOWEST_BYTES_PER_S = 32 << 10  # of an answer that a client takes


class Connection(H11Protocol):
    """A client's connection; one that stands still for STALLED_S, or twice as long, is closed.

    So is one whose client takes its answer more slowly than SLOWEST_BYTES_PER_S. uvicorn by itself
    waits for ever for the end of a request's head, for what is left of a body after its answer, and
    for a client to take its answer. Some hundred such clients would use up the file descriptors of
    the process, or its memory. How long a body may take is the application's to say.
    """

    _timer: asyncio.TimerHandle
    _seen: tuple[object, bool, int] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close the connection if its client was to move since the last look, and hardly did."""
        awaits_head = self.cycle is None or self.cycle.response_complete
        unsent_bytes = self.transport.get_write_buffer_size()
        if self._seen is not None and self._seen[:2] == (self.cycle, awaits_head):
            # Nothing was written since: what is unsent is of the same answer, or of none.
            unsent_then = self._seen[2]
            too_slow = unsent_bytes > unsent_then - SLOWEST_BYTES_PER_S * STALLED_S
            if (unsent_bytes and too_slow) or (awaits_head and not unsent_then):
                self.transport.abort()
                return
        self._seen = (self.cycle, awaits_head, unsent_bytes)
        self._timer = self.loop.call_later(STALLED_S, self._look)
