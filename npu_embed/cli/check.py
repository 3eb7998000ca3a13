"""npu-embed check: a bundle against its hashes and its stored float32 references."""

from __future__ import annotations

from dataclasses import asdict

import click

from ..settings import DEVICES
from .output import echo_json, visible

_COLORS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}
_WORDS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


@click.command(
    short_help="Compare a bundle with its references.",
    epilog="\b\nExample:\n  npu-embed check minilm-bundle",
)
@click.argument("bundle")
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last is the verdict.")
@click.pass_context
def check(ctx: click.Context, bundle: str, device: str | None, as_json: bool) -> None:
    """Check a bundle: files, words to patch, token ids, and every stage's numbers.

    A line for each check says PASS, FAIL, or SKIP where the bundle holds nothing to check against.
    The exit code is 1 if one failed; those after it are still made.
    """
    from ..selfcheck import self_check

    counts = dict.fromkeys(_COLORS, 0)
    for outcome in self_check(bundle, device):
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
    if failed:
        ctx.exit(1)
