"""Plots of the benchmarks' summaries; the only file that needs matplotlib (extra [bench])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swap_points import Point

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit("--plot: no matplotlib; pip install 'npu-embed[bench]'.") from error

matplotlib.use("Agg")  # files only; no display is asked for

from matplotlib import pyplot as plt


def stages(summaries: Sequence[Mapping[str, Any]], path: str) -> None:
    """A bar a pack size: microseconds a token by stage, stacked."""
    figure, axes = plt.subplots(figsize=(8, 1.8 + 0.5 * len(summaries)), layout="constrained")
    names = [f"packs of {s['pack_rows']}" for s in summaries]
    left = [0.0] * len(summaries)
    for stage in summaries[0]["stages"]:
        each = [1e6 * s["stages"][stage]["median"] / s["tokens"] for s in summaries]
        axes.barh(names, each, left=left, label=stage)
        left = [a + b for a, b in zip(left, each, strict=True)]
    first = summaries[0]
    axes.set_xlabel("microseconds a token (medians)")
    axes.set_title(f"{first['bundle']}, {first['device']} device, {first['texts']} texts", size=10)
    axes.invert_yaxis()
    figure.legend(ncols=8, fontsize="small", loc="outside lower center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


OURS_COLOUR, PEER_COLOUR = "tab:blue", "tab:gray"


def comparison(summaries: Sequence[Mapping[str, Any]], path: str) -> None:
    """A panel a workload, a bar an engine: speed or time, with the range over the rounds."""
    heights = [len(s["engines"]) + 1.2 for s in summaries]
    figure, panels = plt.subplots(
        len(summaries),
        1,
        figsize=(8, 0.6 + 0.42 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, found in zip(panels[:, 0], summaries, strict=True):
        _comparison_panel(axes, found)
    figure.suptitle(summaries[0]["machine"]["cpu"], size=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _comparison_panel(axes: Any, found: Mapping[str, Any]) -> None:  # noqa: ANN401 (matplotlib's)
    """One workload's engines: tokens a second, or the time of one text."""
    key, unit = {
        "run": ("tokens_per_s", "tokens/s"),
        "each": ("ms", "ms a text"),
        "cold": ("seconds", "s to the first vector"),
    }[found["kind"]]
    spreads = {name: e[key] for name, e in found["engines"].items()}
    middle = [s.median for s in spreads.values()]
    spread = [
        [s.median - s.low for s in spreads.values()],
        [s.high - s.median for s in spreads.values()],
    ]
    colours = [OURS_COLOUR if name == "npu-embed" else PEER_COLOUR for name in spreads]
    bars = axes.barh(list(spreads), middle, xerr=spread, capsize=4, color=colours)
    labels = [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in middle]
    axes.bar_label(bars, labels, padding=4, size=9)
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit}, median and range of {found['rounds']} rounds", size=9)
    about = found["corpus"]
    texts = f"{about.texts:,} texts" if about.texts > 1 else "one text"
    axes.set_title(f"{found['workload']}: {texts}, {about.tokens:,} tokens", size=10)
    axes.invert_yaxis()


# Drawn from the widest to the narrowest, so that lines on top of each other are all seen.
POLICY_LINES = {"all": ("tab:red", 6.0), "lru": ("tab:orange", 3.5), "next-use": ("tab:blue", 1.5)}
PARTS = {"create": "creating contexts", "switch": "switching", "submit": "submitting runs"}


def swaps(points: Sequence[Point], path: str) -> None:
    """Swaps a text by slots, a panel a number of contexts; and modelled milliseconds a text."""
    subjects = list(dict.fromkeys(p.subject for p in points))
    figure, axes = plt.subplots(1, len(subjects) + 1, figsize=(13, 4), layout="constrained")
    for panel, subject in zip(axes, subjects, strict=False):
        _swaps_panel(panel, [p for p in points if p.subject == subject])
    _cost_panel(axes[-1], [p for p in points if p.subject == subjects[0]])
    axes[0].set_ylabel("swaps a text")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=7, fontsize="small", loc="outside lower center")
    r = points[0].recording
    figure.suptitle(f"{r.bundle}: {r.texts} texts, {r.tokens} tokens", size=11)
    figure.savefig(path, dpi=85)
    plt.close(figure)


def _swaps_panel(axes: Any, points: Sequence[Point]) -> None:  # noqa: ANN401 (matplotlib's)
    """Swaps a text by slots: a line a policy, one text at a time and in the largest packs."""
    largest = max(p.order.pack_rows or 0 for p in points)
    for pack_rows, style in ((None, "-"), (largest, ":")):
        for policy, (colour, width) in POLICY_LINES.items():
            ours = [p for p in points if p.order.pack_rows == pack_rows and p.policy == policy]
            slots = [p.slots for p in ours]
            each = [p.swaps / p.recording.texts for p in ours]
            name = f"{ours[0].order}, {policy}"
            axes.plot(slots, each, style, color=colour, linewidth=width, label=name)
        floor = [p.floor / p.recording.texts for p in ours]
        label = "the fewest possible" if pack_rows is None else None
        axes.plot(slots, floor, "k+", label=label, markersize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(n) if n < 7 or n % 4 == 0 else "" for n in slots])
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_yticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
    axes.set_ylim(0, 60)
    axes.grid(axis="y", alpha=0.4)
    axes.set_xlabel("hardware context slots")
    axes.set_title(f"{points[0].contexts} contexts", size=10)


def _cost_panel(axes: Any, points: Sequence[Point]) -> None:  # noqa: ANN401 (matplotlib's)
    """Modelled milliseconds a text, and what most of them are: with few slots, and with enough."""
    largest = max(p.order.pack_rows or 0 for p in points)
    slots = sorted({p.slots for p in points})
    shown = [
        next(
            p
            for p in points
            if (p.order.pack_rows, p.policy, p.slots) == (pack_rows, "next-use", n)
        )
        for pack_rows in (None, largest)
        for n in dict.fromkeys((slots[0], slots[-1]))
    ]
    each = [p.cost().each(p.recording.texts) for p in shown]
    names = [f"{p.order},\n{p.slots} slot{'s' if p.slots > 1 else ''}" for p in shown]
    axes.barh(names, [parts["total"] for parts in each], color="tab:blue", alpha=0.35)
    for name, parts in zip(names, each, strict=True):
        total = parts.pop("total")
        most, ms = max(parts.items(), key=lambda item: item[1])
        text = f" {total:.3g} ms, {ms / total:.0%} {PARTS.get(most, most)}"
        axes.annotate(text, (0.5, name), va="center", size=9)
    axes.set_xscale("log")
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    axes.set_xlabel("ms a text on an NPU2 (modelled, not measured)")
    axes.set_title(f"{points[0].contexts} contexts, next-use", size=10)
