"""Clients that stop halfway: their connections are closed, those of others are not."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from servers import in_loop
from uvicorn.server import ServerState

from npu_embed.driver import Xrt as Anything
from npu_embed.server import connection
from npu_embed.server.connection import Connection

ANSWER_BYTES = 32 << 20  # more than the buffers between two sockets hold
LONG = 10.0  # stalls, which a client that moves outlives


async def app(scope: Anything, receive: Anything, send: Anything) -> None:
    """Answers as the path says: late, much, or at once."""
    if scope["path"] == "/late":
        await asyncio.sleep(LONG * connection.STALLED_S)
    body = b"x" * (ANSWER_BYTES if scope["path"] == "/much" else 2)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def sent(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Server]:
    """A client that has sent something to a server of one connection."""
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 10)
    writer.write(data)
    return reader, writer, server


async def everything(reader: asyncio.StreamReader) -> bytes:
    """What a client gets until its connection is closed, however."""
    found = bytearray()
    try:
        while part := await reader.read(1 << 20):
            found += part
    except ConnectionResetError:
        pass
    return bytes(found)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.05)


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        (b"", False),
        (b"GET / HT", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab", True),
    ],
)
def test_half_a_request_is_not_waited_for(data: bytes, answered: bool) -> None:
    async def story() -> None:
        reader, writer, server = await sent(data)
        found = await everything(reader)
        assert found.startswith(b"HTTP/1.1 200") == answered
        writer.close()
        server.close()

    in_loop(story())


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_takes_nothing_of_its_answer_is_not_waited_for(requests: int) -> None:
    async def story() -> None:
        reader, writer, server = await sent(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n" * requests)
        await asyncio.sleep(LONG * connection.STALLED_S)
        assert len(await everything(reader)) < ANSWER_BYTES
        writer.close()
        server.close()

    in_loop(story())


@pytest.mark.parametrize(("bytes_per_s", "whole"), [(1 << 40, False), (1 << 10, True)])
def test_a_client_must_take_its_answer_at_some_pace(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, whole: bool
) -> None:
    monkeypatch.setattr(connection, "SLOWEST_BYTES_PER_S", bytes_per_s)
    monkeypatch.setattr(connection, "STALLED_S", 0.2)

    async def story() -> None:
        close = b"GET /much HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader, writer, server = await sent(close)
        found = 0
        try:
            while True:  # something is taken between any two looks
                found += len(await reader.readexactly(2 << 20))
                await asyncio.sleep(connection.STALLED_S / 4)
        except asyncio.IncompleteReadError as end:
            found += len(end.partial)
        except ConnectionResetError:
            pass
        assert (found > ANSWER_BYTES) == whole
        writer.close()
        server.close()

    in_loop(story())


def test_a_client_that_waits_for_a_late_answer_gets_it() -> None:
    async def story() -> None:
        close = b"GET /late HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader, writer, server = await sent(close)
        assert (await everything(reader)).endswith(b"\r\n\r\nxx")
        writer.close()
        server.close()

    in_loop(story())
