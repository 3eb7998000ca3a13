"""Columns of the array, and its hardware contexts: how many there may be, and who holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .. import settings
from ..emulator import profile, slots
from .findings import Finding, passed
from .ioctls import read_columns, read_context_limit, read_contexts
from .machine import Machine


def check_array(machine: Machine, node: Path) -> Finding:
    """What the driver says of the array's columns."""
    try:
        columns = read_columns(lambda what, size: machine.query(node, what, size))
    except OSError as error:
        return _not_told("array", "columns", error)
    return passed("array", f"{columns} columns, the driver says", columns=columns)


def check_slots(machine: Machine, node: Path) -> Finding:
    """How many contexts the driver says there may be, and which processes hold some."""

    def ask(what: int, size: int) -> bytes:
        return machine.query(node, what, size)

    try:
        held = read_contexts(ask)
    except OSError as error:
        return _not_told("slots", "who holds contexts", error)
    try:
        limit = read_context_limit(ask) or None
    except OSError:  # an older driver does not know the question
        limit = None
    return _slots(machine, "slots", (context.pid for context in held), limit)


def check_emulated_slots(machine: Machine) -> Finding:
    """The emulated NPU's slots, which all processes of the machine share.

    Raises:
        SettingError: a setting of the emulated NPU is wrong.
    """
    limit = settings.emulator_slots(profile.current().slots)
    folder = settings.emulator_dir()
    try:
        holders = slots.table(folder).holders(limit)
    except OSError as error:
        return Finding(
            "emulated slots",
            "FAIL",
            "no-table",
            f"{folder}: {error}",
            "a folder for the slot table",
            "set NPU_EMBED_EMU_DIR to a folder you own",
        )
    return _slots(machine, "emulated slots", holders.values(), limit)


def _slots(machine: Machine, check: str, pids: Iterable[int], limit: int | None) -> Finding:
    held = Counter(pids)
    count = sum(held.values())
    holders = [f"{n} by {machine.process(pid)}" for pid, n in sorted(held.items())]
    found = f"{count} of {limit} held" if limit else f"{count} held, the driver tells no limit"
    found += f": {', '.join(holders)}" if holders else ""
    facts = {"limit": limit, "held": count, "pids": sorted(held), "holders": holders}
    if limit is not None and count >= limit:
        return Finding(
            check,
            "WARN",
            "full",
            found,
            "a free one",
            "close one of these programs, or let it release its contexts when idle "
            "(NPU_EMBED_IDLE_RELEASE_MS)",
            facts,
        )
    return passed(check, found, **facts)


def _not_told(check: str, what: str, error: OSError) -> Finding:
    return Finding(
        check,
        "WARN",
        "not-told",
        f"the driver does not tell {what} ({error.strerror or error})",
        "it to",
        "see `node`; a newer driver may tell",
    )
