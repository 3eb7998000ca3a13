"""The server around the application: what its connections hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from servers import in_loop, running

from npu_embed.driver import Xrt as Anything
from npu_embed.server.run import _Server


def test_answers_that_connections_have_yet_to_send_are_counted(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            server = _Server(rig.service)
            assert rig.service.answers.unsent_bytes() == 0
            for unsent_bytes in (3, 4):
                transport = SimpleNamespace(get_write_buffer_size=lambda held=unsent_bytes: held)
                connection: Anything = _Connection(transport)
                server.server_state.connections.add(connection)
            assert rig.service.answers.unsent_bytes() == 7

    in_loop(story())


class _Connection:
    def __init__(self, transport: SimpleNamespace) -> None:
        self.transport = transport
