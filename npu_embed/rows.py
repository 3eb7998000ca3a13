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
        if row < 0 or col < 0 or row + n > self.rows or col + w > self.width:
            raise ValueError(
                f"put: [{n}, {w}] at ({row}, {col}) leaves [{self.rows}, {self.width}]"
            )
        if x.flags.c_contiguous:
            elements, first, stride = self.host(row)
            round_rows(x, elements, first + col, stride)
        else:
            to_bf16(x, out=self._host[row : row + n, col : col + w])
        self.send(n, row=row)

    def host(self, row: int = 0) -> RowBuffer:
        """The host's side from a row on, for a host step that writes rows itself: then send."""
        return self._elements, row * self.width, self.width

    def send(self, rows: int, *, row: int = 0) -> None:
        """Make the device see rows [row, row + rows) as the host wrote them."""
        row_bytes = self.width * BF16_BYTES
        self._buffer.to_device(row * row_bytes, rows * row_bytes)

    def receive(self, rows: int, *, row: int = 0) -> RowBuffer:
        """The host's side from a row on, with rows [row, row + rows) as the device wrote them.

        Raises:
            ValueError: they leave the buffer.
        """
        if row < 0 or rows < 0 or row + rows > self.rows:
            raise ValueError(f"get: rows {row} to {row + rows} leave [{self.rows}, {self.width}]")
        row_bytes = self.width * BF16_BYTES
        self._buffer.from_device(row * row_bytes, rows * row_bytes)
        return self.host(row)

    def get(self, rows: int, cols: int | None = None, *, row: int = 0) -> F32:
        """Rows [row, row + rows) of the first `cols` columns as float32, synced from the device.

        Raises:
            ValueError: they leave the buffer.
        """
        cols = self.width if cols is None else cols
        if not 0 <= cols <= self.width:
            raise ValueError(f"get: {cols} columns leave [{self.rows}, {self.width}]")
        return widen_rows(*self.receive(rows, row=row), np.empty((rows, cols), dtype=np.float32))

    def bits(self, rows: int, *, row: int = 0) -> NDArray[np.uint16]:
        """A copy of rows [row, row + rows) as bf16 bits, synced from the device."""
        self.receive(rows, row=row)
        copied: NDArray[np.uint16] = self._host[row : row + rows].copy()
        return copied

    def view(self, row: int, col: int, elems: int) -> View:
        """The `elems` elements from (row, col) on, as a kernel's argument.

        Raises:
            ValueError: they leave the buffer, its extra row included.
        """
        start = (row * self.width + col) * BF16_BYTES
        return self._buffer.view(start, elems * BF16_BYTES)
