"""Contexts nobody uses: given up after a while, or when a sibling of the process needs one."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed import Embedder, InputError, contexts, idle
from npu_embed.idle import IdleTimer

SOON_S = 0.03
LONG_S = 10.0


class Owner:
    """Something that is idle now and then."""

    def __init__(self, seconds: float) -> None:
        self.calls: list[bool] = []
        self.called = threading.Event()
        self.timer = IdleTimer(seconds, self.idle)

    def idle(self) -> None:
        self.calls.append(self.timer.due())
        self.called.set()


def test_it_calls_once_when_the_time_has_passed() -> None:
    owner = Owner(SOON_S)
    assert not owner.called.wait(3 * SOON_S), "nothing before the first restart"
    owner.timer.restart()
    assert owner.called.wait(LONG_S)
    time.sleep(2 * SOON_S)
    assert owner.calls == [True]


def test_a_restart_puts_it_off_and_a_stop_ends_it() -> None:
    owner = Owner(5 * SOON_S)
    for _ in range(8):
        owner.timer.restart()
        time.sleep(SOON_S)
    assert not owner.calls
    owner.timer.stop()
    assert not owner.called.wait(8 * SOON_S)
    owner.timer.restart()
    assert owner.called.wait(LONG_S)


def test_zero_is_never() -> None:
    owner = Owner(0)
    threads = threading.active_count()
    owner.timer.restart()
    assert threading.active_count() == threads


def test_a_late_call_is_told_from_one_that_is_due() -> None:
    owner = Owner(LONG_S)
    owner.timer.restart()
    late = owner.timer._timer
    owner.timer.restart()  # while the first was about to call
    assert late is not None
    late.function(*late.args)
    assert owner.calls == [False]
    owner.timer.stop()


@pytest.mark.slow
def test_it_keeps_neither_its_owner_nor_the_process() -> None:
    owner = Owner(SOON_S)
    owner.timer.restart()
    timer, called = owner.timer._timer, owner.called
    assert timer is not None
    assert timer.daemon
    del owner
    gc.collect()
    timer.join(LONG_S)
    assert not called.is_set()


@pytest.mark.slow
def test_who_lends_is_asked_until_it_is_gone() -> None:
    class Lender:
        def give(self) -> int:
            return 3

    before, known = idle.call_in(), len(idle._lenders)
    one, other = Lender(), Lender()
    idle.lend(one.give)
    idle.lend(other.give)
    assert idle.call_in() == before + 6
    del one
    gc.collect()
    assert idle.call_in() == 3
    del other
    gc.collect()
    assert idle.call_in() == 0
    assert len(idle._lenders) == known


# --- embedders ----------------------------------------------------------------------------------

TEXTS = ["two cats on a sofa", "a"]


@pytest.fixture
def opened(tiny_bundle: Path) -> Iterator[Callable[[], Embedder]]:
    """Opens embedders that are closed after the test."""
    made: list[Embedder] = []

    def make() -> Embedder:
        made.append(Embedder(tiny_bundle, "emulated"))
        return made[-1]

    yield make
    for embedder in made:
        embedder.close()


def loaded(embedder: Embedder) -> int:
    return len(embedder._model.npu.loaded())


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a while."""
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(SOON_S / 10)
    return condition()


def test_released_contexts_are_taken_again_at_the_next_call(opened: Callable[[], Embedder]) -> None:
    embedder = opened()
    wanted = embedder.embed(TEXTS)
    assert loaded(embedder) == 2
    loads = embedder.stats.loads
    embedder.release()
    embedder.release()
    assert loaded(embedder) == 0
    np.testing.assert_array_equal(embedder.embed(TEXTS), wanted)
    assert embedder.stats.loads == 2 * loads
    assert embedder.stats.swaps == 0


def test_a_closed_one_has_nothing_to_release(opened: Callable[[], Embedder]) -> None:
    embedder = opened()
    embedder.close()
    with pytest.raises(InputError, match="closed"):
        embedder.release()


def test_an_idle_one_releases_its_contexts_by_itself(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_IDLE_RELEASE_MS", "50")
    embedder = opened()
    wanted = embedder.embed(TEXTS)
    assert loaded(embedder) == 2
    assert eventually(lambda: loaded(embedder) == 0)
    np.testing.assert_array_equal(embedder.embed(TEXTS), wanted)
    embedder.close()
    time.sleep(0.1)  # the timer must find a closed one in order


def test_a_timer_that_calls_late_releases_nothing(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_IDLE_RELEASE_MS", "60000")
    embedder = opened()
    embedder.embed(TEXTS)
    late = embedder._idle._timer
    embedder.embed(TEXTS)  # the first call's timer may wait for the lock meanwhile
    assert late is not None
    late.function(*late.args)
    assert loaded(embedder) == 2, "released just after it was active"


def test_by_default_an_idle_one_keeps_its_contexts(opened: Callable[[], Embedder]) -> None:
    embedder = opened()
    embedder.embed(TEXTS)
    time.sleep(0.1)
    assert loaded(embedder) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_an_idle_sibling_gives_up_what_another_needs(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(count))
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "0")
    one, other = opened(), opened()
    wanted = one.embed(TEXTS)
    for embedder in (other, one, other):
        np.testing.assert_array_equal(embedder.embed(TEXTS), wanted)
    assert loaded(one) == 0
    assert one.stats.swaps == (0 if count == 2 else 2 * 6)  # 6 changes of context in each call


def test_what_a_sibling_does_not_use_goes_before_what_is_in_use(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "2")
    one, other = opened(), opened()
    one.embed(TEXTS)
    one._model.npu.unload("mha")
    other.embed(TEXTS)
    assert loaded(one) == 0
    assert other.stats.swaps == 0


class Stopped(Exception):
    """Ends a wait that would go on."""


def test_an_idle_sibling_gives_up_its_contexts_to_whoever_is_first_in_line(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_one, waiting = opened(), opened()
    idle_one.embed("a")
    assert idle_one.contexts_held

    def stop(_: float) -> None:
        raise Stopped

    monkeypatch.setattr("npu_embed.contexts.time.sleep", stop)
    line = waiting._model.npu._contexts._line
    with line.stand(), pytest.raises(Stopped):  # somebody else, who needs what the idle one holds
        waiting.embed("a")
    assert idle_one.contexts_held == 0


def test_a_sibling_that_is_embedding_gives_up_nothing(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = opened()
    embedder.embed(TEXTS)
    with embedder._turns.take():
        assert idle.call_in() == 0
    assert loaded(embedder) == 2
    with monkeypatch.context() as patch:
        patch.setattr(embedder._turns, "_pid", embedder._turns._pid - 1)
        assert idle.call_in() == 0, "after a fork they are the parent's"
    assert idle.call_in() == 2
    embedder.close()
    assert idle.call_in() == 0


@pytest.mark.slow
def test_more_threads_with_embedders_than_slots_all_get_on(
    opened: Callable[[], Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    monkeypatch.setattr(contexts, "TURN_S", 0.05)
    embedders = [opened() for _ in range(4)]
    wanted = embedders[0].embed(TEXTS)
    calls = [0] * 4
    errors: list[object] = []
    over = threading.Event()

    def work(i: int) -> None:
        try:
            while not over.is_set():
                found: NDArray[np.float32] = embedders[i].embed(TEXTS)
                np.testing.assert_array_equal(found, wanted)
                calls[i] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: bool(errors) or min(calls) >= 3)
    over.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert not errors
