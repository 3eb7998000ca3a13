"""Connection: uvicorn's, which is closed when its client has stopped halfway."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED_S = 30.0


class Connection(H11Protocol):
    """A client's connection; one that stands still for STALLED_S, or twice as long, is closed.

    uvicorn by itself waits for ever for the end of a request's head, for what is left of a body
    after its answer, and for a client to take its answer. Some hundred such clients would use up
    the file descriptors of the process. How long a body may take is the application's to say.
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
        """Close the connection if it is as it was at the last look, and the client is to move."""
        awaits_head = self.cycle is None or self.cycle.response_complete
        unsent_bytes = self.transport.get_write_buffer_size()
        now = (self.cycle, awaits_head, unsent_bytes)
        if now == self._seen and (awaits_head or unsent_bytes):
            self.transport.abort()
            return
        self._seen = now
        self._timer = self.loop.call_later(STALLED_S, self._look)
