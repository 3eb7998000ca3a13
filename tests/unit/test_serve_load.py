"""The load benchmark's clients: what they do where the server does not answer with vectors."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import serve_load

LONG_S = 60.0  # a client that does not stop at once would ask for this long


class Server(ThreadingHTTPServer):
    """Gives every request the same status; bodies are what it was sent."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Refusing)
        self.status = status
        self.bodies: list[dict[str, object]] = []


class Refusing(BaseHTTPRequestHandler):
    """Answers with the server's status and an error as `npu-embed serve` words it."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        """Keep the body, refuse."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))
        answer = json.dumps({"error": {"message": "input[0]: 300 tokens, wanted 256"}}).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def status() -> int:
    return 400


@pytest.fixture
def server(status: int) -> Iterator[Server]:
    with Server(status) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def client(server: Server) -> serve_load.Client:
    return serve_load.Client(
        f"http://127.0.0.1:{server.server_port}", "m", ["a"], np.zeros((1, 2), np.float32)
    )


def test_a_refused_request_ends_the_load_with_the_servers_words(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_load, "cpu_seconds", lambda pid: 0.0)
    with pytest.raises(SystemExit, match=r"request with 400: input\[0\]: 300 tokens, wanted 256"):
        serve_load.load([client(server)] * 3, LONG_S, 0)
    assert len(server.bodies) <= 3
    assert all(body["truncate"] is True for body in server.bodies)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_again_after_a_pause(
    server: Server, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(serve_load, "RETRY_S", 0.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    tally = serve_load.Tally()
    client(server).ask(time.perf_counter() + 0.2, tally)
    assert tally.refused is None
    assert len(pauses) == tally.answers[str(status)] > 1
