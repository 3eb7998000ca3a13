"""A progress bar on stderr, only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int], None]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; a stream that was closed before Python started is None."""
    return stream is not None and stream.isatty()


@contextmanager
def bar(title: str, total: int, unit: str, *, show: bool) -> Iterator[Advance]:
    """A bar of `total` units; call what it yields with how many are done in all.

    Nothing is drawn, and rich not imported, unless show is true and stderr is a terminal.
    """
    if not show or not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def stages(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Bars for work that comes in named stages; call what it yields with (stage, done, total)."""
    if not show or not is_terminal(sys.stderr):
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, object] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield advance
