"""The swap benchmark's tables for people, on stderr."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recorder import Order
from reference_runtime import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from swap_points import MODELLED, Point, emulated_slots

from npu_embed.eviction import DEFAULT_POLICY, POLICIES

LINE_CHARS = 150  # at least, since a narrower table would lose digits


def show(points: Sequence[Point], figures: Sequence[Figure], *, markdown: bool) -> None:
    """A table a bundle and number of contexts, and one of the model's reproductions."""
    console = Console(stderr=True)
    console.width = max(console.width, LINE_CHARS)
    style = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    for bundle, contexts in dict.fromkeys(p.subject for p in points):
        of = [p for p in points if p.subject == (bundle, contexts)]
        r = of[0].recording
        console.print(
            f"{bundle}, {contexts} contexts, {r.texts} texts, {r.tokens} tokens: a text's "
            f"share (ms: {MODELLED})"
        )
        table = Table(box=style)
        for heading in ("order", "slots"):
            table.add_column(
                heading, justify="right" if heading == "slots" else "left", no_wrap=True
            )
        for heading in (*(f"swaps, {policy}" for policy in POLICIES), "fewest"):
            table.add_column(heading, justify="right")
        for heading in ("switches", "runs", "GEMM runs", "ms, all", f"ms, {DEFAULT_POLICY}"):
            table.add_column(heading, justify="right")
        table.add_column(f"how, {DEFAULT_POLICY}", no_wrap=True)
        for row in rows(of):
            table.add_row(*row)
        console.print(table)
    console.print(f"The reference runtime's published times (ms: {MODELLED})")
    table = Table(box=style)
    for heading in ("what", "ms published", "ms modelled", "off by", "constant fitted to it"):
        table.add_column(heading, justify="right" if heading[:2] in ("ms", "of") else "left")
    for f in figures:
        published = f"{f.low_ms:g}" if f.low_ms == f.high_ms else f"{f.low_ms:g} to {f.high_ms:g}"
        fitted = f.fitted or "none"
        table.add_row(f.name, published, f"{f.modelled_ms:.0f}", f"{f.deviation:+.0%}", fitted)
    console.print(table)


def rows(points: Sequence[Point]) -> Iterator[list[str]]:
    """Of one bundle: all orders with one slot, the outermost orders with more; all policies."""
    groups: dict[tuple[Order, int], dict[str, Point]] = {}
    for p in points:
        groups.setdefault((p.order, p.slots), {})[p.policy] = p
    largest = max(p.order.pack_rows or 0 for p in points)
    wanted = emulated_slots(points[0].contexts, [p.slots for p in points])
    for (order, slots), of in groups.items():
        outermost = order.pack_rows in (None, largest)
        if slots not in wanted or (slots > 1 and not outermost):
            continue
        default, r = of[DEFAULT_POLICY], of[DEFAULT_POLICY].recording
        counts = [of[policy].swaps for policy in POLICIES]
        counts += [default.floor, r.counters.switches, r.counters.runs, r.gemm_runs]
        yield [
            str(order),
            str(slots),
            *(f"{count / r.texts:.4g}" for count in counts),
            *(f"{of[policy].cost().total / r.texts:.1f}" for policy in ("all", DEFAULT_POLICY)),
            default.how,
        ]
