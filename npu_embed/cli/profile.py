"""npu-embed profile: where the time goes by kernel and stage, or what the kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from ..progress import bar
from ..settings import DEVICES
from .bundles import bundle_argument, named_bundle
from .embed import read_lines
from .output import console, echo_json, print_table
from .tracing import trace_option, traced

if TYPE_CHECKING:
    from ..profiling import Comparison, Profile


@click.command(
    short_help="Show where the time goes, or what kernels compute.",
    epilog="\b\nExamples:\n  npu-embed profile --plot timeline.png\n"
    "  npu-embed profile minilm --texts lines.txt --json\n"
    "  npu-embed profile --compare",
)
@bundle_argument
@click.option(
    "--texts",
    metavar="FILE",
    type=click.File("rb"),
    help="A text a line, - for stdin; default: some of its own.",
)
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last sums up.")
@click.option(
    "--plot",
    metavar="OUT.png",
    type=click.Path(path_type=Path),
    help="Draw the timeline; wants matplotlib (pip install 'npu-embed[plot]').",
)
@click.option(
    "--compare",
    "compares",
    is_flag=True,
    help="Compute every run once more on the CPU, and show the worst deviation of each kernel.",
)
@trace_option
@click.pass_context
def profile(
    ctx: click.Context,
    bundle: str | None,
    texts: BinaryIO | None,
    device: str | None,
    as_json: bool,
    plot: Path | None,
    compares: bool,
    trace: Path | None,
) -> None:
    """Embed some texts with BUNDLE and show which kernels and stages took how long.

    BUNDLE is a folder, or the name of a bundle for `npu-embed get`; the default one where none is
    named.

    The runs of a list are not timed one by one, which no hardware allows: a line with "list" shows
    what whole lists took.

    With --compare every run is done alone and computed in float64 from its own operands as well.
    A result may deviate by what float32 sums and the rounding to bf16 allow; the exit code is 1
    where one deviates by more.
    """
    if compares and plot is not None:
        raise click.UsageError("--compare and --plot: a comparison has no timeline; leave one out.")
    given = None if texts is None else read_lines(texts, getattr(texts, "name", "stdin"))
    from .. import profiling
    from ..embedder import Embedder
    from ..profiling import timeline

    if plot is not None:
        timeline.check_matplotlib()  # before the work

    used = profiling.TEXTS if given is None else given
    folder = named_bundle(bundle)
    with traced(trace), Embedder(folder, device) as embedder:
        title = "comparing" if compares else "profiling"
        with bar(title, len(used), "texts", show=True) as advance:
            if compares:
                compared = profiling.compare(embedder, used, advance)
            else:
                found = profiling.profile(embedder, used, advance)
    if compares:
        if not _show_comparison(compared, as_json=as_json):
            ctx.exit(1)
        return
    _show_profile(found, as_json=as_json)
    if plot is not None:
        timeline.draw(found, plot)


def _show_profile(found: Profile, *, as_json: bool) -> None:
    summary = {
        "bundle": found.bundle,
        "device": found.device,
        "texts": found.texts,
        "tokens": found.tokens,
        "packs": found.packs,
        "seconds": round(found.seconds, 6),
        "device_seconds": round(sum(line.seconds for line in found.kernels), 6),
    }
    if as_json:
        for kernel in found.kernels:
            echo_json({**asdict(kernel), "share": round(kernel.seconds / found.seconds, 4)})
        for stage in found.stages:
            echo_json({**asdict(stage), "share": round(stage.seconds / found.seconds, 4)})
        echo_json({"profile": summary})
        return
    out = console()
    print_table(
        out,
        f"{found.bundle}, {found.device} device: {found.texts} texts, {found.tokens} tokens, "
        f"{found.packs} pack{'s' if found.packs > 1 else ''}, {found.seconds:.3f} s",
        ("kernel", "", "submits", "runs", "rows", "padded", "ms", "us a submit", "share"),
        [
            (
                line.kernel,
                "list" if line.listed else "run",
                line.submits,
                line.runs,
                line.rows,
                line.padded_rows,
                f"{1e3 * line.seconds:9.2f}",
                f"{line.submit_us:9.1f}",
                f"{line.seconds / found.seconds:6.1%}",
            )
            for line in found.kernels
        ],
    )
    print_table(
        out,
        "the host's time (gemm and mha: submitting, then waiting)",
        ("stage", "times", "ms", "us each", "share"),
        [
            (
                line.stage,
                line.times,
                f"{1e3 * line.seconds:9.2f}",
                f"{line.mean_us:9.1f}",
                f"{line.seconds / found.seconds:6.1%}",
            )
            for line in found.stages
        ],
    )


def _show_comparison(compared: Sequence[Comparison], *, as_json: bool) -> bool:
    """Print a line a kernel; whether none was beyond its bound."""
    good = all(line.good for line in compared)
    if as_json:
        for line in compared:
            echo_json({**asdict(line), "of_bound": line.of_bound, "status": _status(line)})
        echo_json({"verdict": "PASS" if good else "FAIL"})
        return good
    print_table(
        console(),
        "every run beside float64 on the CPU, of its own operands: the worst element",
        ("", "kernel", "runs", "deviation", "bound", "of bound"),
        [
            (
                _status(line),
                line.kernel,
                line.runs,
                line.problem or f"{line.deviation:.3e}",
                f"{line.bound:.3e}",
                f"{line.of_bound:.3f}",
            )
            for line in compared
        ],
    )
    return good


def _status(line: Comparison) -> str:
    if not line.good:
        return "FAIL"
    return "SKIP" if line.problem else "PASS"
