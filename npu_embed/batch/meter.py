"""The progress bar of a batch: rows, texts and tokens a second, swaps, time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from ..progress import is_terminal

if TYPE_CHECKING:
    from ..embedder import Embedder

Advance = Callable[[int], None]


@contextmanager
def meter(title: str, total: int, embedder: Embedder, *, show: bool) -> Iterator[Advance]:
    """A bar of `total` rows; call what it yields with how many are done in all.

    Between those calls it moves with what the embedder has done. Nothing is drawn, and rich not
    imported, unless show is true and stderr is a terminal.
    """
    if not show or not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    begun, before = monotonic(), embedder.stats
    known = (0, before.texts)  # rows done, and the embedder's texts at that time

    class Live(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            self._look()
            yield self.make_tasks_table(self.tasks)

        def _look(self) -> None:
            stats, seconds = embedder.stats, max(monotonic() - begun, 1e-3)
            for task in self.tasks:
                task.completed = min(total, known[0] + stats.texts - known[1])
                task.fields["rates"] = (
                    f"{(stats.texts - before.texts) / seconds:,.1f} texts/s  "
                    f"{(stats.tokens - before.tokens) / seconds:,.0f} tokens/s  "
                    f"{stats.swaps - before.swaps:,} swaps"
                )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    with Live(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, rates="")

        def advance(done: int) -> None:
            nonlocal known
            known = (done, embedder.stats.texts)
            progress.update(task, completed=done)  # what the time left is reckoned from

        yield advance
