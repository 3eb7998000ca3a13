"""A partition of the emulated array: registers, core memory, and the program its cores run.

Streams are executed once and kept as plans: what they compute, which registers they leave, and
which they relied on. A plan is used again while the stream's words and those registers are
unchanged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from . import txn
from .controller import (
    CORE_DATA_BYTES,
    FIRST_CORE_ROW,
    LAST_ROW,
    Execution,
    Fault,
    Stall,
    execute,
    reset_value,
)
from .dma import WORD_BYTES, Piece
from .flows import Arguments
from .gemm import GemmProgram
from .gemm_call import GemmCall
from .mha import MhaProgram
from .mha_call import MhaCall
from .mha_list import compute_list
from .program import NoArrayProgram, read_constants

PROGRAMS: dict[str, Callable[..., GemmProgram | MhaProgram]] = {
    "gemm": GemmProgram,
    "mha": MhaProgram,
}
MAX_CONSTANT = 1 << 20
MAX_CORE_ROWS = LAST_ROW - FIRST_CORE_ROW + 1
RTP_BYTES = 64  # more than any program's run-time words take
OCTET = 8
MAX_PLANS = 4096  # streams kept; a patched word makes another one
MAX_PLAN_BYTES = 256 << 20  # of those streams together
MAX_STATES = 8  # register states kept of each stream

Bound: TypeAlias = "tuple[GemmCall | MhaCall, Arguments]"


def load_program(pdi: bytes, partition_columns: int) -> GemmProgram | MhaProgram:
    """The array program a PDI names, on a partition that wide.

    Raises:
        NoArrayProgram: none, an unknown one, or constants it cannot have.
    """
    constants: dict[str, Any] = read_constants(pdi)
    name = constants.pop("program", None)
    if not isinstance(name, str) or name not in PROGRAMS:
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
        # Row r of the cores is fed by column r's shim.
        sound = sound and program.core_rows <= program.columns
        sound = sound and program.rows_per_core % (program.row_tile or 1) == 0
    else:
        sound = program.heads % program.kv_heads == 0 and program.head_dim % 2 == 0
    sound = (
        sound
        and program.columns <= partition_columns
        and program.core_rows <= MAX_CORE_ROWS
        and program.rtp_offset % WORD_BYTES == 0
        and program.rtp_offset + RTP_BYTES <= CORE_DATA_BYTES
    )
    if not sound:
        raise NoArrayProgram(
            f"array program {name}: constants {constants} contradict each other or the partition "
            f"of {partition_columns} columns and {MAX_CORE_ROWS} core rows"
        )
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
    """Plans by program and stream, shared by the contexts of a device; the oldest are dropped."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[object, bytes], list[Plan]] = OrderedDict()
        self._stream_bytes = 0

    def find(self, program: GemmProgram | MhaProgram, stream: bytes, array: Array) -> Plan:
        """The plan of a stream on an array in its present state, made if there is none yet."""
        key = (program, stream)
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plans[key] = []
            self._stream_bytes += len(stream)
            while len(self._plans) > MAX_PLANS or self._stream_bytes > MAX_PLAN_BYTES:
                self._stream_bytes -= len(self._plans.popitem(last=False)[0][1])
        else:
            self._plans.move_to_end(key)
        for plan in plans:
            if array.holds(plan.entry_reads):
                return plan
        if len(plans) >= MAX_STATES:
            del plans[0]
        plans.append(self._make(program, stream, array))
        return plans[-1]

    @staticmethod
    def _make(program: GemmProgram | MhaProgram, words: bytes, array: Array) -> Plan:
        try:
            stream = txn.decode(words, exact=False)  # the buffer may be longer than its stream
        except txn.TxnError as error:
            return Plan({}, {}, (), None, Fault(error.op_index, str(error)))
        run = Execution(program.columns, array.registers, num_ops=len(stream.ops))
        try:
            execute(run, stream, dev_gen=array.dev_gen)
            call = program.bind(run)
        except (Fault, Stall) as failure:
            # It fails so whenever what it read up to there is the same.
            return Plan(run.entry_reads, {}, (), None, failure.with_traceback(None))
        return Plan(run.entry_reads, run.writes, _extents(call.pieces), call, None)


class Array:
    """One context's partition."""

    def __init__(self, pdi: bytes, dev_gen: int, plans: PlanCache, partition_columns: int) -> None:
        self.program = load_program(pdi, partition_columns)
        self.program_name = next(n for n, kind in PROGRAMS.items() if kind is type(self.program))
        self.dev_gen = dev_gen
        self.registers: dict[int, int] = {}
        self._plans = plans
        self._latest: Plan | None = None

    def reset(self) -> None:
        """Lose registers and core memory, as when another context had the array."""
        self.registers.clear()
        self._latest = None

    def read(self, address: int) -> int:
        """A register or core memory word, as a stream would find it."""
        value = self.registers.get(address)
        return reset_value(address) if value is None else value

    def holds(self, words: Mapping[int, int]) -> bool:
        """Whether all of these registers and core memory words have these values."""
        registers = self.registers
        for address, value in words.items():
            found = registers.get(address)
            if found != value and (found is not None or reset_value(address) != value):
                return False
        return True

    def bind(self, stream: bytes, args: Arguments) -> Bound:
        """A stream executed up to its computation, with its arguments bound.

        Raises:
            Fault, Stall: the run ends in state ERROR, or never.
        """
        plan = self._plans.find(self.program, stream, self)
        if plan.failure is not None:
            raise type(plan.failure)(plan.failure.op_index, str(plan.failure))
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
        if plan is not self._latest:  # else they hold what it writes
            self.registers.update(plan.writes)
            self._latest = plan
        return plan.call, args


def compute(runs: Sequence[Bound]) -> None:
    """Do bound runs in order, attentions that follow each other in one go."""
    for attention, group in groupby(runs, key=lambda bound: isinstance(bound[0], MhaCall)):
        some = list(group)
        if attention:
            compute_list(some)  # type: ignore[arg-type]
        else:
            for call, args in some:
                call(args)
