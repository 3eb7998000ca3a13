"""Options of the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"  # this machine only
PORT = 8000
MAX_TEXTS = 2048  # OpenAI's
MAX_BODY_BYTES = 4 << 20
HELD_BODY_BYTES = 64 << 20
QUEUE_TEXTS = 4096
LINGER_MS = 3.0
DRAIN_S = 30.0
BODY_S = 30.0
ORDER_S = 600.0  # two packs of a large model, run up to four times by a busy machine that emulates
HELD_ANSWER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What `npu-embed serve` is told.

    bundle: its folder. aliases: names the model answers to besides its own. api_key: what clients
    must send, None for nothing. queue_texts: with as many waiting, requests are refused.
    max_texts, max_body_bytes: of a request. held_body_bytes: of all requests not yet tokenized.
    held_answer_bytes: of all answers that are awaited or not yet taken by their clients.
    linger_ms: how long an order waits for others to share it. drain_s: how long requests in hand
    may take when the server is told to end. body_s: how long a client may take to send a body.
    order_s: how long the worker process may take for an order before it is replaced. truncate: cut
    texts that are too long where a request does not say. log_requests: a log line each.
    """

    bundle: Path
    device: str | None = None
    host: str = HOST
    port: int = PORT
    api_key: str | None = None
    aliases: tuple[str, ...] = ()
    truncate: bool = False
    max_texts: int = MAX_TEXTS
    max_body_bytes: int = MAX_BODY_BYTES
    held_body_bytes: int = HELD_BODY_BYTES
    held_answer_bytes: int = HELD_ANSWER_BYTES
    queue_texts: int = QUEUE_TEXTS
    linger_ms: float = LINGER_MS
    drain_s: float = DRAIN_S
    body_s: float = BODY_S
    order_s: float = ORDER_S
    log_requests: bool = False
