"""Plots of the benchmarks' summaries; the only file that needs matplotlib (extra [bench])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def engines(found: Mapping[str, Any], path: str) -> None:
    """A bar an engine: tokens a second, with the range over the rounds."""
    figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    speeds = {name: e["tokens_per_s"] for name, e in found["engines"].items()}
    middle = [s.median for s in speeds.values()]
    spread = [
        [s.median - s.low for s in speeds.values()],
        [s.high - s.median for s in speeds.values()],
    ]
    bars = axes.barh(list(speeds), middle, xerr=spread, capsize=4, color=["tab:gray", "tab:blue"])
    axes.bar_label(bars, fmt="{:,.0f}", label_type="center", color="white")
    axes.set_xlabel(f"tokens/s (median and range of {found['rounds']} rounds)")
    axes.set_title(f"{found['corpus'].texts} texts, {found['machine']['cpu']}", size=10)
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)
