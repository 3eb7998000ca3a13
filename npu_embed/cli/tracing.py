"""--trace, for the commands that use the NPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import click

trace_option = click.option(
    "--trace",
    metavar="OUT.json",
    type=click.Path(path_type=Path),
    help="Write a trace of what host and NPU did, for ui.perfetto.dev; an error ends it, too.",
)


def traced(path: Path | None) -> AbstractContextManager[None]:
    """A block whose trace goes to a file; None writes nothing."""
    from .. import seeing  # imports numpy, which --help need not

    return seeing.traced(path)
