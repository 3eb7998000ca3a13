"""Faults of the emulated NPU, planned: which of its runs, contexts and buffers fail, and how.

A plan is text, `NPU_EMBED_EMU_FAULTS`: faults `KIND[=VALUE]@WHEN`, with commas between them.
WHEN counts from 1 since the device was opened: `5` is the fifth, `5+` the fifth and all that
follow, `5/7` the fifth and every seventh after it. What is counted goes by the kind:

runs        timeout, error, abort, suspend, lost, gone, flip, stale
contexts    context=ERRNO: ENOENT, EINVAL, ...; `+ERRNO` has the driver print it without the minus
buffers     heap (those for instructions), memlock (all others)

docs/emulator.md says what each does.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError
from . import txn
from .array import Array
from .command import ShimError
from .controller import Execution, Fault, Stall, execute
from .dma import Piece, words_view
from .flows import Argument, Arguments
from .memory import LINE_BYTES

VARIABLE = "NPU_EMBED_EMU_FAULTS"

OF_RUNS = ("timeout", "error", "abort", "suspend", "lost", "gone", "flip", "stale")
OF_CONTEXTS = ("context",)
OF_BUFFERS = ("heap", "memlock")
KINDS = (*OF_RUNS, *OF_CONTEXTS, *OF_BUFFERS)

_FORM = re.compile(r"([a-z]+)(?:=([^@]+))?@([1-9]\d{0,8})(\+|/[1-9]\d{0,8})?")
BF16_BITS = 16

Refusal: TypeAlias = "tuple[int, int]"  # errno, and the sign it is printed with


class Aborted(Fault):
    """The run ends in state ABORT."""


class NotLocked(ShimError):
    """The memory of a buffer could not be locked: RLIMIT_MEMLOCK."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("CREATE_BO", errno.EAGAIN)
        self.args = (
            f"mmap(addr=0x0, len={size_bytes}, prot=3, flags=8193, offset=0) failed "
            f"(err=-{errno.EAGAIN}): Resource temporarily unavailable",
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault of the plan: at the first-th of what its kind counts, then at every `every`-th.

    every 0 is once. errno and sign are of a context that is not created; rate is the share of
    a run's results that are flipped, None for one of them.
    """

    kind: str
    first: int
    every: int = 0
    errno: int = 0
    sign: int = -1
    rate: float | None = None

    def due(self, count: int) -> bool:
        """Whether it happens at this count."""
        past = count - self.first
        return past == 0 or (past > 0 and self.every > 0 and past % self.every == 0)


def parse(text: str, where: str = VARIABLE) -> tuple[Planned, ...]:
    """The faults of a plan.

    Raises:
        SettingError: it is none; the message names `where` and the fault.
    """
    return tuple(_parse_one(part.strip(), where) for part in text.split(",") if part.strip())


def _parse_one(text: str, where: str) -> Planned:
    found = _FORM.fullmatch(text)
    if found is None:
        raise SettingError(
            f"{where}: {text!r}, wanted KIND@N, KIND@N+ or KIND@N/M, as in 'timeout@5+'."
        )
    kind, value, first, more = found.groups()
    if kind not in KINDS:
        raise SettingError(f"{where}: unknown fault {kind!r}, wanted one of {', '.join(KINDS)}.")
    every = 0 if more is None else 1 if more == "+" else int(more[1:])
    planned = Planned(kind, int(first), every)
    if kind == "context":
        code, sign = _errno(value or "", text, where)
        return Planned(kind, int(first), every, errno=code, sign=sign)
    if kind == "flip" and value is not None:
        return Planned(kind, int(first), every, rate=_rate(value, text, where))
    if value is not None:
        raise SettingError(f"{where}: {text!r}, wanted no value with {kind}.")
    return planned


def _errno(value: str, text: str, where: str) -> Refusal:
    code = getattr(errno, value.lstrip("+-"), None)
    if not isinstance(code, int) or not re.fullmatch(r"[+-]?E[A-Z0-9]+", value):
        raise SettingError(f"{where}: {text!r}, wanted the name of an errno, as in context=ENOSPC.")
    return code, 1 if value.startswith("+") else -1


def _rate(value: str, text: str, where: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 < rate <= 1:
        raise SettingError(f"{where}: {text!r}, wanted a share above 0 and up to 1.")
    return rate


class Faults:
    """A plan being carried out on one device; it counts what the plan counts.

    struck: how many faults of each kind there were.
    """

    def __init__(self, planned: Sequence[Planned], seed: int) -> None:
        self.struck: Counter[str] = Counter()
        self._planned = tuple(planned)
        self._counts: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)

    def _due(self, counted: str, kinds: Sequence[str]) -> list[Planned]:
        self._counts[counted] += 1
        count = self._counts[counted]
        due = [p for p in self._planned if p.kind in kinds and p.due(count)]
        self.struck.update(p.kind for p in due)
        return due

    def of_run(self) -> list[Planned]:
        """What happens to the run that begins now."""
        return self._due("runs", OF_RUNS)

    def of_context(self) -> Refusal | None:
        """What the context that is to be created now fails with."""
        due = self._due("contexts", OF_CONTEXTS)
        return (due[0].errno, due[0].sign) if due else None

    def of_buffer(self, in_heap: bool) -> bool:
        """Whether there is no memory for the buffer that is to be allocated now."""
        kind = OF_BUFFERS[0] if in_heap else OF_BUFFERS[1]
        return bool(self._due(kind, (kind,)))

    def wound(
        self, due: Sequence[Planned], array: Array, stream: bytes, args: Arguments
    ) -> Wound | None:
        """What becomes of a run's results, to be dealt once it has computed them.

        Raises:
            Fault, Stall: it has none; where it ended they are zeros.
        """
        for planned in due:
            if planned.kind == "timeout":
                raise Stall(-1, "planned: the run never ends")
            if planned.kind in ("error", "abort"):
                for _, elements in _written(array, stream, args):
                    elements[...] = 0
                raise (Aborted if planned.kind == "abort" else Fault)(
                    -1, f"planned: {planned.kind}"
                )
        hurting = [planned for planned in due if planned.kind in ("flip", "stale")]
        return (
            Wound(self._random, hurting, list(_written(array, stream, args))) if hurting else None
        )


def _written(
    array: Array, stream: bytes, args: Arguments
) -> Iterator[tuple[Argument, NDArray[np.uint16]]]:
    """The results of a stream on an array as it is now: bf16 elements in device memory.

    Raises:
        Fault, Stall: it has none.
    """
    try:
        decoded = txn.decode(stream, exact=False)
    except txn.TxnError as error:
        raise Fault(error.op_index, str(error)) from None
    run = Execution(array.program.columns, array.registers, num_ops=len(decoded.ops))
    execute(run, decoded, dev_gen=array.dev_gen)
    for (_, direction, _), flow in run.flows.items():
        for piece in flow if direction == "S2MM" else ():
            if piece.arg < len(args) and _fits(piece, args[piece.arg]):
                of = args[piece.arg]
                yield of, words_view(piece, of.memory.device, of.base_bytes)


def _fits(piece: Piece, argument: Argument) -> bool:
    return piece.offset >= 0 and piece.end * 4 <= argument.size_bytes


class Wound:
    """What is done to a run's results; made before it runs, dealt after.

    The host's side is kept as it was before the run: what a stale line goes on showing.
    """

    def __init__(
        self,
        random: np.random.Generator,
        planned: Sequence[Planned],
        written: Sequence[tuple[Argument, NDArray[np.uint16]]],
    ) -> None:
        self._random = random
        self._planned = planned
        self._written = written
        stale = any(p.kind == "stale" for p in planned)
        self._before = {id(of.memory): of.memory.host.copy() for of, _ in written} if stale else {}

    def deal(self) -> None:
        """Flip results, make a line of them stale."""
        for planned in self._planned if self._written else ():
            if planned.kind == "stale":
                self._make_stale()
            else:
                self._flip(planned.rate)

    def _flip(self, rate: float | None) -> None:
        sizes = [elements.size for _, elements in self._written]
        total = sum(sizes)
        if rate is None:
            chosen = self._random.integers(total, size=1)
        else:
            chosen = np.flatnonzero(self._random.random(total) < rate)
        starts = np.cumsum([0, *sizes])
        for index in chosen:
            which = int(np.searchsorted(starts, index, side="right")) - 1
            of, elements = self._written[which]
            place = np.unravel_index(int(index - starts[which]), elements.shape)
            elements[place] ^= np.uint16(1 << int(self._random.integers(BF16_BITS)))
            of.memory.version += 1

    def _make_stale(self) -> None:
        of, elements = self._written[int(self._random.integers(len(self._written)))]
        place = tuple(int(self._random.integers(n)) for n in elements.shape)
        begin = elements.__array_interface__["data"][0] - of.memory.device.ctypes.data
        at = begin + sum(i * stride for i, stride in zip(place, elements.strides, strict=True))
        line = at // LINE_BYTES * LINE_BYTES
        before = self._before[id(of.memory)][line : line + LINE_BYTES]
        of.memory.stale_lines[line] = before.tobytes()
