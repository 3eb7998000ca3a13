"""The whole examination, in the order in which one thing rests on another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..bundle import Bundle
from ..emulator import profile
from ..errors import NpuEmbedError
from .binding import check_pyxrt
from .bundles import (
    check_contexts,
    check_target,
    chosen_bundle,
    no_bundle,
    open_bundle,
    weights_bytes,
)
from .child import run_in_child
from .findings import Finding, Status
from .hardware import check_driver, check_firmware, check_npus, find_npus
from .machine import Machine, this_machine
from .memlock import check_memlock
from .node import check_node, find_nodes
from .runs import check_bundle, run_emulated
from .sandbox import check_sandbox, find_sandbox
from .slots import check_array, check_emulated_slots, check_slots
from .software import check_python, check_settings
from .xrt import check_xrt


@dataclass(slots=True)
class _Seen:
    """What the checks of the hardware came to, for those of the bundle.

    works: a device could be opened with pyxrt. generation and limit are None where not known.
    """

    works: bool = False
    generation: str | None = None
    limit: int | None = None


def examine(
    bundle: str | Path | None = None,
    device: str | None = None,
    machine: Machine | None = None,
) -> Iterator[Finding]:
    """Everything that may keep texts from being embedded, each finding as soon as it is known.

    bundle: the one to check; None is NPU_EMBED_BUNDLE, else the default one if it is made. device:
    "npu" demands a real one, "emulated" leaves the hardware out, "auto" takes what there is; None
    is what NPU_EMBED_DEVICE says. machine: this one, if None.

    Raises:
        SettingError: no such device name.
    """
    if device is not None:
        settings.check_choice("device", "device", device, settings.DEVICES)
    machine = this_machine() if machine is None else machine
    yield check_python(machine)
    set_well = check_settings(machine)
    yield set_well
    if set_well.status == "FAIL":
        return  # whatever runs would only stop at the same setting
    device = settings.device() if device is None else device
    try:
        path = chosen_bundle(bundle)
    except NpuEmbedError as error:
        yield Finding("bundle", "FAIL", "no-recipe", str(error).rstrip("."))
        return
    seen = _Seen()
    if device != "emulated":
        yield from _hardware(machine, path, seen, demanded=device == "npu")
    opened = None if path is None else open_bundle(path)
    try:
        yield from _bundle_and_runs(machine, path, opened, device, seen)
    finally:
        if isinstance(opened, Bundle):
            opened.close()


def _hardware(
    machine: Machine, path: Path | None, seen: _Seen, *, demanded: bool
) -> Iterator[Finding]:
    """The NPU and all below the engine. demanded: it is a failure that there is none."""
    npus = find_npus(machine)
    nodes = find_nodes(machine, npus)
    sandbox = find_sandbox(machine)
    present = bool(npus or nodes)
    bad: Status = "FAIL" if demanded or present else "WARN"
    yield check_sandbox(sandbox, node=bool(nodes))
    yield check_npus(npus, node=bool(nodes), bad=bad)
    if not (present or demanded):
        return  # what an NPU would need is nothing to warn of
    yield check_driver(machine, npus, bad)
    if npus:
        yield check_firmware(machine, npus, bad)
    at_node = check_node(machine, nodes, sandbox, bad)
    yield at_node
    yield check_memlock(machine, 0 if path is None else weights_bytes(path), sandbox, bad)
    yield check_xrt(machine, bad)
    probe = machine.pyxrt()
    yield check_pyxrt(machine, probe, bad)
    if nodes and at_node.status == "PASS":
        yield check_array(machine, nodes[0])
        slots = check_slots(machine, nodes[0])
        limit = slots.facts.get("limit")
        seen.limit = limit if isinstance(limit, int) else None
        yield slots
    seen.works = probe.works
    seen.generation = npus[0].generation if npus else None


def _bundle_and_runs(
    machine: Machine, path: Path | None, opened: Bundle | Finding | None, device: str, seen: _Seen
) -> Iterator[Finding]:
    compiled = isinstance(opened, Bundle) and not opened.has_array_programs
    on_npu = seen.works and compiled
    if on_npu or device == "npu":
        generation, limit = seen.generation, seen.limit
    else:
        yield check_emulated_slots(machine)
        emulated = profile.current()
        generation, limit = emulated.name, settings.emulator_slots(emulated.slots)
        yield from run_emulated()
    if device == "npu" and not on_npu:
        yield _not_run(seen, compiled=compiled)
    elif seen.works and not on_npu and isinstance(opened, Bundle):
        yield _only_emulated()
    if opened is None or path is None:
        yield no_bundle()
        return
    if isinstance(opened, Finding):
        yield opened
        return
    target = check_target(opened, generation, on_npu=on_npu, demanded=device == "npu")
    yield target
    yield check_contexts(opened, limit)
    if target.situation == "other-generation":
        return
    if on_npu:
        yield from run_in_child(path)
    elif opened.has_array_programs and device != "npu":
        yield from check_bundle(path, "emulated")


def _not_run(seen: _Seen, *, compiled: bool) -> Finding:
    if seen.works and not compiled:
        return Finding(
            "runs",
            "FAIL",
            "array-programs",
            "no bundle with kernels compiled for the NPU",
            "one, to run on it",
            "name one: `npu-embed doctor BUNDLE`; bundles of this version's exporter run on the "
            "emulated NPU only",
        )
    return Finding(
        "runs",
        "FAIL",
        "no-npu",
        "nothing was run: no NPU can be used",
        "one, as --device npu demands",
        "see what failed above; `--device emulated` checks the emulated one",
    )


def _only_emulated() -> Finding:
    return Finding(
        "runs",
        "WARN",
        "array-programs",
        "nothing was run on the NPU: the bundle's kernels are array programs",
        "kernels compiled for it",
        "the runs below are the emulated NPU's",
    )
