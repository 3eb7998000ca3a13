"""The array the exporter writes programs for: its size, its tiles, its run-time words.

Source: docs/array-programs.md, which is normative; these are its constants under their names there.
"""

from __future__ import annotations

import enum

COLUMNS = 4
CORE_ROWS = 4
FIRST_CORE_ROW = 2  # row 0 is the shim, row 1 the memory tile
ROWS_PER_CORE = 16
ROW_TILE = 4  # rows the cores' matrix unit takes at once; a core's rows of a run are whole tiles
M = CORE_ROWS * ROWS_PER_CORE  # rows of one GEMM chunk, at most
K_TILE = 64
N_TILE = 64
RTP_OFFSET = 1024  # bytes into each core's data memory

NO_WINDOW = 0xFFFFFFFF

# Columns of the whole device, as a stream's header names them, by device generation.
DEVICE_COLUMNS = {3: 4, 4: 8}


class Epilogue(enum.IntEnum):
    """What a GEMM does to its sum before rounding; the value is run-time word 3."""

    NONE = 0
    GELU_ERF = 1
    GELU_TANH = 2
    GEGLU_PAIR = 3
    TANH = 4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple
