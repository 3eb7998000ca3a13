"""Jobs on threads, BLAS at one thread meanwhile, and how products are cut."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from npu_embed import cores
from npu_embed.cores import Scratch

BLAS = ThreadpoolController().select(user_api="blas").lib_controllers


def blas_threads() -> int:
    return max((int(lib.num_threads) for lib in BLAS), default=1)


@pytest.fixture
def two() -> Iterator[None]:
    """BLAS as a user with two cores has it."""
    with threadpool_limits(2, user_api="blas"):
        if blas_threads() != 2:
            pytest.skip("this numpy's BLAS takes no number of threads")
        yield


def test_scratch_is_reused_and_grows() -> None:
    scratch = Scratch()
    first = scratch.take("a", (4, 5))
    assert first.shape == (4, 5)
    assert first.dtype == np.float32
    assert np.shares_memory(first, scratch.take("a", (2, 3)))
    assert not np.shares_memory(first, scratch.take("b", (4, 5)))
    assert scratch.take("a", (40, 50)).shape == (40, 50)


@pytest.mark.usefixtures("two")
def test_every_job_is_done_once_by_as_many_threads_as_blas_may_have() -> None:
    meet = threading.Barrier(2, timeout=30)
    done: list[tuple[int, int]] = []

    def job(number: int) -> cores.Job:
        def do(scratch: Scratch) -> None:
            if number < 2:
                meet.wait()  # two are running at the same time
            done.append((number, threading.get_ident()))

        return do

    cores.run([job(i) for i in range(20)])
    assert sorted(n for n, _ in done) == list(range(20))
    assert len({thread for _, thread in done}) == 2


@pytest.mark.usefixtures("two")
def test_jobs_see_one_blas_thread_and_the_user_gets_his_own_back() -> None:
    seen: list[int] = []
    cores.run([lambda scratch: seen.append(blas_threads())] * 4, blas=True)
    assert seen == [1] * 4
    assert blas_threads() == 2
    assert cores.count() == 2


@pytest.mark.usefixtures("two")
def test_two_callers_at_once_leave_the_users_setting_as_it_was() -> None:
    first_runs, second_runs, first_is_back = (threading.Event() for _ in range(3))

    def first(scratch: Scratch) -> None:
        first_runs.set()
        second_runs.wait(30)

    def second(scratch: Scratch) -> None:
        assert blas_threads() == 1
        second_runs.set()
        first_is_back.wait(30)

    thread = threading.Thread(target=lambda: cores.run([second], blas=True))

    def start_second() -> None:
        first_runs.wait(30)
        thread.start()

    starter = threading.Thread(target=start_second)
    starter.start()
    cores.run([first], blas=True)
    first_is_back.set()
    starter.join()
    thread.join()
    assert blas_threads() == 2  # though another thread than the one that began has ended it


@pytest.mark.usefixtures("two")
def test_a_caller_does_not_wait_for_a_thread_that_helps_another() -> None:
    helped, ended = threading.Event(), threading.Event()

    def long(scratch: Scratch) -> None:
        if threading.current_thread() is not other:
            helped.set()  # by the one thread there is to help
        ended.wait(30)

    other = threading.Thread(target=lambda: cores.run([long] * 2))
    other.start()
    assert helped.wait(30)
    done: list[int] = []
    cores.run([lambda scratch: done.append(1)] * 4)
    assert not ended.is_set()
    assert len(done) == 4
    ended.set()
    other.join()


@pytest.mark.usefixtures("two")
def test_an_error_ends_the_jobs_and_comes_to_the_caller() -> None:
    running = threading.Event()
    done: list[int] = []

    def fails(scratch: Scratch) -> None:
        running.wait(30)
        raise MemoryError("no more")

    def works(scratch: Scratch) -> None:
        running.set()
        done.append(1)

    def late(scratch: Scratch) -> None:
        done.append(2)

    for jobs in ([fails, works], [works, fails]):
        running.clear()
        with pytest.raises(MemoryError, match="no more"):
            cores.run(jobs)
    assert blas_threads() == 2
    cores.run([late])
    assert done[-1] == 2


def test_where_a_thread_cannot_start_those_that_did_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def only_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    monkeypatch.setattr(cores, "_threads", cores._Threads())
    monkeypatch.setattr(cores, "count", lambda: 4)
    caller, taken = threading.get_ident(), threading.Event()
    done: list[bool] = []

    def job(scratch: Scratch) -> None:
        if threading.get_ident() == caller:
            assert taken.wait(30)
        else:
            taken.set()
            time.sleep(0.05)
        done.append(True)

    cores.run([job] * 4)
    assert len(done) == 4


def test_a_helper_without_a_thread_of_its_own_is_waited_for_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, begun, refused = threading.Thread.start, threading.Event(), threading.Event()

    def only_one(thread: threading.Thread) -> None:
        if begun.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        begun.set()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    monkeypatch.setattr(cores, "_threads", cores._Threads())
    monkeypatch.setattr(cores, "count", lambda: 3)
    caller, failed, taken = threading.get_ident(), threading.Event(), threading.Event()
    ended: list[str] = []

    def job(scratch: Scratch) -> None:
        if threading.get_ident() == caller:
            assert taken.wait(30)
        elif not failed.is_set():
            failed.set()
            assert refused.wait(30)
            raise MemoryError("no more")  # its thread comes to the helper that found none
        else:
            taken.set()
            time.sleep(0.1)
            ended.append("helped")

    with pytest.raises(MemoryError, match="no more"):
        cores.run([job] * 3)
    assert ended == ["helped"]


def test_an_error_of_another_thread_keeps_no_job_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "count", lambda: 2)
    caller, failed = threading.get_ident(), threading.Event()

    class Job:
        def __call__(self, scratch: Scratch) -> None:
            if threading.get_ident() == caller:
                assert failed.wait(30)
            else:
                failed.set()
                raise MemoryError("no more")

    def run() -> weakref.ref[Job]:
        job = Job()
        with contextlib.suppress(MemoryError):
            cores.run([job] * 4)
        return weakref.ref(job)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("two")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    cores.run([lambda scratch: None] * 4)  # the parent's threads are there
    child = os.fork()
    if child == 0:
        try:
            done: list[int] = []
            cores.run([lambda scratch: done.append(1)] * 8)
            os._exit(0 if len(done) == 8 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_while_another_thread_looks_for_blas_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, never = threading.Event(), threading.Event()
    importing = threading.Lock()

    def found(blas: cores._Blas) -> list[object]:
        with importing:
            looking.set()
            never.wait(0.3)  # a fork in the middle would find the lock taken
        return []

    monkeypatch.setattr(cores._Blas, "_found", found)
    thread = threading.Thread(target=cores.count)
    thread.start()
    assert looking.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is ended
        os._exit(0 if cores.count() == 1 else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 96, 200, 512, 2048, 2049])
@pytest.mark.parametrize(("columns", "tile"), [(64, 64), (1152, 64), (1536, 64), (48, 16)])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_blocks_cover_a_product_once_at_tile_borders(
    rows: int, columns: int, tile: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "count", lambda: count)
    covered = np.zeros((rows, columns), int)
    for top, bottom, left, right in cores.cut_product(rows, columns, tile, rows * columns / 100):
        assert left % tile == 0
        assert bottom - top <= cores.BLOCK_ROWS
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()


def test_small_products_are_not_cut_and_large_ones_give_every_core_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "count", lambda: 2)
    least = cores.LEAST_MICROSECONDS
    assert len(cores.cut_product(16, 1536, 64, least)) == 1
    assert len(cores.cut_product(16, 1536, 64, 4 * least)) == 4
    assert len(cores.cut_product(2048, 1536, 64, 1000 * least)) == 22
    monkeypatch.setattr(cores, "count", lambda: 1)
    assert len(cores.cut_product(16, 1536, 64, 4 * least)) == 1


@pytest.mark.usefixtures("two")
def test_work_of_unknown_length_is_worth_all_threads() -> None:
    assert cores.worth(math.inf) == 2
    assert cores.worth(0.0) == 1
    assert cores.worth(1e12) == 2


@pytest.mark.usefixtures("two")
def test_another_thread_is_woken_only_for_what_takes_longer_than_that() -> None:
    threads: set[int] = set()
    meet = threading.Barrier(2, timeout=30)

    def job(scratch: Scratch) -> None:
        threads.add(threading.get_ident())

    cores.run([job] * 8, 1.9 * cores.LEAST_MICROSECONDS)
    assert threads == {threading.get_ident()}

    def together(scratch: Scratch) -> None:
        meet.wait()  # which one thread would break

    cores.run([together] * 2, 2 * cores.LEAST_MICROSECONDS)


@pytest.mark.usefixtures("two")
def test_rows_are_gone_through_once_and_in_parts_where_there_are_many() -> None:
    for rows, width, parts in ((10, 8, 1), (4096, 384, 2)):
        seen: list[tuple[int, int]] = []

        def part(start: int, stop: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((start, stop))

        cores.run_rows(rows, width, part)
        assert len(seen) == parts
        assert sorted(seen)[0][0] == 0
        assert sorted(seen)[-1][1] == rows
        assert sum(stop - start for start, stop in seen) == rows
