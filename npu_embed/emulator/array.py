"""A partition of the emulated array: registers, core memory, and the program its cores run.

Streams are executed once and kept as plans: what they compute, which registers they leave, and
which they relied on. A plan is used again while the stream's words and those registers are
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import txn
from .controller import Fault, Stall, execute, reset_value
from .dma import WORD_BYTES, Piece
from .flows import Arguments, Scratch
from .gemm import GemmCall, GemmProgram
from .mha import MhaCall, MhaProgram
from .program import NoArrayProgram, read_constants

PROGRAMS: dict[str, Callable[..., GemmProgram | MhaProgram]] = {
    "gemm": GemmProgram,
    "mha": MhaProgram,
}
MAX_CONSTANT = 1 << 20
OCTET = 8


def load_program(pdi: bytes) -> GemmProgram | MhaProgram:
    """The array program a PDI names.

    Raises:
        NoArrayProgram: none, an unknown one, or constants it cannot have.
    """
    constants: dict[str, Any] = read_constants(pdi)
    name = constants.pop("program", None)
    if name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        raise NoArrayProgram(f"array program {name!r}, this emulator knows {known}")
    for key, value in constants.items():
        if type(value) is not int or not 1 <= value <= MAX_CONSTANT:
            raise NoArrayProgram(f"array program {name}: {key}={value!r}, wanted a small integer")
    try:
        program = PROGRAMS[name](**constants)
    except TypeError as error:
        raise NoArrayProgram(f"array program {name}: {error}") from error
    if isinstance(program, GemmProgram):
        sound = program.k_tile % OCTET == 0 and program.n_tile % (2 * OCTET) == 0
    else:
        sound = program.heads % program.kv_heads == 0 and program.head_dim % 2 == 0
    if not sound or program.core_rows > program.columns:
        raise NoArrayProgram(f"array program {name}: constants {constants} contradict each other")
    return program


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stream does, given the registers it read."""

    entry_reads: dict[int, int]
    writes: dict[int, int]
    extents: tuple[tuple[int, int, int], ...]  # argument, lowest and one past the highest byte
    call: GemmCall | MhaCall | None
    failure: Fault | Stall | None


def _extents(pieces: list[Piece]) -> tuple[tuple[int, int, int], ...]:
    found: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        low, high = found.get(piece.arg, (piece.offset, piece.end))
        found[piece.arg] = min(low, piece.offset), max(high, piece.end)
    return tuple(
        (arg, low * WORD_BYTES, high * WORD_BYTES) for arg, (low, high) in sorted(found.items())
    )


class PlanCache:
    """Plans by program and stream, shared by the contexts of a device."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, bytes], list[Plan]] = {}

    def find(self, program: GemmProgram | MhaProgram, stream: bytes, array: Array) -> Plan:
        """The plan of a stream on an array in its present state, made if there is none yet."""
        plans = self._plans.setdefault((program, stream), [])
        for plan in plans:
            if all(array.read(a) == value for a, value in plan.entry_reads.items()):
                return plan
        plans.append(self._make(program, stream, array))
        return plans[-1]

    @staticmethod
    def _make(program: GemmProgram | MhaProgram, words: bytes, array: Array) -> Plan:
        try:
            stream = txn.decode(words)
        except txn.TxnError as error:
            return Plan({}, {}, (), None, Fault(error.op_index, str(error)))
        try:
            run = execute(stream, array.registers, columns=program.columns, dev_gen=array.dev_gen)
            call = program.bind(run)
        except (Fault, Stall) as failure:
            # What a failing stream read is not known in full, so its plan holds for this state
            # only.
            return Plan(dict(array.registers), {}, (), None, failure)
        return Plan(run.entry_reads, run.writes, _extents(call.pieces), call, None)


class Array:
    """One context's partition."""

    def __init__(self, pdi: bytes, dev_gen: int, plans: PlanCache) -> None:
        self.program = load_program(pdi)
        self.dev_gen = dev_gen
        self.registers: dict[int, int] = {}
        self._plans = plans

    def reset(self) -> None:
        """Lose registers and core memory, as when another context had the array."""
        self.registers.clear()

    def read(self, address: int) -> int:
        """A register or core memory word, as a stream would find it."""
        return self.registers.get(address, reset_value(address))

    def run(self, stream: bytes, args: Arguments, scratch: Scratch) -> None:
        """Execute a stream with its arguments bound.

        Raises:
            Fault, Stall: the run ends in state ERROR, or never.
        """
        plan = self._plans.find(self.program, stream, self)
        if plan.failure is not None:
            raise plan.failure
        assert plan.call is not None
        for arg, low, high in plan.extents:
            if arg >= len(args):
                raise Fault(-1, f"the stream uses buffer {arg}, the run has {len(args)}")
            if low < 0 or high > args[arg].size_bytes:
                raise Fault(
                    -1,
                    f"IOMMU fault: bytes {low} to {high} of buffer {arg}, which has "
                    f"{args[arg].size_bytes}",
                )
        self.registers.update(plan.writes)
        plan.call(args, scratch)
