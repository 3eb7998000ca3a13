"""The combinations of the swap benchmark: emulated or replayed, held against each other."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from cost_model import Cost
from recorder import Order, Recording, emulate

from npu_embed.eviction import DEFAULT_POLICY, POLICIES, count_swaps, fewest_swaps

MODELLED = "modelled, not measured"
MOST_SLOTS = 16  # of an NPU2


@dataclass(frozen=True, slots=True)
class Point:
    """One combination: what it swaps, and the fewest swaps that any policy could do with."""

    bundle: str
    order: Order
    slots: int
    policy: str
    how: str
    swaps: int
    floor: int
    recording: Recording

    @property
    def contexts(self) -> int:
        """How many contexts the texts need."""
        return self.recording.contexts

    @property
    def subject(self) -> tuple[str, int]:
        """What is compared with itself: a bundle, and in how many contexts its kernels are."""
        return self.bundle, self.contexts

    def cost(self) -> Cost:
        """Modelled milliseconds of all texts."""
        return Cost.of(self.recording.work(self.swaps))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        r = self.recording
        counts = {
            "swaps": self.swaps,
            "floor": self.floor,
            "switches": r.counters.switches,
            "runs": r.counters.runs,
            "gemm_runs": r.gemm_runs,
            "submissions": r.submissions,
        }
        return {
            "benchmark": "swaps",
            "bundle": self.bundle,
            "contexts": self.contexts,
            "order": self.order.name,
            "pack_rows": self.order.pack_rows,
            "slots": self.slots,
            "policy": self.policy,
            "how": self.how,
            "texts": r.texts,
            "tokens": r.tokens,
            "packs": r.packs,
            **counts,
            "per_text": {name: round(n / r.texts, 4) for name, n in counts.items()},
            "modelled_ms_per_text": self.cost().each(r.texts),
            "ms": MODELLED,
        }


def emulated_slots(contexts: int, slots: Sequence[int]) -> list[int]:
    """The slots to really run with: one, about half of the contexts, all of them."""
    return sorted({1, (contexts + 1) // 2, contexts} & set(slots))


def measure(
    bundle: Path, texts: Sequence[str], order: Order, slots: Sequence[int], *, really: bool
) -> Iterator[Point]:
    """Every combination of slots and policy; really: run some of them, do not only replay.

    Raises:
        SystemExit: replayed and emulated swaps or vectors differ.
    """
    with tempfile.TemporaryDirectory(prefix="npu-embed-swaps-") as folder:

        def run(count: int, policy: str) -> Recording:
            emulator = Path(folder) / "emulator"
            return emulate(bundle, texts, order, slots=count, policy=policy, folder=emulator)

        base = run(MOST_SLOTS, DEFAULT_POLICY)
        chosen = emulated_slots(base.contexts, slots) if really else []
        for count, (policy, make) in itertools.product(slots, POLICIES.items()):
            swaps, how = count_swaps(base.sequence, count, make()), "replayed"
            known = count == MOST_SLOTS and policy == DEFAULT_POLICY
            # With one slot, or one for each context, policies have no choice: one run shows it.
            choice = 1 < count < base.contexts or policy == DEFAULT_POLICY
            if known or (count in chosen and choice):
                where = f"{base.bundle}, {order}, {count} slots, policy {policy}"
                check_same(where, swaps, base if known else run(count, policy), base)
                how = "emulated"
            floor = fewest_swaps(base.sequence, count)
            yield Point(base.bundle, order, count, policy, how, swaps, floor, base)


def check_same(where: str, replayed: int, emulated: Recording, base: Recording) -> None:
    """A run must do what the replay says, in the contexts that were recorded, with equal bits.

    Raises:
        SystemExit: it did not.
    """
    swaps = emulated.counters.swaps
    if swaps != replayed:
        raise SystemExit(f"{where}: {swaps} swaps on the emulated NPU, {replayed} replayed.")
    if emulated.sequence != base.sequence or emulated.counters.switches != base.counters.switches:
        raise SystemExit(f"{where}: another order of contexts than with {MOST_SLOTS} slots.")
    if emulated.sha256 != base.sha256:
        raise SystemExit(f"{where}: other vectors than with {MOST_SLOTS} slots.")


def check_floor(points: Sequence[Point]) -> int:
    """In how many combinations `next-use` met the floor, which must be all.

    Raises:
        SystemExit: it did not.
    """
    found = [p for p in points if p.policy == "next-use"]
    for p in found:
        if p.swaps != p.floor:
            raise SystemExit(
                f"{p.bundle}, {p.order}, {p.slots} slots: next-use has {p.swaps} swaps, wanted "
                f"{p.floor}, the fewest possible."
            )
    return len(found)


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """The largest packs beside one text at a time, by bundle and contexts; what was checked."""
    floors = check_floor(points)
    compared = []
    for subject in dict.fromkeys(p.subject for p in points):
        ours = [p for p in points if p.subject == subject and p.policy == DEFAULT_POLICY]
        pack_rows = max(p.order.pack_rows or 0 for p in ours)
        one, packed = ([p for p in ours if p.order.pack_rows == r] for r in (None, pack_rows))
        before, now = one[0].recording, packed[0].recording
        compared.append(
            {
                "bundle": subject[0],
                "contexts": subject[1],
                "texts": now.texts,
                "pack_rows": pack_rows,
                "packs": now.packs,
                "swaps_per_text_by_slots": {
                    name: {p.slots: round(p.swaps / p.recording.texts, 4) for p in of}
                    for name, of in (("one", one), ("packed", packed))
                },
                "times_fewer_gemm_runs": round(before.gemm_runs / now.gemm_runs, 2),
                "times_fewer_switches": round(
                    before.counters.switches / max(now.counters.switches, 1), 2
                ),
            }
        )
    return {
        "benchmark": "swaps",
        "summary": True,
        "compared": compared,
        "points": len(points),
        "emulated": sum(p.how == "emulated" for p in points),
        "next_use_equals_floor": floors,
        "machine": report.machine(),
    }
