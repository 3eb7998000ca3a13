"""npu-embed doctor: what keeps texts from being embedded on this machine."""

from __future__ import annotations

from dataclasses import asdict

import click

from ..settings import DEVICES
from .bundles import bundle_argument
from .output import echo_json, one_line

_COLORS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}
_WORDS = {"PASS": "passed", "WARN": "warned", "FAIL": "failed"}


@click.command(
    short_help="Find out why the NPU or a bundle does not work here.",
    epilog="\b\nExamples:\n  npu-embed doctor\n  npu-embed doctor --json minilm",
)
@bundle_argument
@click.option("--device", type=click.Choice(DEVICES), help="What to check; default auto.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last is the verdict.")
@click.pass_context
def doctor(ctx: click.Context, bundle: str | None, device: str | None, as_json: bool) -> None:
    """Check the machine, the NPU, the emulated NPU and a bundle, and say what to do.

    BUNDLE is a folder, or the name of a bundle for `npu-embed get`; the default one where none is
    named. Nothing is fetched: one that is not made yet is not checked. Without an
    NPU the emulated one is checked, which is no failure unless --device npu demands one. A line for
    each check says PASS, WARN or FAIL; the exit code is 1 if one failed.
    """
    from ..doctor import examine

    counts = dict.fromkeys(_COLORS, 0)
    for finding in examine(bundle, device):
        counts[finding.status] += 1
        if as_json:
            echo_json(asdict(finding))
        else:
            status = click.style(finding.status, fg=_COLORS[finding.status], bold=True)
            click.echo(f"{status}  {one_line(finding.check):<14}  {one_line(finding.text)}")
    worst = next((s for s in ("FAIL", "WARN") if counts[s]), "PASS")
    if as_json:
        echo_json({"verdict": worst, **{word: counts[s] for s, word in _WORDS.items()}})
    else:
        click.echo(", ".join(f"{counts[s]} {word}" for s, word in _WORDS.items()))
    if counts["FAIL"]:
        ctx.exit(1)
