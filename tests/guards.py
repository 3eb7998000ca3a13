"""Runs of the emulated array with guards around every argument.

The compiled kernels check no bounds, and numpy checks only those of the allocation. Here an
argument lies in the middle of its allocation: what a run writes outside the argument shows in the
guards, and what it reads there shows in its results, which other guards must not change. So the
results must not be NaN for other reasons: what the arguments hold is finite, unless `nans`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from handmade import DEV_GEN, U16

from npu_embed.emulator.array import Array, PlanCache, compute
from npu_embed.emulator.controller import Fault, Stall
from npu_embed.emulator.flows import Argument
from npu_embed.emulator.memory import Memory

GUARD_BYTES = 1 << 14
BELOW_2 = 0xBF  # of a bfloat16's upper byte: without the exponent's highest bit

Found = list[U16] | str


def guarded_run(
    image: bytes,
    columns: int,
    stream: bytes,
    sizes: Sequence[int],
    nans: bool = False,
    base: int = 0,
    seed: int = 0,
) -> Found:
    """The arguments after a run of a stream, or why it failed.

    image: a PDI. sizes: the arguments' bytes; they begin `base` bytes past their guard.

    Raises:
        AssertionError: the run read or wrote outside its arguments.
    """
    found = _run(image, columns, stream, sizes, base, (seed, seed + 1), nans)
    again = _run(image, columns, stream, sizes, base, (seed, seed + 2), nans)
    if isinstance(found, str) or isinstance(again, str):
        assert found == again
    else:
        for i, (first, second) in enumerate(zip(found, again, strict=True)):
            assert (first == second).all(), f"argument {i} holds what was read outside"
    return found


def _run(
    image: bytes,
    columns: int,
    stream: bytes,
    sizes: Sequence[int],
    base: int,
    seeds: tuple[int, int],
    nans: bool,
) -> Found:
    contents, guards = (np.random.default_rng(seed) for seed in seeds)
    begin = GUARD_BYTES + base
    arguments = []
    for size in sizes:
        memory = Memory(begin + size + GUARD_BYTES, None)
        memory.host[:] = guards.integers(0, 256, memory.size, np.uint8)
        memory.host[begin : begin + size] = contents.integers(0, 256, size, np.uint8)
        if not nans:
            memory.host[begin + 1 : begin + size : 2] &= BELOW_2
        memory.sync_to_device(0, memory.size)
        arguments.append(Argument(memory, begin, size))
    before = [argument.memory.device.copy() for argument in arguments]
    try:
        compute([Array(image, DEV_GEN, PlanCache(), columns).bind(stream, arguments)])
    except (Fault, Stall) as failure:
        return str(failure)
    for i, (argument, old) in enumerate(zip(arguments, before, strict=True)):
        for side, was in ((argument.memory.device, old), (argument.memory.host, old)):
            end = begin + argument.size_bytes
            assert (side[:begin] == was[:begin]).all(), f"written before argument {i}"
            assert (side[end:] == was[end:]).all(), f"written past argument {i}"
    return [a.memory.device[begin : begin + a.size_bytes].copy() for a in arguments]
