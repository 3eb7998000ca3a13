"""Stats: what was counted, in total and by call, under the names the benchmarks read."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from npu_embed import Embedder
from npu_embed.driver import Counters
from npu_embed.stats import Tally

COUNTERS = {
    "runs",
    "runlists",
    "switches",
    "swaps",
    "loads",
    "patches",
    "syncs",
    "bytes_to_device",
    "bytes_from_device",
    "rebuilds",
}


def test_the_names_are_the_contract() -> None:
    flat = Tally().stats(Counters()).as_dict()
    assert {field.name for field in fields(Counters)} == COUNTERS
    assert set(flat) == {"texts", "images", "tokens", "truncated", "packs", "seconds", *COUNTERS}


def test_every_counter_is_defined_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "contexts.md").read_text(encoding="utf-8")
    for name in Tally().stats(Counters()).as_dict():
        assert f"\n| `{name}` | " in text, name


def test_counters_add_up_and_are_told_apart() -> None:
    before = Counters(runs=1, swaps=2)
    after = before.copy()
    after.add(Counters(runs=3, syncs=4, bytes_from_device=5))
    assert after == Counters(runs=4, swaps=2, syncs=4, bytes_from_device=5)
    assert after.since(before) == Counters(runs=3, syncs=4, bytes_from_device=5)
    assert before == Counters(runs=1, swaps=2)


def test_a_tally_adds_another_and_gives_a_snapshot() -> None:
    total, part = Tally(texts=1, packs=1), Tally(texts=2, tokens=3, truncated=4, packs=5)
    part.timing.add("gemm", 0.25)
    total.timing.add("gemm", 0.5)
    total.add(part)
    counters = Counters(runs=7)
    stats = total.stats(counters)
    total.add(part)
    counters.runs = 8
    assert (stats.texts, stats.tokens, stats.truncated, stats.packs) == (3, 3, 4, 6)
    assert stats.runs == stats.counters.runs == 7
    assert stats.seconds == {"gemm": 0.75}
    with pytest.raises(AttributeError, match="Stats has no 'run'"):
        stats.run  # noqa: B018


def test_the_stats_of_calls_add_up_to_the_total(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, "emulated", pack_rows=128) as embedder:
        opened = embedder.stats
        assert embedder.last_stats.as_dict() == Tally().stats(Counters()).as_dict()
        calls = []
        for texts in (["a", "two cats"], ["cats " * 200] * 3, [], ["a"]):
            embedder.embed(texts)
            calls.append(embedder.last_stats)
        total = embedder.stats
    assert [call.texts for call in calls] == [2, 3, 0, 1]
    assert [call.packs for call in calls] == [1, 3, 0, 1]
    assert [call.truncated for call in calls] == [0, 3, 0, 0]
    for name in {*COUNTERS, "texts", "images", "tokens", "truncated", "packs"}:
        at_open = getattr(opened, name)
        assert getattr(total, name) == at_open + sum(getattr(call, name) for call in calls), name
    assert opened.bytes_to_device > 0, "the weights"
    assert calls[0].runs == 3 * (4 + 2)
    assert calls[0].runlists == 3 * 2, "attention, and up with down"
    assert calls[2].seconds.keys() == {"tokenize"}
    assert calls[0].patches == 2
    assert calls[3].patches == 0, "the length was patched in the first call"


def test_a_call_that_fails_leaves_the_last_stats(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, "emulated") as embedder:
        embedder.embed(["a", "b"])
        last = embedder.last_stats
        with pytest.raises(TypeError):
            embedder.embed([None])  # type: ignore[list-item]
        assert embedder.last_stats is last
