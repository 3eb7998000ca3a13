"""What the array programs share: run-time words, and the accounts of what each channel moved."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .controller import Channel, Execution, Fault, Stall
from .dma import Piece
from .flows import flow_words

PDI_MAGIC = bytes.fromhex("DD00000044332211")
PROGRAM_MAGIC = b"NPUEMBED"
PROGRAM_FORMAT = 1
MAX_CONSTANTS_BYTES = 1 << 16  # of JSON; a program has some hundreds
MAX_RTP = 1 << 16  # no loop of a program runs more often
MAX_ELEMS = 1 << 28  # of a run's operands and results: 1 GiB of float32


class NoArrayProgram(ValueError):
    """A PDI that names no array program: machine code for real cores, or damage."""


def read_constants(pdi: bytes) -> dict[str, Any]:
    """The array program named in a PDI, with its compile-time constants.

    Raises:
        NoArrayProgram: it names none, or not in the form of docs/array-programs.md.
    """
    head = len(PDI_MAGIC) + len(PROGRAM_MAGIC)
    if pdi[:head] != PDI_MAGIC + PROGRAM_MAGIC or len(pdi) < head + 8:
        raise NoArrayProgram(
            "this xclbin holds code for real AIE cores, which the emulated NPU cannot run; "
            'use device="npu"'
        )
    version, size = struct.unpack_from("<II", pdi, head)
    if size > MAX_CONSTANTS_BYTES:
        raise NoArrayProgram(
            f"array program of {size} bytes, wanted at most {MAX_CONSTANTS_BYTES}; export the "
            "bundle again"
        )
    if version != PROGRAM_FORMAT or head + 8 + size > len(pdi):
        raise NoArrayProgram(
            f"array program format {version} of {size} bytes, wanted format {PROGRAM_FORMAT} "
            f"within {len(pdi)} bytes; export the bundle again"
        )
    try:
        constants = json.loads(pdi[head + 8 : head + 8 + size].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise NoArrayProgram(
            f"array program is not JSON ({error}); export the bundle again"
        ) from error
    if not isinstance(constants, dict):
        raise NoArrayProgram("array program is no JSON object; export the bundle again")
    return constants


def read_rtp(
    run: Execution,
    *,
    columns: int,
    core_rows: int,
    offset: int,
    words: int,
    active_word: int,
    shared_words: Collection[int],
    own_words: Collection[int] = (),
) -> list[list[int]]:
    """The run-time words of each active column, as its first core holds them.

    Words named in own_words may differ from core to core; the others must agree in a column, and
    shared_words across the active columns. Active columns come first.

    Raises:
        Stall: cores that disagree wait for each other for ever; so does an array without work.
    """
    table = [
        [
            [run.core_word(col, row, offset + 4 * word) for word in range(words)]
            for row in range(core_rows)
        ]
        for col in range(columns)
    ]
    active: list[list[int]] = []
    for col, cores in enumerate(table):
        first = cores[0]
        if any(core[active_word] != first[active_word] for core in cores):
            raise Stall(run.num_ops, f"cores of column {col} disagree about word {active_word}")
        if first[active_word] == 0:
            continue
        if len(active) != col:
            raise Stall(run.num_ops, f"column {col} works while column {len(active)} is idle")
        for word in range(words):
            if word not in own_words and any(core[word] != first[word] for core in cores):
                raise Stall(run.num_ops, f"cores of column {col} disagree about word {word}")
            if word in shared_words and active and first[word] != active[0][word]:
                raise Stall(run.num_ops, f"columns 0 and {col} disagree about word {word}")
            if word not in own_words and first[word] > MAX_RTP:
                raise Stall(run.num_ops, f"word {word} of column {col} is {first[word]}")
        active.append(first)
    if not active:
        raise Stall(run.num_ops, "no column has work")
    return active


def expect_words(run: Execution, channel: Channel, words: int) -> list[Piece]:
    """The channel's pieces, which must move exactly `words` words.

    Raises:
        Stall: fewer words than the program reads, or more than it writes.
        Fault: data left over in the array, which would enter the next run.
    """
    col, direction, number = channel
    flow = run.flows.get(channel, [])
    found = flow_words(flow)
    if found == words and flow:
        return flow
    text = f"{direction}{number} of column {col} moves {found} words, the program wants {words}"
    starves = found < words if direction == "MM2S" else found > words
    raise (Stall if starves or not flow else Fault)(run.num_ops, text)


def check_work(run: Execution, elems: int) -> None:
    """Refuse a run whose operands and results are more than the emulator holds in memory.

    A descriptor may read a small buffer over and over, so the buffers' sizes are no bound.

    Raises:
        Fault: naming both numbers.
    """
    if elems > MAX_ELEMS:
        raise Fault(
            run.num_ops, f"{elems} elements to compute with, the emulated NPU takes {MAX_ELEMS}"
        )


def check_waits(run: Execution, ready: Callable[[int, Mapping[Channel, int]], int]) -> None:
    """Refuse a wait for results before their operands were pushed.

    ready(column, words moved so far by channel) -> the words of the column's result there can be.

    Raises:
        Stall: nothing would ever come.
    """
    for wait in run.waits:
        found = ready(wait.channel[0], wait.moved)
        if found < wait.words:
            raise Stall(
                wait.op_index,
                f"waits for {wait.words} words of column {wait.channel[0]}, the operands pushed "
                f"so far give {found}",
            )


def refuse_other_flows(run: Execution, expected: Collection[Channel]) -> None:
    """Refuse flows on channels the program does not use.

    Raises:
        Fault: data pushed where no core takes it.
    """
    for col, direction, number in run.flows:
        if (col, direction, number) not in expected:
            raise Fault(
                run.num_ops, f"{direction}{number} of column {col} is not used by this program"
            )
