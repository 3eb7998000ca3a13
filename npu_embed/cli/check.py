"""npu-embed check: a bundle against its hashes and its stored float32 references."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..settings import DEVICES
from .bundles import bundle_argument, chosen_bundle
from .output import echo_json, visible
from .tracing import trace_option, traced

if TYPE_CHECKING:
    from ..outcomes import Outcome

_COLORS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}
_WORDS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


@click.command(
    short_help="Compare a bundle with its references.",
    epilog="\b\nExamples:\n  npu-embed check\n  npu-embed check --verify minilm",
)
@bundle_argument
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last is the verdict.")
@click.option(
    "--verify", is_flag=True, help="Only the files' hashes; a file without one fails. Runs nothing."
)
@trace_option
@click.pass_context
def check(
    ctx: click.Context,
    bundle: str | None,
    device: str | None,
    as_json: bool,
    verify: bool,
    trace: Path | None,
) -> None:
    """Check a bundle: files, words to patch, token ids, and every stage's numbers.

    BUNDLE is a folder, or the name of a bundle for `npu-embed get`; the default one where none is
    named.

    A line for each check says PASS, FAIL, or SKIP where the bundle holds nothing to check against.
    The exit code is 1 if one failed; those after it are still made.
    """
    from ..selfcheck import hash_check, self_check

    with traced(trace):
        folder = chosen_bundle(bundle)
        failed = _report(hash_check(folder) if verify else self_check(folder, device), as_json)
    if failed:
        ctx.exit(1)


def _report(outcomes: Iterable[Outcome], as_json: bool) -> bool:
    """Print outcomes and the verdict; whether a check failed."""
    counts = dict.fromkeys(_COLORS, 0)
    for outcome in outcomes:
        counts[outcome.status] += 1
        if as_json:
            echo_json(asdict(outcome))
        else:
            status = click.style(outcome.status, fg=_COLORS[outcome.status], bold=True)
            click.echo(f"{status}  {visible(outcome.check):<14}  {visible(outcome.detail)}")
    failed = counts["FAIL"]
    if as_json:
        verdict = "FAIL" if failed else "PASS"
        echo_json({"verdict": verdict, **{word: counts[s] for s, word in _WORDS.items()}})
    else:
        click.echo(", ".join(f"{counts[s]} {word}" for s, word in _WORDS.items()))
    return bool(failed)
