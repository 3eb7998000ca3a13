"""Throughput of `npu-embed serve` under many clients, beside an Embedder in this process.

    python benchmarks/serve_load.py
    python benchmarks/serve_load.py --clients 64 --texts 5 --seconds 20

Each client asks for its texts again and again and checks every vector it gets. Embedder and server
take turns, each with the machine for itself. JSON lines on stdout: one a round, then a summary.

ratio is the server's texts a second by the Embedder's; cpu_ratio the Embedder's CPU seconds a text
by those of the server's processes, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import corpus
import numpy as np
import report
from numpy.typing import NDArray
from report import Spread

from npu_embed import Embedder, __version__

WORDS = 12  # of a text: a search query, a title
NEAR = 1e-4  # in other company a vector's last bits may differ
START_S = 120.0
RETRY_S = 0.05


@dataclass
class Tally:
    """What clients saw, all of them together."""

    texts: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    refused: str | None = None  # why a request was: asked again it would be again
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, texts: int, wrong: int) -> None:
        """Count an answer."""
        with self.lock:
            self.answers[outcome] += 1
            self.texts += texts
            self.wrong += wrong


@contextlib.contextmanager
def server(bundle: Path, device: str | None) -> Iterator[tuple[str, int]]:
    """`npu-embed serve` on a free port: its URL and process id."""
    command = [sys.executable, "-m", "npu_embed", "serve", "--port", "0", "--bundle", str(bundle)]
    command += ["--device", device] if device else []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline and process.poll() is None:
                log.seek(0)
                if found := re.search(r"at (http://\S+) ", log.read()):
                    yield found[1], process.pid
                    return
                time.sleep(0.05)
            log.seek(0)
            raise SystemExit(f"the server did not start: {log.read()}")
        finally:
            process.terminate()
            process.wait()


class Client:
    """One client: its texts, and the vectors they must have."""

    def __init__(self, url: str, model: str, texts: Sequence[str], wanted: NDArray[Any]) -> None:
        self._address = urlsplit(url).netloc
        # Cut as an Embedder cuts them: a bundle may take fewer tokens than twelve words have.
        body = {"model": model, "input": texts, "encoding_format": "base64", "truncate": True}
        self._body = json.dumps(body)
        self._wanted = wanted
        self._count = len(texts)

    def ask(self, end: float, tally: Tally) -> None:
        """Ask until `end` or until a client is refused, and wait for the last answer."""
        connection = http.client.HTTPConnection(self._address, timeout=START_S)
        headers = {"content-type": "application/json"}
        while time.perf_counter() < end and tally.refused is None:
            connection.request("POST", "/v1/embeddings", self._body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            wrong = self._wrong(answer) if response.status == 200 else 0
            tally.add(str(response.status), self._count if response.status == 200 else 0, wrong)
            if response.status != 200:
                if 400 <= response.status < 500 and response.status != 429:
                    tally.refused = f"{response.status}: {answer['error']['message']}"
                time.sleep(RETRY_S)
        connection.close()

    def _wrong(self, answer: dict[str, Any]) -> int:
        """How many of an answer's vectors are others than they must be."""
        rows = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in answer["data"]]
        return int((np.abs(np.stack(rows) - self._wanted).max(axis=1) > NEAR).sum())


def load(clients: Sequence[Client], seconds: float, pid: int) -> dict[str, Any]:
    """All clients at once: they ask for some seconds, and get what they asked for.

    Raises:
        SystemExit: the server refused a request, with what it said.
    """
    tally, cpu_s, start = Tally(), cpu_seconds(pid), time.perf_counter()
    threads = [
        threading.Thread(target=client.ask, args=(start + seconds, tally)) for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if tally.refused is not None:
        raise SystemExit(f"the server refused a request with {tally.refused}")
    spent = time.perf_counter() - start
    return {
        "seconds": round(spent, 2),
        "texts_per_s": round(tally.texts / spent, 2),
        "cpu_ms_per_text": round(1000 * (cpu_seconds(pid) - cpu_s) / max(1, tally.texts), 3),
        "answers": dict(tally.answers),
        "wrong_vectors": tally.wrong,
    }


def alone(embedder: Embedder, texts: Sequence[str], seconds: float) -> dict[str, Any]:
    """An Embedder that has all the texts at once, for at least some seconds."""
    cpu_s, start, calls = time.process_time(), time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        embedder.embed(texts)
        calls += 1
    done = calls * len(texts)
    return {
        "seconds": round(spent, 2),
        "texts_per_s": round(done / spent, 2),
        "cpu_ms_per_text": round(1000 * (time.process_time() - cpu_s) / done, 3),
    }


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process and its children have taken so far."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    ticks = 0
    for one in (str(pid), *children):
        fields = Path(f"/proc/{one}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user and in system mode
    return ticks / os.sysconf("SC_CLK_TCK")


def ratio(one: dict[str, Any], other: dict[str, Any], of: str) -> float:
    """One's figure by the other's."""
    return round(float(one[of]) / float(other[of]), 4)


def short(texts: Sequence[str]) -> list[str]:
    """The first words of each."""
    return [" ".join(text.split()[:WORDS]) for text in texts]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where an answer was wrong or an error other than 429."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", help="a bundle folder; the default one otherwise")
    parser.add_argument("--device", help="auto, npu or emulated")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--texts", type=int, default=20, help="of a request")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, in all rounds")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)

    texts = short(corpus.make(args.clients * args.texts))
    seconds = args.seconds / args.rounds
    rounds = []
    with Embedder(args.bundle, args.device) as embedder:
        wanted = embedder.embed(texts)
        tokens = embedder.stats.tokens
        with server(embedder.bundle.path, args.device) as (url, pid):
            clients = [
                Client(url, embedder.bundle.name, texts[i:j], wanted[i:j])
                for i, j in ((n * args.texts, (n + 1) * args.texts) for n in range(args.clients))
            ]
            for number in range(1, args.rounds + 1):
                own = alone(embedder, texts, seconds)
                embedder.release()
                served = load(clients, seconds, pid)
                rounds.append((own, served))
                report.line(
                    {
                        "benchmark": "serve_load",
                        "round": number,
                        "embedder": own,
                        "server": served,
                        "ratio": ratio(served, own, "texts_per_s"),
                        "cpu_ratio": ratio(own, served, "cpu_ms_per_text"),
                    }
                )
        name, device = embedder.bundle.name, embedder.device
    answers = sum((Counter(served["answers"]) for _, served in rounds), Counter())
    wrong = sum(served["wrong_vectors"] for _, served in rounds)
    report.line(
        {
            "benchmark": "serve_load",
            "summary": True,
            "npu_embed": __version__,
            "bundle": name,
            "device": device,
            "clients": args.clients,
            "texts_of_a_request": args.texts,
            "tokens_of_a_text": round(tokens / len(texts), 1),
            "seconds": args.seconds,
            "embedder_texts_per_s": Spread.of((own["texts_per_s"] for own, _ in rounds), 2),
            "server_texts_per_s": Spread.of((s["texts_per_s"] for _, s in rounds), 2),
            "ratio": Spread.of(ratio(s, own, "texts_per_s") for own, s in rounds),
            "cpu_ratio": Spread.of(ratio(own, s, "cpu_ms_per_text") for own, s in rounds),
            "answers": dict(answers),
            "wrong_vectors": wrong,
            "machine": report.machine(),
        }
    )
    return 1 if wrong or set(answers) - {"200", "429"} else 0


if __name__ == "__main__":
    sys.exit(main())
