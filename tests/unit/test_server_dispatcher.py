"""The dispatcher: shared orders, failures of the device and of the worker, and what health says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import FakeEngine, Rig, in_loop, running

from npu_embed.errors import (
    BundleError,
    DeviceBad,
    DeviceError,
    NoFreeContext,
    NpuEmbedError,
    RunFailed,
)
from npu_embed.server import dispatcher
from npu_embed.server.link import WorkerDied, WorkerFailed, WorkerStuck
from npu_embed.server.messages import Order
from npu_embed.server.queue import Queue

POISON = 7


async def post(rig: Rig, value: object) -> httpx.Response:
    return await rig.client.post("/embed", json={"inputs": value})


async def health(rig: Rig) -> tuple[int, dict[str, Any]]:
    found = await rig.client.get("/health")
    return found.status_code, found.json()["device"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "IDLE_S", 0.005)
    monkeypatch.setattr(dispatcher, "RESTART_S", (0.001, 0.002))


def test_requests_of_many_clients_share_an_order(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, "first"))
            await rig.until(lambda: bool(rig.engine.orders))
            others = [asyncio.ensure_future(post(rig, [f"{i}", "b"])) for i in range(20)]
            await rig.until(lambda: rig.service.queue.texts == 40)
            rig.engine.open.set()
            answers = await asyncio.gather(first, *others)
            assert {a.status_code for a in answers} == {200}
            assert len({str(a.json()[0]) for a in answers}) == 21
            assert len({str(a.json()[1]) for a in answers[1:]}) == 1
            assert [len(order.lengths) for order in rig.engine.orders] == [1, 40]

    in_loop(story())


def test_an_idle_device_waits_a_little_for_others(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle, linger_ms=3_600_000.0) as rig:
            first = asyncio.ensure_future(post(rig, "a"))
            await rig.until(lambda: rig.service.queue.texts == 1)
            await post(rig, ["b " * 120] * 5)  # with these an order is full
            await first
            assert [len(order.lengths) for order in rig.engine.orders] == [1 + 3, 2]

    in_loop(story())


@pytest.mark.parametrize("error", [RunFailed("mha: timed out"), NoFreeContext("no slot")])
def test_a_device_error_fails_its_requests_and_the_next_succeeds(
    tiny_bundle: Path, error: NpuEmbedError
) -> None:
    async def story() -> None:
        engine = FakeEngine(failures=[error])
        async with running(tiny_bundle, engine) as rig:
            failed = await post(rig, "a")
            assert failed.status_code == 503
            assert failed.json() == {"error": str(error), "error_type": "unhealthy"}
            assert "retry-after" in failed.headers
            assert (await post(rig, "a")).status_code == 200
            assert (await health(rig))[0] == 200

    in_loop(story())


def test_health_is_bad_only_while_the_device_is_gone(tiny_bundle: Path) -> None:
    async def story() -> None:
        gone = True
        engine = FakeEngine(fails=lambda order: RunFailed("device lost") if gone else None)
        async with running(tiny_bundle, engine) as rig:
            assert (await post(rig, "a")).status_code == 503
            status, device = await health(rig)
            assert (status, device["state"], device["error"]) == (503, "failed", "device lost")
            assert b"device_up 0" in rig.service.metrics_text()
            gone = False  # and nobody has to ask for vectors for it to be found out
            await rig.until(lambda: rig.service.health()[0])
            assert (await health(rig))[1]["error"] is None

    in_loop(story())


def test_one_clients_poison_fails_only_its_own_request(tiny_bundle: Path) -> None:
    def poisoned(order: Order) -> NpuEmbedError | None:
        return DeviceError("tokens[0]: not finite") if POISON in order.ids else None

    async def story() -> None:
        async with running(tiny_bundle, FakeEngine(fails=poisoned)) as rig:
            rig.engine.open.clear()
            first = asyncio.ensure_future(post(rig, [[1]]))
            await rig.until(lambda: bool(rig.engine.orders))
            others = [asyncio.ensure_future(post(rig, [[i], [3]])) for i in (5, POISON, 9)]
            await rig.until(lambda: rig.service.queue.texts == 6)
            rig.engine.open.set()
            answers = await asyncio.gather(first, *others)
            assert [a.status_code for a in answers] == [200, 200, 503, 200]

    in_loop(story())


@pytest.mark.parametrize(
    ("error", "status"), [(WorkerFailed("MemoryError"), 500), (BundleError("weights: cut"), 500)]
)
def test_what_is_no_clients_fault_is_a_server_error(
    tiny_bundle: Path, error: NpuEmbedError, status: int
) -> None:
    async def story() -> None:
        async with running(tiny_bundle, FakeEngine(failures=[error])) as rig:
            assert (await post(rig, "a")).status_code == status
            assert (await post(rig, "a")).status_code == 200

    in_loop(story())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (WorkerDied("the worker process ended by signal 9"), "signal 9"),
        (WorkerStuck("the worker process gave no answer for 600 s"), "no answer"),
        (DeviceBad("failed twice"), "failed twice"),
    ],
)
def test_a_worker_that_is_of_no_use_is_started_again_and_its_requests_fail(
    tiny_bundle: Path, error: NpuEmbedError, words: str
) -> None:
    async def story() -> None:
        async with running(tiny_bundle, FakeEngine(failures=[error])) as rig:
            failed = await post(rig, "a")
            assert (failed.status_code, words in failed.text) == (503, True)
            assert "retry-after" in failed.headers
            assert (await post(rig, "a")).status_code == 200
            status, device = await health(rig)
            assert (status, device["worker_restarts"]) == (200, 1)

    in_loop(story())


def test_health_is_bad_until_a_new_worker_has_the_device(tiny_bundle: Path) -> None:
    async def story() -> None:
        engine = FakeEngine(
            failures=[DeviceBad("gone")], starts=[None, *[DeviceBad("still gone")] * 10_000]
        )
        async with running(tiny_bundle, engine) as rig:
            assert (await post(rig, "a")).status_code == 503
            await rig.until(lambda: rig.service.dispatcher.device.state == "down")
            status, device = await health(rig)
            assert (status, device["error"]) == (503, "still gone")
            engine.starts.clear()
            await rig.until(lambda: rig.service.health()[0])
            assert (await post(rig, "a")).status_code == 200

    in_loop(story())


@pytest.mark.parametrize("error", [WorkerStuck("no answer"), DeviceBad("twice")])
def test_an_idle_worker_that_is_of_no_use_is_started_again(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, error: NpuEmbedError
) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            failures = [error]

            def contexts() -> int:
                if failures:
                    raise failures.pop()
                return rig.engine.held

            monkeypatch.setattr(rig.engine, "contexts", contexts)
            await rig.until(lambda: rig.service.dispatcher.device.restarts == 1)
            await rig.until(lambda: rig.service.health()[0])

    in_loop(story())


def test_a_worker_that_died_in_idleness_costs_no_request(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.alive = False
            assert (await post(rig, "a")).status_code == 200
            assert (await health(rig))[1]["worker_restarts"] == 1

    in_loop(story())


def test_while_the_worker_cannot_be_started_requests_fail_at_once(tiny_bundle: Path) -> None:
    async def story() -> None:
        engine = FakeEngine()
        async with running(tiny_bundle, engine) as rig:
            engine.starts = [BundleError("manifest.txt: gone")] * 10_000
            engine.alive = False
            await rig.until(lambda: rig.service.dispatcher.device.state == "down")
            refused = await post(rig, "a")
            assert (refused.status_code, "gone" in refused.text) == (503, True)
            assert (await health(rig))[0] == 503
            engine.starts.clear()
            await rig.until(lambda: rig.service.health()[0])
            assert (await post(rig, "a")).status_code == 200

    in_loop(story())


def test_a_worker_that_comes_back_with_another_bundle_is_not_used(tiny_bundle: Path) -> None:
    async def story() -> None:
        engine = FakeEngine()
        async with running(tiny_bundle, engine) as rig:
            engine.fingerprint, engine.alive = "another", False
            await rig.until(lambda: rig.service.dispatcher.device.state == "down")
            assert "restart the server" in (await post(rig, "a")).text

    in_loop(story())


def test_contexts_that_were_released_in_idleness_are_seen(tiny_bundle: Path) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.held = 0
            await rig.until(lambda: rig.service.health()[1]["device"]["slots_held"] == 0)

    in_loop(story())


def test_a_bug_in_the_dispatcher_lets_nobody_wait_for_ever(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            monkeypatch.setattr(Queue, "take", lambda self: 1 // 0)
            assert (await post(rig, "a")).status_code == 500
            assert (await post(rig, "a")).status_code == 503
            assert (await health(rig))[0] == 503

    in_loop(story())


def test_a_bug_in_an_order_fails_its_requests_and_nothing_else(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with running(tiny_bundle) as rig:
            rig.engine.failures = [ZeroDivisionError()]  # type: ignore[list-item]
            assert (await post(rig, "a")).status_code == 500
            assert (await post(rig, "a")).status_code == 200

    in_loop(story())
    assert "ZeroDivisionError" in caplog.text
