from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_embed.eviction import (
    DEFAULT_POLICY,
    POLICIES,
    DropAll,
    LeastRecentlyUsed,
    NextUse,
    count_swaps,
    fewest_swaps,
)

SEQUENCES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)


def exhaustive_optimum(sequence: str, slots: int) -> int:
    """The fewest drops over every choice of victim: no cleverness to share a mistake with."""

    @cache
    def best(position: int, resident: frozenset[str]) -> int:
        if position == len(sequence):
            return 0
        place = sequence[position]
        if place in resident:
            return best(position + 1, resident)
        if len(resident) < slots:
            return best(position + 1, resident | {place})
        return 1 + min(best(position + 1, resident - {v} | {place}) for v in resident)

    return best(0, frozenset())


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(1, 4))
def test_the_floor_is_the_optimum_over_every_choice_of_victim(seq: list[str], slots: int) -> None:
    assert fewest_swaps(seq, slots) == exhaustive_optimum("".join(seq), slots)


@given(SEQUENCES, st.integers(1, 16))
def test_next_use_drops_no_more_than_the_floor(sequence: list[str], slots: int) -> None:
    assert count_swaps(sequence, slots, NextUse()) == fewest_swaps(sequence, slots)


@given(SEQUENCES, st.integers(1, 16))
def test_no_policy_beats_the_floor(sequence: list[str], slots: int) -> None:
    floor = fewest_swaps(sequence, slots)
    assert count_swaps(sequence, slots, LeastRecentlyUsed()) >= floor
    assert count_swaps(sequence, slots, DropAll()) >= floor


@pytest.mark.parametrize(("policy", "swaps"), [("all", 8), ("lru", 7), ("next-use", 4)])
def test_a_cycle_of_three_contexts_in_two_slots_tells_the_policies_apart(
    policy: str, swaps: int
) -> None:
    assert count_swaps("abcabcabc", 2, POLICIES[policy]()) == swaps


def test_uses_off_the_plan_fall_back_to_the_least_recently_used() -> None:
    policy: NextUse[str] = NextUse()
    policy.plan("ab")
    for place in "acb":
        policy.used(place)
    assert policy.victims(["a", "b", "c"]) == ["a"]


def test_without_a_plan_the_least_recently_used_goes() -> None:
    policy: NextUse[str] = NextUse()
    for place in "bac":
        policy.used(place)
    assert policy.victims(["a", "b", "c"]) == ["b"]


def test_the_default_is_the_policy_with_the_fewest_swaps() -> None:
    counts = {name: count_swaps("abcabc" * 4, 2, make()) for name, make in POLICIES.items()}
    assert counts[DEFAULT_POLICY] == min(counts.values())
