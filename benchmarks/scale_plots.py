"""The plot of scale.py: a panel an axis, throughput and peak memory; needs the extra [bench]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scale_points import AXES, UNITS, Result

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit("--plot: no matplotlib; pip install 'npu-embed[bench]'.") from error

matplotlib.use("Agg")  # files only; no display is asked for

from matplotlib import pyplot as plt

MARKERS = ("o", "s", "^")
SPEED, MEMORY = "tab:blue", "tab:red"


def panels(results: Sequence[Result], title: str, path: str) -> None:
    """Four panels; one whose axis was not measured stays empty."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, axis in zip(grid.flat, AXES, strict=True):
        ours = [r for r in results if r.axis == axis]
        if not ours:
            axes.set_axis_off()
        elif axis == "threads":
            _bars(axes, ours)
        else:
            _lines(axes, ours)
    figure.suptitle(f"{title}, emulated NPU: medians, and the range of the rounds", size=11)
    figure.savefig(path, dpi=85)
    plt.close(figure)


def _lines(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 (matplotlib's)
    """Tokens a second on the left, peak MiB on the right, a line a series."""
    memory = axes.twinx()
    series = list(dict.fromkeys(r.series for r in results))
    for marker, name in zip(MARKERS, series, strict=False):
        ours = sorted((r for r in results if r.series == name), key=lambda r: r.value)
        values = [r.value for r in ours]
        label = f", {name}" if len(series) > 1 else ""
        for panel, style, colour, what, spreads in (
            (axes, "-", SPEED, "tokens/s", [r.tokens_per_s for r in ours]),
            (memory, "--", MEMORY, "peak MiB", [r.peak_mib for r in ours]),
        ):
            middle = [s.median for s in spreads]
            low = [s.median - s.low for s in spreads]
            high = [s.high - s.median for s in spreads]
            panel.errorbar(
                values,
                middle,
                yerr=[low, high],
                fmt=style + marker,
                color=colour,
                capsize=3,
                label=what + label,
            )
    axis = results[0].axis
    axes.set_xscale("log", base=10 if axis == "corpus" else 2)
    ticks = sorted({r.value for r in results})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel(UNITS[axis])
    _sides(axes, memory)
    handles, labels = axes.get_legend_handles_labels()
    more, names = memory.get_legend_handles_labels()
    axes.legend(handles + more, labels + names, fontsize="x-small", loc="lower right")


def _bars(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 (matplotlib's)
    """A pair of bars a setting: tokens a second, and peak MiB on the right."""
    memory = axes.twinx()
    names = [f"{r.series}\n{r.value}" for r in results]
    places = range(len(results))
    width = 0.38
    speed = axes.bar(
        [x - width / 2 for x in places],
        [r.tokens_per_s.median for r in results],
        width,
        color=SPEED,
    )
    peak = memory.bar(
        [x + width / 2 for x in places],
        [r.peak_mib.median for r in results],
        width,
        color=MEMORY,
        alpha=0.5,
    )
    axes.bar_label(speed, fmt="{:,.0f}", size=7)
    memory.bar_label(peak, fmt="{:,.0f}", size=7)
    axes.set_xticks(places, names, size=8)
    axes.set_xlabel(UNITS["threads"])
    _sides(axes, memory)


def _sides(axes: Any, memory: Any) -> None:  # noqa: ANN401 (matplotlib's)
    """Both scales from zero, each in its colour."""
    axes.set_ylabel("tokens/s", color=SPEED)
    memory.set_ylabel("peak MiB", color=MEMORY)
    for panel in (axes, memory):
        panel.set_ylim(0, 1.15 * panel.get_ylim()[1])
    axes.grid(axis="y", alpha=0.3)
