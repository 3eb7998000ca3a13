"""The server's HTTP side over a made-up engine: answers, limits, keys, health, metrics, logs."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import DIM, FakeEngine, Rig, in_loop, running, vector_of

from npu_embed.bundle import Bundle
from npu_embed.driver import Xrt as Anything
from npu_embed.errors import RunFailed
from npu_embed.server import budgets
from npu_embed.server.app import PASSED_OVER_BYTES, create_app
from npu_embed.server.service import Service
from npu_embed.tokenizer import BATCH_CHARACTERS

NAME = "tiny-bert"
SECRET = "my private words"


async def post(
    rig: Rig, value: object, path: str = "/v1/embeddings", **more: Anything
) -> httpx.Response:
    """The answer to an input; more: further fields."""
    if path == "/embed":
        return await rig.client.post(path, json={"inputs": value, **more})
    return await rig.client.post(path, json={"model": NAME, "input": value, **more})


def token_ids(path: Path, text: str) -> list[int]:
    bundle = Bundle.open(path)
    try:
        return [int(i) for i in bundle.open_tokenizer().encode_batch([text])[0].ids]
    finally:
        bundle.close()


def error(response: httpx.Response) -> dict[str, object]:
    found: dict[str, object] = response.json()["error"]
    return found


def samples(text: str) -> dict[str, float]:
    """Every sample of a metrics text, labels in its name."""
    return {
        s.name + "".join(f"|{v}" for v in s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


# --- answers ------------------------------------------------------------------------------------


def test_every_form_of_input_gives_each_text_its_vector(tiny_bundle: Path) -> None:
    texts = ["hello world", "a", ""]
    ids = [token_ids(tiny_bundle, text) for text in texts]
    wanted = np.stack([vector_of(np.array(one, dtype=np.int32)) for one in ids])

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            for value, rows in (
                (texts, wanted),
                (ids, wanted),
                (texts[0], wanted[:1]),
                (ids[0], wanted[:1]),
            ):
                answer = (await post(rig, value)).json()
                found = np.array([d["embedding"] for d in answer["data"]], dtype=np.float32)
                np.testing.assert_array_equal(found, rows)
                assert answer["usage"]["total_tokens"] == sum(map(len, ids[: len(rows)]))
                assert answer["model"] == NAME
            coded = (await post(rig, texts, encoding_format="base64")).json()["data"]
            rows = np.stack([np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in coded])
            np.testing.assert_array_equal(rows, wanted)
            tei = (await post(rig, texts, "/embed")).json()
            np.testing.assert_allclose(tei, wanted, atol=1e-6)
            short = np.array((await post(rig, texts, "/embed", dimensions=3)).json())
            cut = wanted[:, :3] / np.linalg.norm(wanted[:, :3], axis=1, keepdims=True)
            np.testing.assert_allclose(short, cut, atol=1e-6)

    in_loop(story())


def test_the_model_is_listed_and_answers_to_its_aliases(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle, aliases=("text-embedding-3-small",)) as rig:
            listed = (await rig.client.get("/v1/models")).json()
            assert [m["id"] for m in listed["data"]] == [NAME, "text-embedding-3-small"]
            assert (await rig.client.get(f"/v1/models/{NAME}")).json() == listed["data"][0]
            gone = await rig.client.get("/v1/models/gpt")
            assert (gone.status_code, error(gone)["code"]) == (404, "model_not_found")
            answer = await post(rig, "a", model="text-embedding-3-small")
            assert answer.json()["model"] == "text-embedding-3-small"

    in_loop(story())


def test_a_text_that_is_too_long_is_refused_or_cut_and_usage_counts_what_was_used(
    tiny_bundle: Path,
) -> None:
    exactly, more = "a " * 126, "a " * 127  # and two special tokens, of 128

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            assert (await post(rig, exactly)).json()["usage"]["total_tokens"] == 128
            for value in (more, ["a", more], "Test text " * 1000):
                refused = await post(rig, value)
                assert refused.status_code == 400
                assert error(refused)["code"] == "context_length_exceeded"
                assert "maximum context length is 128" in str(error(refused)["message"])
                assert (await post(rig, value, "/embed")).status_code == 400
                cut = (await post(rig, value, truncate=True)).json()
                assert cut["usage"]["total_tokens"] == 128 + 3 * (len(cut["data"]) - 1)
            found = samples((await rig.client.get("/metrics")).text)
            assert found["npu_embed_truncated_texts_total"] == 3
        async with running(tiny_bundle, truncate=True) as rig:
            assert (await post(rig, more)).status_code == 200
            assert (await post(rig, more, truncate=False)).status_code == 400

    in_loop(story())


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "more", "status", "words"),
    [
        ([[1, 1000]], {}, 400, "input[0]: token id 1000, wanted 0 to 999"),
        ([[1], [-1]], {}, 400, "input[1]: token id -1"),
        ([2**63], {}, 400, "input"),
        ([1] * 129, {}, 400, "129 tokens, wanted 1 to 128"),
        ("a", {"prompt_name": "nope"}, 400, "prompt_name: unknown prompt, this model has: none"),
        ([1], {"prompt_name": "query"}, 400, "prompt_name: given with token ids"),
        ("a", {"dimensions": 9}, 400, "dimensions: 9, wanted 1 to 8"),
        ("x" * (BATCH_CHARACTERS + 1), {}, 413, "this server takes at most 1048576 in a text"),
        (["a"] * 6, {}, 413, "input: 6 texts, this server takes at most 5"),
    ],
)
def test_what_cannot_be_embedded_is_refused_and_the_next_is_served(
    tiny_bundle: Path, value: object, more: dict[str, Anything], status: int, words: str
) -> None:
    async def story() -> None:
        async with running(tiny_bundle, max_texts=5) as rig:
            refused = await post(rig, value, **more)
            assert refused.status_code == status
            assert words in str(error(refused)["message"])
            assert not rig.engine.orders
            assert (await post(rig, "a")).status_code == 200
            assert rig.service.in_hand == 0

    in_loop(story())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_a_body_over_the_limit_is_413_whether_its_size_is_said_or_not(
    tiny_bundle: Path, path: str
) -> None:
    async def parts() -> object:
        for _ in range(6):
            yield b" " * 1_000_000

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            for content in (b"x" * 5_000_000, parts()):
                refused = await rig.client.post(
                    path,
                    content=content,  # type: ignore[arg-type]
                    headers={"content-type": "application/json"},
                )
                assert refused.status_code == 413
                assert "4194304 bytes" in refused.text
            assert rig.service.bodies.held_bytes == 0

    in_loop(story())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_not_said_to_be_json_is_refused(tiny_bundle: Path, kind: str) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            refused = await rig.client.post(
                "/v1/embeddings", content=b"{}", headers={"content-type": kind}
            )
            assert refused.status_code == 415
            assert "application/json" in str(error(refused)["message"])

    in_loop(story())


def test_a_body_that_does_not_come_is_given_up(tiny_bundle: Path) -> None:
    async def parts() -> object:
        yield b"{"
        await asyncio.sleep(3600)

    async def story() -> None:
        async with running(tiny_bundle, body_s=0.01) as rig:
            refused = await rig.client.post(
                "/embed",
                content=parts(),  # type: ignore[arg-type]
                headers={"content-type": "application/json"},
            )
            assert refused.status_code == 408
            assert (rig.service.in_hand, rig.service.bodies.held_bytes) == (0, 0)

    in_loop(story())


@pytest.mark.parametrize("path", ["/nope", "/v1/", "/v1/embeddings/x"])
def test_an_unknown_path_is_404_in_form(tiny_bundle: Path, path: str) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            missing = await rig.client.get(path)
            assert (missing.status_code, error(missing)["code"]) == (404, "not_found")
            wrong = await rig.client.get("/v1/embeddings")
            assert (wrong.status_code, error(wrong)["code"]) == (405, "method_not_allowed")
            assert "POST" in wrong.headers["allow"]
            assert (await rig.client.get("/embed")).json()["error_type"] == "validation"

    in_loop(story())


def test_what_is_no_path_or_method_is_logged_where_requests_are(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        async with running(tiny_bundle, log_requests=True) as rig:
            await rig.client.post("/embeddings?input=no", json={})
            await rig.client.get("/embed")
            await rig.client.get("/a%0Ab" + "x" * 2000)
        async with running(tiny_bundle) as rig:
            await rig.client.get("/silent")

    in_loop(story())
    found = [r.getMessage().split(" ", 1)[1] for r in caplog.records if r.name == "npu_embed"]
    assert [re.sub(r"\d\.\d{3}", "T", line) for line in found] == [
        "POST /embeddings 404 not_found T s",
        "GET /embed 405 method_not_allowed T s",
        f"GET /a%0Ab{'x' * 70} 404 not_found T s",
    ]


def test_what_is_no_path_or_method_is_counted_and_has_an_id(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            for path, status in (("/nope", 404), ("/v1/embeddings/", 404), ("/embed", 405)):
                response = await rig.client.get(path)
                assert response.status_code == status
                assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
            counted = samples((await rig.client.get("/metrics")).text)
            assert counted["npu_embed_errors_total|not_found"] == 2
            assert counted["npu_embed_requests_total|other|405"] == 1

    in_loop(story())


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 415), ("/nope", 404)])
def test_a_body_that_is_refused_is_taken_all_the_same(
    tiny_bundle: Path, path: str, status: int
) -> None:
    taken = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(10):
            taken.append(1)
            yield b"x" * 1000

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            response = await rig.client.post(path, content=body())
            assert response.status_code == status

    in_loop(story())
    assert len(taken) == 10


@pytest.mark.parametrize(
    "headers", [{"expect": "100-continue"}, {"content-length": str(PASSED_OVER_BYTES + 1)}]
)
def test_a_body_that_waits_or_is_huge_is_refused_at_once(
    tiny_bundle: Path, headers: dict[str, str]
) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError
        yield b""

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            response = await rig.client.post("/nope", content=body(), headers=headers)
            assert response.status_code == 404

    in_loop(story())


@pytest.mark.parametrize("value", ["a text", ["a text"] * 4])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_a_full_queue_is_429_with_retry_after_for_a_string_and_a_list_alike(
    tiny_bundle: Path, value: object, path: str
) -> None:
    async def story() -> None:
        async with running(tiny_bundle, queue_texts=4) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, "in the order"))
            await rig.until(lambda: bool(rig.engine.orders))
            second = asyncio.ensure_future(post(rig, ["waits"] * 4))
            await rig.until(lambda: rig.service.queue.texts == 4)
            refused = await post(rig, value, path)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "4 texts at most" in refused.text
            rig.engine.open.set()
            assert (await first).status_code == 200
            assert (await second).status_code == 200
            assert (await post(rig, value, path)).status_code == 200

    in_loop(story())


def test_bodies_that_take_too_much_memory_together_are_429(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle, held_body_bytes=1000) as rig:
            refused = await post(rig, "a" * 2000)
            assert (refused.status_code, error(refused)["code"]) == (429, "bodies_full")
            assert "1000 bytes" in refused.text
            assert (await post(rig, "a")).status_code == 200

    in_loop(story())


def test_a_slow_body_makes_room_for_others(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "SLOW_S", 0.0)

    async def parts() -> object:
        yield b" " * 900
        await asyncio.sleep(3600)

    async def story() -> None:
        async with running(tiny_bundle, held_body_bytes=1000) as rig:
            slow = asyncio.ensure_future(
                rig.client.post(
                    "/v1/embeddings",
                    content=parts(),  # type: ignore[arg-type]
                    headers={"content-type": "application/json"},
                )
            )
            await rig.until(lambda: rig.service.bodies.held_bytes == 900)
            assert (await post(rig, "a" * 300, truncate=True)).status_code == 200
            given_up = await slow
            assert (given_up.status_code, error(given_up)["code"]) == (408, "body_timeout")
            assert "while others had no room" in given_up.text
            assert (rig.service.bodies.held_bytes, rig.service.bodies.count) == (0, 0)

    in_loop(story())


def test_answers_that_nobody_takes_keep_others_out_and_not_the_memory_full(
    tiny_bundle: Path,
) -> None:
    async def story() -> None:
        async with running(tiny_bundle, held_answer_bytes=1000) as rig:
            answers = rig.service.answers
            unsent = 999
            answers.unsent_bytes = lambda: unsent
            for path in ("/v1/embeddings", "/embed"):
                refused = await post(rig, "a", path)
                assert refused.status_code == 429
                assert "retry-after" in refused.headers
                assert "999 bytes of those that clients have yet to take" in refused.text
            assert not rig.engine.orders
            unsent = 0
            assert (await post(rig, "a")).status_code == 200
            # One alone may be larger than all together may be.
            assert (await post(rig, ["a"] * 20)).status_code == 200
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, ["a"] * 7))  # 7 x 8 numbers of 16 bytes
            await rig.until(lambda: answers.reserved_bytes == 896)
            assert error(await post(rig, "a"))["code"] == "answers_full"
            rig.engine.open.set()
            assert (await first).status_code == 200
            await post(rig, "a " * 200)  # is refused
            rig.engine.failures = [RunFailed("lost")]
            assert (await post(rig, "a")).status_code == 503
            assert answers.reserved_bytes == 0

    in_loop(story())


def test_an_answer_has_its_room_until_its_connection_has_it(tiny_bundle: Path) -> None:
    body = json.dumps({"inputs": ["a", "b"]}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/embed",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            answers = rig.service.answers
            held: list[int] = []
            waits = asyncio.Event()
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, object]:
                if parts:
                    return parts.pop()
                await asyncio.sleep(3600)
                raise AssertionError

            async def send(message: MutableMapping[str, Anything]) -> None:
                held.append(answers.reserved_bytes - len(message.get("body", b"")))
                await waits.wait()  # the connection is full of an answer before

            app = create_app(rig.service)
            sending = asyncio.ensure_future(app(scope, receive, send))
            await rig.until(lambda: bool(held))
            assert answers.reserved_bytes == held[0] > 0
            waits.set()
            await sending
            assert held[1:] == [0]  # as much as the answer has
            assert answers.reserved_bytes == 0

    in_loop(story())


KEYS = ["", "Bearer", "Bearer ", "Bearer wrong", "Bearer sésame!", "Basic sésame", "sésame"]


@pytest.mark.parametrize("given", KEYS)
def test_without_the_key_nothing_is_embedded(tiny_bundle: Path, given: str) -> None:
    async def story() -> None:
        async with running(tiny_bundle, api_key="sésame") as rig:
            for path in ("/v1/embeddings", "/embed"):
                refused = await rig.client.post(
                    path,
                    json={},
                    headers={b"authorization": given.encode()},
                )
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
            assert (await rig.client.get("/v1/models")).status_code == 401
            for path in ("/health", "/metrics", "/"):
                assert (await rig.client.get(path)).status_code == 200
            taken = await rig.client.post(
                "/embed",
                json={"inputs": "a"},
                headers={b"authorization": b"Bearer s\xc3\xa9same"},
            )
            assert taken.status_code == 200

    in_loop(story())


# --- clients that leave, a server that ends -----------------------------------------------------


def test_the_texts_of_a_client_that_hangs_up_are_dropped(tiny_bundle: Path) -> None:
    body = json.dumps({"model": NAME, "input": ["left"] * 3}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, "stays"))
            await rig.until(lambda: bool(rig.engine.orders))
            hung_up = asyncio.Event()
            sent = []
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, object]:
                if parts:
                    return parts.pop()
                await hung_up.wait()
                return {"type": "http.disconnect"}

            async def send(message: object) -> None:
                sent.append(message)

            app = create_app(rig.service)
            left = asyncio.ensure_future(app(scope, receive, send))
            await rig.until(lambda: rig.service.queue.texts == 3)
            hung_up.set()
            await left
            assert rig.service.queue.texts == 0
            rig.engine.open.set()
            assert (await first).status_code == 200
            assert (await post(rig, "next")).status_code == 200
            assert [len(order.lengths) for order in rig.engine.orders] == [1, 1]
            found = samples((await rig.client.get("/metrics")).text)
            assert found["npu_embed_dropped_texts_total"] == 3
            assert found["npu_embed_errors_total|client_gone"] == 1

    in_loop(story())


def test_while_it_drains_what_is_in_hand_is_finished_and_the_rest_refused(
    tiny_bundle: Path,
) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, "in hand"))
            await rig.until(lambda: bool(rig.engine.orders))
            rig.service.draining = True
            refused = await post(rig, "late")
            assert (refused.status_code, error(refused)["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
            health = await rig.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert not rig.service.drained()
            rig.engine.open.set()
            assert (await first).status_code == 200
            assert rig.service.drained()

    in_loop(story())


# --- health, metrics, logs, the page ------------------------------------------------------------


def test_health_answers_while_the_device_works(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, ["a", "b"]))
            await rig.until(lambda: bool(rig.engine.orders))
            second = asyncio.ensure_future(post(rig, ["c", "d", "e"]))
            await rig.until(lambda: rig.service.queue.texts == 3)
            health = await rig.client.get("/health")
            assert health.status_code == 200
            found = health.json()
            assert found["device"].pop("busy_s") >= 0
            assert found["device"] | {"error": None} == {
                "kind": "emulated",
                "state": "ready",
                "busy": True,
                "error": None,
                "slots_held": 2,
                "worker_restarts": 0,
            }
            assert found["bundle"]["name"] == NAME
            assert (found["bundle"]["dim"], found["bundle"]["max_tokens"]) == (DIM, 128)
            assert found["queue"]["texts"] == 3
            assert found["queue"]["requests_in_hand"] == 2
            rig.engine.open.set()
            await asyncio.gather(first, second)
            assert (await rig.client.get("/health")).json()["device"]["busy_s"] is None

    in_loop(story())


def test_metrics_count_what_was_done(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            await post(rig, ["a", "b"])
            await post(rig, "a", "/embed")
            await post(rig, [[5000]])
            found = samples((await rig.client.get("/metrics")).text)
        assert found["npu_embed_requests_total|/v1/embeddings|200"] == 1
        assert found["npu_embed_requests_total|/v1/embeddings|400"] == 1
        assert found["npu_embed_requests_total|/embed|200"] == 1
        assert found["npu_embed_errors_total|invalid_request"] == 1
        assert (found["npu_embed_texts_total"], found["npu_embed_tokens_total"]) == (3, 9)
        assert (found["npu_embed_packs_total"], found["npu_embed_runs_total"]) == (2, 60)
        assert found["npu_embed_pack_fill_ratio_sum"] == pytest.approx(9 / 256)
        for name in ("queue_wait", "tokenize", "device", "request"):
            assert found[f"npu_embed_{name}_seconds_count"] >= 2
        for name in ("switches_total", "swaps_total", "queue_texts", "queue_tokens"):
            assert found[f"npu_embed_{name}"] == 0
        assert (found["npu_embed_contexts_held"], found["npu_embed_device_up"]) == (2, 1)

    in_loop(story())


def test_no_text_of_a_user_is_logged(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)

    async def story() -> None:
        engine = FakeEngine()
        async with running(tiny_bundle, engine, log_requests=True) as rig:
            for value in (SECRET, [SECRET, 3], {SECRET: 1}):
                await post(rig, value)
            await rig.client.post("/embed", json={"inputs": "a", SECRET: 1})
            await rig.client.post(
                "/embed", content=SECRET, headers={"content-type": "application/json"}
            )

            def bug(*args: object) -> None:
                raise RuntimeError(SECRET)

            with monkeypatch.context() as patch:
                patch.setattr(Service, "prepare_job", bug)
                broken = await post(rig, SECRET)
            assert broken.status_code == 500
            assert SECRET not in broken.text
            assert broken.headers["x-request-id"] in broken.text
            assert broken.headers["x-request-id"] in caplog.text

    in_loop(story())
    ours = [r.getMessage() for r in caplog.records if r.name == "npu_embed"]
    assert len(ours) == 7  # a line a request, and the bug's place
    assert any("RuntimeError at " in line for line in ours)
    assert SECRET not in caplog.text


def test_the_page_loads_nothing_and_runs_only_what_is_in_it(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            page = await rig.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert policy.count("'sha256-") == 2
        links = set(re.findall(r'(?:src|href|url)[=(]"?([^")]*)', page.text))
        assert links == {"data:,"}
        assert set(re.findall(r"https?://[^\"]+", page.text)) == {"http://www.w3.org/2000/svg"}

    in_loop(story())
