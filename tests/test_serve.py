"""`npu-embed serve` as a process: real clients, hang-ups, kills, signals, a browser."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from commandline import run
from prometheus_client.parser import text_string_to_metric_families
from references import NEAR_BITS
from servers import ROOT, START_S, Served, serving

from npu_embed import Embedder

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # processes and signals

NAME = "tiny-bert"
SECRET = "my private words"
TEXTS = ["two cats sleeping on a sofa", "a", "", "hello world, once more " * 9]
HANG_UPS = 200
CLIENTS, TEXTS_OF_CLIENT, ROUNDS = 32, 20, 3
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def served(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests share, and must leave serving."""
    log = tmp_path_factory.mktemp("served") / "log"
    with serving(tiny_bundle, log, "--log-requests") as one:
        yield one


@pytest.fixture(scope="module")
def embedder(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def post(url: str, texts: object, **more: object) -> httpx.Response:
    """The answer of /v1/embeddings."""
    body = {"model": NAME, "input": texts, **more}
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=START_S)


def near(found: object, wanted: object) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(wanted)).max() <= NEAR_BITS)


def wait_until(true: Callable[[], object]) -> None:
    """Wait until a call gives something true."""
    deadline = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def stopped(one: Served) -> Iterator[concurrent.futures.Future[httpx.Response]]:
    """Hold the worker at a request, as long as the block lasts; that request's answer."""
    worker = one.worker_pid()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(worker, signal.SIGSTOP)
        try:
            answer = pool.submit(post, one.url, TEXTS)
            wait_until(lambda: one.health()["device"]["busy"])
            yield answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)


# --- clients ------------------------------------------------------------------------------------


def test_the_openai_client_gets_the_vectors_of_embed(
    client: openai.OpenAI, embedder: Embedder
) -> None:
    wanted = embedder.embed(TEXTS)
    ids = embedder.tokenize(TEXTS)
    tokens = sum(map(len, ids))
    for value in (TEXTS, ids):
        # By default the client asks for base64 and decodes it.
        answer = client.embeddings.create(model=NAME, input=value)
        assert near([d.embedding for d in answer.data], wanted)
        assert [d.index for d in answer.data] == [0, 1, 2, 3]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
        assert answer.model == NAME
    floats = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float", user="u")
    assert near([d.embedding for d in floats.data], wanted)
    for one in (TEXTS[0], ids[0]):
        answer = client.embeddings.create(model=NAME, input=one, dimensions=16)
        assert near(answer.data[0].embedding, embedder.embed(TEXTS[0], dim=16))


def test_the_openai_client_lists_the_model(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "npu-embed"


def test_the_openai_client_understands_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has tiny-bert") as unknown:
        client.embeddings.create(model="gpt", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128") as caught:
        client.embeddings.create(model=NAME, input="a " * 200)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input"
    with pytest.raises(openai.APIStatusError, match="at most 2048") as large:
        client.embeddings.create(model=NAME, input=["a"] * 2049)
    assert large.value.status_code == 413


def test_a_body_of_5_mb_is_413_on_a_real_connection(served: Served) -> None:
    large = post(served.url, "x" * 5_000_000)
    assert large.status_code == 413
    assert "4194304" in large.text


def test_many_clients_get_their_own_vectors(served: Served, embedder: Embedder) -> None:
    texts = [f"text {i} of a client, with a few words more" for i in range(CLIENTS * 20)]
    wanted = embedder.embed(texts).reshape(CLIENTS, TEXTS_OF_CLIENT, -1)
    start = threading.Barrier(CLIENTS)

    def talk(number: int) -> bool:
        mine = texts[number * TEXTS_OF_CLIENT :][:TEXTS_OF_CLIENT]
        start.wait()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
            answers = [one.embeddings.create(model=NAME, input=mine) for _ in range(ROUNDS)]
        return all(near([d.embedding for d in a.data], wanted[number]) for a in answers)

    before = metrics(served)
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(talk, range(CLIENTS)))
    after = metrics(served)
    texts_run = after["npu_embed_texts_total"] - before["npu_embed_texts_total"]
    packs = after["npu_embed_packs_total"] - before["npu_embed_packs_total"]
    assert texts_run == CLIENTS * TEXTS_OF_CLIENT * ROUNDS
    assert packs < CLIENTS * ROUNDS  # a pack carries texts of several requests


def metrics(one: Served) -> dict[str, float]:
    """Every sample without labels."""
    text = httpx.get(f"{one.url}/metrics", timeout=START_S).text
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


def test_clients_that_hang_up_leave_it_serving(served: Served, embedder: Embedder) -> None:
    address = urlsplit(served.url)
    body = json.dumps({"model": NAME, "input": ["hung up " * 20] * 10}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body
    for number in range(HANG_UPS):
        with socket.create_connection((address.hostname, address.port or 0)) as connection:
            # In the head, in the body, and when all is sent.
            connection.sendall((whole[:20], whole[: len(head) + 9], whole)[number % 3])
            if number % 2:  # with a reset instead of an orderly end
                linger = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    answer = post(served.url, TEXTS).json()
    assert near([d["embedding"] for d in answer["data"]], embedder.embed(TEXTS))
    wait_until(lambda: served.health()["queue"]["requests_in_hand"] == 0)
    assert served.health()["status"] == "ok"


def test_http_answers_while_the_device_works(served: Served) -> None:
    with stopped(served) as waiting:
        for path in ("/health", "/metrics", "/v1/models", "/"):
            assert httpx.get(served.url + path, timeout=START_S).status_code == 200
        assert post(served.url, "a", dimensions=0).status_code == 400
    assert waiting.result().status_code == 200


def test_no_text_is_in_the_log(served: Served) -> None:
    assert post(served.url, SECRET).status_code == 200
    assert post(served.url, [SECRET, 1]).status_code == 400
    log = served.log.read_text()
    assert " POST /v1/embeddings 200 ok " in log
    assert SECRET not in log


# --- the worker, keys, signals ------------------------------------------------------------------


def test_a_worker_that_is_killed_is_started_again(tiny_bundle: Path, tmp_path: Path) -> None:
    with serving(tiny_bundle, tmp_path / "log") as one:
        with stopped(one) as lost:
            os.kill(one.worker_pid(), signal.SIGKILL)
            answer = lost.result()
        assert answer.status_code == 503
        assert "ended by signal 9" in answer.text
        assert "retry-after" in answer.headers
        assert post(one.url, "a").status_code == 200  # it waits for the new one
        assert one.health()["status"] == "ok"
        assert one.health()["device"]["worker_restarts"] == 1
        assert "error: the worker process ended by signal 9" in one.log.read_text()


def test_a_worker_that_stands_still_is_replaced(tiny_bundle: Path, tmp_path: Path) -> None:
    with serving(tiny_bundle, tmp_path / "log", "--order-s", "10") as one:
        frozen = one.worker_pid()
        os.kill(frozen, signal.SIGSTOP)
        lost = post(one.url, TEXTS)  # returns, although nothing ever wakes the worker
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "worker_stuck")
        assert "no answer for 10 s" in lost.text
        assert "retry-after" in lost.headers
        assert post(one.url, "a").status_code == 200  # it waits for the new one
        assert one.worker_pid() != frozen
        assert not alive(frozen)
        assert one.health()["device"]["worker_restarts"] == 1


def test_a_device_that_is_gone_is_opened_by_a_new_worker(tiny_bundle: Path, tmp_path: Path) -> None:
    # The handle of the process that saw it go stays dead.
    plan = {"NPU_EMBED_EMU_FAULTS": "gone@35"}
    with serving(tiny_bundle, tmp_path / "log", **plan) as one:
        first = one.worker_pid()
        assert [post(one.url, "a").status_code for _ in range(3)] == [200, 503, 200]
        assert one.worker_pid() != first
        health = one.health()
        assert (health["status"], health["device"]["worker_restarts"]) == ("ok", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tiny_bundle: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tiny_bundle, tmp_path / "log") as one:
        worker = one.worker_pid()
        with stopped(one) as in_hand:
            os.kill(worker, number)  # as a terminal or a service manager sends it to all
            one.process.send_signal(number)
            wait_until(lambda: one.health()["status"] == "draining")
            refused = post(one.url, "late")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert len(in_hand.result().json()["data"]) == len(TEXTS)
        assert one.process.wait(START_S) == 0
        assert not alive(worker)
    assert "Traceback" not in one.log.read_text()


def test_the_worker_ends_when_the_server_is_killed(tiny_bundle: Path, tmp_path: Path) -> None:
    with serving(tiny_bundle, tmp_path / "log") as one:
        worker = one.worker_pid()
        assert alive(worker)
        one.process.kill()
        wait_until(lambda: not alive(worker))  # raises where it goes on


def alive(pid: int) -> bool:
    """Whether a process runs; nobody may have asked yet how one that ended did so."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_key_may_come_from_the_environment(tiny_bundle: Path, tmp_path: Path) -> None:
    with serving(tiny_bundle, tmp_path / "log", NPU_EMBED_API_KEY="sesame") as one:
        assert post(one.url, "a").status_code == 401
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key="sesame") as client:
            assert len(client.embeddings.create(model=NAME, input="a").data) == 1
        with (
            openai.OpenAI(base_url=f"{one.url}/v1", api_key="other") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.embeddings.create(model=NAME, input="a")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--bundle", "/nowhere"], "/nowhere: no such folder"),
        (["--api-key", ""], "--api-key: empty"),
        (["--host", "256.0.0.1"], "wanted to listen there"),
    ],
)
def test_what_it_cannot_serve_it_says_in_one_line(
    tiny_bundle: Path, args: list[str], words: str
) -> None:
    done = run("serve", "--bundle", tiny_bundle, *args)
    assert (done.code, done.out) == (1, "")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_port_that_is_taken_is_named(tiny_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--bundle", tiny_bundle, "--port", port)
    assert done.code == 1
    assert f"127.0.0.1:{port}: Address already in use" in done.err


def test_without_its_packages_it_names_the_extra(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "npu_embed.server.run", None)
    done = run("serve", "--bundle", tiny_bundle)
    assert done.code == 1
    assert "pip install 'npu-embed[server]'" in done.err


def test_the_load_benchmark_counts_answers_and_checks_vectors(tiny_bundle: Path) -> None:
    few = ["--clients", "3", "--texts", "2", "--seconds", "0.5", "--rounds", "1"]
    command = [sys.executable, "benchmarks/serve_load.py", *few]
    done = subprocess.run(
        [*command, "--bundle", str(tiny_bundle), "--device", "emulated"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    one, summary = map(json.loads, done.stdout.splitlines())
    assert summary["answers"] == one["server"]["answers"]
    assert set(summary["answers"]) == {"200"}
    assert summary["wrong_vectors"] == 0
    assert summary["ratio"]["median"] > 0
    assert summary["cpu_ratio"]["median"] > 0


# --- the page -----------------------------------------------------------------------------------


def test_the_page_shows_the_model_embeds_a_text_and_plots(served: Served) -> None:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is installed")
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        expect.set_options(timeout=START_S * 1000)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
            asked: set[str] = set()
            page.on("request", lambda request: asked.add(request.url))
            page.goto(served.url)
            # The page's policy lets no script be evaluated: it is looked at from outside.
            expect(page).to_have_title(f"{NAME} - npu-embed")
            expect(page.locator("#model")).to_have_text(NAME)
            expect(page.locator("#about")).to_contain_text("64 numbers a vector")
            expect(page.locator("#status")).to_contain_text("ok")
            page.fill("#texts", "two cats\na red car\n<b>bold</b>")
            page.click("#embed")
            rows = page.locator("#result tr")
            expect(rows).to_have_count(4)
            expect(rows.nth(1).locator("td").nth(2)).to_have_text("1.000")
            expect(rows.nth(3).locator("td").nth(1)).to_have_text("<b>bold</b>")
            line = page.locator("#plot-texts polyline")
            expect(line).to_have_attribute("points", re.compile(r"\d \d"))
            expect(page.locator("#plot-contexts b")).to_have_text("2")
            page.fill("#texts", "a " * 300)  # cut, not refused
            page.click("#embed")
            expect(rows).to_have_count(2)
            expect(page.locator("#took")).to_contain_text("128 tokens")
            assert not problems
            assert {urlsplit(url).netloc for url in asked} <= {urlsplit(served.url).netloc, ""}
        finally:
            browser.close()
