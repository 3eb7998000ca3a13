"""The progress bar of a batch."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_embed import Embedder
from npu_embed.batch.meter import meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated") as opened:
        yield opened


def test_on_a_terminal_it_tells_rows_rates_swaps_and_time(
    engine: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    engine.embed(["before"])
    with meter("embedding", 5, engine, show=True) as advance:
        engine.embed(["a", "b"])
        advance(3)
        engine.embed(["c"])  # known from the embedder before it is told
    drawn = terminal.getvalue()
    assert "embedding" in drawn
    assert "4/5" in drawn
    assert all(unit in drawn for unit in ("texts/s", "tokens/s", "0 swaps", ":"))


@pytest.mark.parametrize("show", [True, False])
def test_elsewhere_it_draws_nothing(
    engine: Embedder, monkeypatch: pytest.MonkeyPatch, show: bool
) -> None:
    stderr = io.StringIO() if show else Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with meter("embedding", 5, engine, show=show) as advance:
        advance(3)
    assert stderr.getvalue() == ""
