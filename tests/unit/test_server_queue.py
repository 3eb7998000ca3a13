"""The server's queue: order, sharing, room, and who has gone."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from servers import in_loop

from npu_embed.packing import make_packs
from npu_embed.server.queue import Job, Portion, Queue

PACKS, PACK_ROWS = 2, 16


def job(*lengths: int) -> Job:
    """A job of texts of so many tokens, in a running loop."""
    ids = [np.arange(n, dtype=np.int32) for n in lengths]
    vectors = np.zeros((len(ids), 1), dtype=np.float32)
    loop = asyncio.get_running_loop()
    return Job(ids, vectors, loop.create_future(), queued=loop.time())


def queue(*jobs: Job) -> Queue:
    made = Queue(PACKS, PACK_ROWS)
    for one in jobs:
        made.put(one)
    return made


def spans(portions: list[Portion], jobs: list[Job]) -> list[tuple[int, int, int]]:
    return [(jobs.index(p.job), p.first, p.last) for p in portions]


def test_small_jobs_share_an_order_in_the_order_they_came() -> None:
    async def story() -> None:
        jobs = [job(3, 3), job(2), job(4)]
        line = queue(*jobs)
        assert (line.texts, line.tokens) == (4, 12)
        assert spans(line.take(), jobs) == [(0, 0, 2), (1, 0, 1), (2, 0, 1)]
        assert (line.texts, line.tokens) == (0, 0)
        assert line.take() == []

    in_loop(story())


def test_a_large_job_lets_others_in_after_each_pack() -> None:
    async def story() -> None:
        jobs = [job(*[4] * 20), job(4), job(4)]
        line = queue(*jobs)
        assert spans(line.take(), jobs) == [(0, 0, 4), (1, 0, 1), (2, 0, 1), (0, 4, 5)]
        assert spans(line.take(), jobs) == [(0, 5, 9), (0, 9, 12)]

    in_loop(story())


def test_what_does_not_fit_is_first_in_the_next_order() -> None:
    async def story() -> None:
        jobs = [job(16), job(16), job(1)]
        line = queue(*jobs)
        assert spans(line.take(), jobs) == [(0, 0, 1)]
        assert spans(line.take(), jobs) == [(1, 0, 1), (2, 0, 1)]

    in_loop(story())


@given(st.lists(st.lists(st.integers(1, PACK_ROWS), min_size=1, max_size=9), max_size=9))
def test_every_text_is_ordered_once_and_no_order_needs_more_packs(sizes: list[list[int]]) -> None:
    async def story() -> None:
        jobs = [job(*lengths) for lengths in sizes]
        line = queue(*jobs)
        seen = []
        while portions := line.take():
            lengths = [len(ids) for p in portions for ids in p.ids]
            assert len(make_packs(lengths, PACK_ROWS)) <= PACKS
            seen += [(n, i) for n, first, last in spans(portions, jobs) for i in range(first, last)]
        assert sorted(seen) == [(n, i) for n, one in enumerate(sizes) for i in range(len(one))]
        for n, one in enumerate(sizes):
            assert [i for m, i in seen if m == n] == list(range(len(one)))

    in_loop(story())


def test_texts_of_who_has_gone_are_dropped_at_the_next_order() -> None:
    async def story() -> None:
        jobs = [job(*[4] * 20), job(4)]
        line = queue(*jobs)
        line.take()
        jobs[0].cancel()
        assert line.texts == 0
        assert spans(line.take(), jobs) == []
        assert line.dropped == 14

    in_loop(story())


def test_a_job_is_finished_when_all_its_vectors_are_there() -> None:
    async def story() -> None:
        one = job(1, 1, 1)
        one.deliver(1, np.full((2, 1), 5, dtype=np.float32))
        assert not one.finished.done()
        one.deliver(0, np.full((1, 1), 4, dtype=np.float32))
        assert one.finished.result().tolist() == [[4], [5], [5]]
        one.fail(ValueError())  # too late to change anything
        assert one.finished.exception() is None

    in_loop(story())


def test_filling_ends_when_the_time_is_up_or_an_order_is_full() -> None:
    async def story() -> None:
        line = queue(job(1))
        await line.fill(0.001)
        filling = asyncio.ensure_future(line.fill(3600))
        await asyncio.sleep(0)
        line.put(job(15))
        await asyncio.sleep(0)
        assert not filling.done()
        line.put(job(16))
        await filling

    in_loop(story())


def test_who_has_waited_for_the_device_need_not_wait_for_others() -> None:
    async def story() -> None:
        one = job(1)
        one.queued -= 3600
        await queue(one).fill(3600)

    in_loop(story())


def test_waiting_says_whether_anybody_came() -> None:
    async def story() -> None:
        line = queue()
        assert not await line.wait(0.001)
        waiting = asyncio.ensure_future(line.wait())
        await asyncio.sleep(0)
        line.put(job(1))
        assert await waiting

    in_loop(story())
