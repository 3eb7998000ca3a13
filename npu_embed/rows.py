"""Rows: a bf16 [rows, width] buffer on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32, RowBuffer, round_rows, to_bf16, widen_rows
from .device import Buffer, Session, View

BF16_BYTES = 2
PAGE_BYTES = 4096


class Rows:
    """A row buffer: bf16 [rows, width], row-major, zero when made.

    One row more is allocated than asked for: a view that begins at a column and is as long as
    the rows runs past the last row by that column.
    """

    def __init__(self, session: Session, rows: int, width: int) -> None:
        self.rows = rows
        self.width = width
        wanted = (rows + 1) * width * BF16_BYTES
        # Whole pages: no cache line is shared with another buffer.
        self._buffer: Buffer = session.buffer(-(-wanted // PAGE_BYTES) * PAGE_BYTES)
        self._host: NDArray[np.uint16] = (
            self._buffer.host[:wanted].view(np.uint16).reshape(rows + 1, width)
        )
        self._elements = self._host.reshape(-1)

    def put(self, x: F32, *, row: int = 0, col: int = 0) -> None:
        """Write float32 [n, w] as bf16 (nearest even) at (row, col); sync those n rows.

        Raises:
            ValueError: x leaves the buffer.
        """
        n, w = x.shape
        target = self.host(n, w, row=row, col=col)
        if x.flags.c_contiguous:
            round_rows(x, *target)
        else:
            to_bf16(x, out=self._host[row : row + n, col : col + w])
        self.send(n, row=row)

    def host(self, rows: int, cols: int, *, row: int = 0, col: int = 0) -> RowBuffer:
        """The host's side of [rows, cols] from (row, col) on, to be written there: then send.

        Whoever writes it goes by these bounds alone: compiled kernels check none.

        Raises:
            ValueError: they leave the buffer.
        """
        inside = row >= 0 and rows >= 0 and row + rows <= self.rows
        if not (inside and col >= 0 and cols >= 0 and col + cols <= self.width):
            raise ValueError(
                f"[{rows}, {cols}] at ({row}, {col}) leaves rows [{self.rows}, {self.width}]"
            )
        return self._elements, row * self.width + col, self.width

    def send(self, rows: int, *, row: int = 0) -> None:
        """Make the device see rows [row, row + rows) as the host wrote them."""
        row_bytes = self.width * BF16_BYTES
        self._buffer.to_device(row * row_bytes, rows * row_bytes)

    def receive(self, rows: int, cols: int, *, row: int = 0) -> RowBuffer:
        """The host's side of [rows, cols] from a row on, as the device wrote it, to be read there.

        Raises:
            ValueError: they leave the buffer.
        """
        source = self.host(rows, cols, row=row)
        row_bytes = self.width * BF16_BYTES
        self._buffer.from_device(row * row_bytes, rows * row_bytes)
        return source

    def get(self, rows: int, cols: int | None = None, *, row: int = 0) -> F32:
        """Rows [row, row + rows) of the first `cols` columns as float32, synced from the device.

        Raises:
            ValueError: they leave the buffer.
        """
        cols = self.width if cols is None else cols
        source = self.receive(rows, cols, row=row)
        return widen_rows(*source, np.empty((rows, cols), dtype=np.float32))

    def bits(self, rows: int, *, row: int = 0) -> NDArray[np.uint16]:
        """A copy of rows [row, row + rows) as bf16 bits, synced from the device."""
        self.receive(rows, self.width, row=row)
        copied: NDArray[np.uint16] = self._host[row : row + rows].copy()
        return copied

    def view(self, row: int, col: int, elems: int) -> View:
        """The `elems` elements from (row, col) on, as a kernel's argument.

        Raises:
            ValueError: they leave the buffer, its extra row included.
        """
        start = (row * self.width + col) * BF16_BYTES
        return self._buffer.view(start, elems * BF16_BYTES)
