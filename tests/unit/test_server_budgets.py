"""The room that bodies and answers have together, and who makes room for whom."""

from __future__ import annotations

import pytest
from servers import in_loop

from npu_embed.server import budgets
from npu_embed.server.budgets import NUMBER_BYTES, Answers, Bodies
from npu_embed.server.refusals import Refusal


@pytest.fixture(autouse=True)
def _all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SLOW_S", -1.0)


def test_the_oldest_slow_body_makes_room_and_no_more_than_needed() -> None:
    async def story() -> None:
        bodies = Bodies(10)
        with bodies.one() as first, bodies.one() as second, bodies.one() as third:
            for body in (first, second):
                bodies.add(body, 5)
            bodies.add(third, 5)
            assert [one.given_up.done() for one in (first, second, third)] == [True, False, False]
            assert (bodies.held_bytes, bodies.count) == (10, 2)
            bodies.add(first, 5)  # it came before its reading ended
        assert (bodies.held_bytes, bodies.count) == (0, 0)

    in_loop(story())


def test_a_body_that_is_whole_or_not_slow_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        bodies = Bodies(10)
        with bodies.one() as first, bodies.one() as second:
            bodies.add(first, 10)
            first.whole = True
            with pytest.raises(Refusal) as whole:
                bodies.add(second, 1)
            first.whole = False
            monkeypatch.setattr(budgets, "SLOW_S", 3600.0)
            with pytest.raises(Refusal) as quick:
                bodies.add(second, 1)
            for caught in (whole, quick):
                assert (caught.value.status, caught.value.cause) == (429, "bodies_full")
            assert not first.given_up.done()
            assert bodies.held_bytes == 10

    in_loop(story())


def test_a_body_does_not_make_room_for_itself() -> None:
    async def story() -> None:
        bodies = Bodies(10)
        with bodies.one() as only:
            bodies.add(only, 10)
            with pytest.raises(Refusal):
                bodies.add(only, 1)
            assert not only.given_up.done()

    in_loop(story())


def test_an_answer_keeps_the_room_that_it_turns_out_to_need() -> None:
    answers = Answers(100 * NUMBER_BYTES)
    room = answers.reserve(2, 50)
    assert answers.reserved_bytes == 100 * NUMBER_BYTES
    with pytest.raises(Refusal, match="answers: 1600 bytes"):
        answers.reserve(1, 1)
    room.resize(700)
    other = answers.reserve(1, 1)
    assert answers.reserved_bytes == 700 + NUMBER_BYTES
    for _ in range(2):
        room.release()
    other.release()
    assert answers.reserved_bytes == 0
