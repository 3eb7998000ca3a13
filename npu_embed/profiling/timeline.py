"""A profile as a picture: a lane for the host, a lane a context; the only file with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import events
from ..errors import SettingError
from .measure import Profile
from .table import stem

HOST_LANE = "host"

Bar = tuple[str, float, float]  # what, begin and length in ms


def check_matplotlib() -> None:
    """Refuse to draw where matplotlib is not installed.

    Raises:
        SettingError: it is not.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingError(
            "--plot: no matplotlib, wanted it; pip install 'npu-embed[plot]'."
        ) from error


def draw(profile: Profile, path: Path) -> None:
    """Write the timeline of a profile to an image file (its ending says which kind).

    Raises:
        SettingError: matplotlib is not installed, or knows no such kind of file.
        OSError: the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    lanes = bars_by_lane(profile.events)
    names = list(dict.fromkeys(name for bars in lanes.values() for name, _, _ in bars))
    figure = Figure(figsize=(12, 1.8 + 0.7 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for height, bars in enumerate(lanes.values()):
        for name in dict.fromkeys(name for name, _, _ in bars):
            spans = [(begin, length) for found, begin, length in bars if found == name]
            colour = f"C{names.index(name) % 10}"
            axes.broken_barh(spans, (height - 0.4, 0.8), color=colour, label=name)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(
        f"{profile.bundle}, {profile.device} device: {profile.texts} texts, "
        f"{profile.tokens} tokens, a pack at a time",
        size=10,
    )
    labels: dict[str, Any] = {}  # matplotlib's handles
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
        labels.setdefault(name, handle)
    figure.legend(
        list(labels.values()), list(labels), ncols=6, fontsize="small", loc="outside lower center"
    )
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise SettingError(f"--plot {path}: {error}; give it an ending as .png.") from error


def bars_by_lane(seen: Sequence[events.Event]) -> dict[str, list[Bar]]:
    """What stands in each lane, the host's first; the first event begins at 0 ms."""
    lanes: dict[str, list[Bar]] = {HOST_LANE: []}
    spans = list(_spans(seen))
    first = min((begin for _, _, begin, _ in spans), default=0.0)
    for lane, name, begin, end in spans:
        bar = name, 1e3 * (begin - first), 1e3 * (end - begin)
        lanes.setdefault(lane, []).append(bar)
    return lanes


def _spans(seen: Sequence[events.Event]) -> Iterator[tuple[str, str, float, float]]:
    """(lane, what, begin, end) of what has a length; waiting for the device is not the host's."""
    for event in seen:
        if isinstance(event, events.StageEnded):
            if not event.waits:
                yield HOST_LANE, event.stage, event.begin, event.end
        elif isinstance(event, events.ContextMade):
            yield HOST_LANE, "make context", event.begin, event.end
        elif isinstance(event, events.RunsEnded):
            kernels = dict.fromkeys(stem(run.kernel) for run in event.runs)
            yield event.context, ", ".join(kernels), event.begin, event.end
