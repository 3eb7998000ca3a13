"""Running the server: the listening socket, the engine's process, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from ..bundle import Bundle
from ..errors import SettingError
from .app import create_app
from .connection import Connection
from .link import Link
from .messages import Opening, Ready
from .options import Options
from .service import Service

log = logging.getLogger("npu_embed")

WRITE_S = 5  # what slow readers get to take their answers when the server ends
LOOPBACK = ("127.", "::1", "localhost")


def run(options: Options, on_ready: Callable[[str, Ready, Bundle], None]) -> None:
    """Serve until a signal; on_ready is told the URL once requests are taken.

    SIGTERM or SIGINT drains: what is in hand is finished, what comes is answered with 503; a
    second one ends it at once.

    Raises:
        SettingError: the address cannot be listened on.
        NpuEmbedError: the bundle or the device cannot be opened.
    """
    bundle = Bundle.open(options.bundle)
    link = Link(Opening(options.bundle, options.device), options.order_s)
    with listen(options.host, options.port) as listener:
        try:
            # The engine first, and only then an event loop: who listens can embed.
            ready = link.start()
            if options.api_key is None and not options.host.startswith(LOOPBACK):
                log.warning(
                    "anybody who can reach %s may use this server; see --api-key", options.host
                )
            asyncio.run(_serve(options, bundle, link, ready, listener, on_ready))
        finally:
            link.stop()
            bundle.close()


async def _serve(
    options: Options,
    bundle: Bundle,
    link: Link,
    ready: Ready,
    listener: socket.socket,
    on_ready: Callable[[str, Ready, Bundle], None],
) -> None:
    service = Service(options, bundle, link, ready)
    server = _Server(service)
    service.start()
    try:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{port}", ready, bundle)
        await server.serve(sockets=[listener])
    finally:
        await service.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which goes on answering while it drains."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=WRITE_S,
            )
        )
        self._service = service
        self._deadline = 0.0
        service.answers.unsent_bytes = self._unsent_bytes

    def _unsent_bytes(self) -> int:
        """What clients have yet to take of answers that were given to their connections."""
        transports = (one.transport for one in self.server_state.connections)
        return sum(transport.get_write_buffer_size() for transport in transports)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks the server to end."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        self._deadline = time.monotonic() + self._service.options.drain_s
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now; asked ten times a second."""
        if self._service.draining:
            late = time.monotonic() >= self._deadline
            if late or self._service.drained():
                self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        SettingError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise SettingError(
            f"{host}:{port}: {getattr(error, 'strerror', None) or error}, wanted to listen there; "
            "choose another address with --host and --port."
        ) from error
