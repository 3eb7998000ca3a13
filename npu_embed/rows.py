"""Rows: a bf16 [rows, width] buffer on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32, to_bf16, to_f32
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
        to_bf16(x, out=self._host[row : row + n, col : col + w])
        row_bytes = self.width * BF16_BYTES
        self._buffer.to_device(row * row_bytes, n * row_bytes)

    def get(self, rows: int, cols: int | None = None, *, row: int = 0) -> F32:
        """Rows [row, row + rows) of the first `cols` columns as float32, synced from the device.

        Raises:
            ValueError: they leave the buffer.
        """
        cols = self.width if cols is None else cols
        if row < 0 or rows < 0 or row + rows > self.rows or not 0 <= cols <= self.width:
            raise ValueError(
                f"get: [{rows}, {cols}] from row {row} leaves [{self.rows}, {self.width}]"
            )
        row_bytes = self.width * BF16_BYTES
        self._buffer.from_device(row * row_bytes, rows * row_bytes)
        return to_f32(self._host[row : row + rows, :cols])

    def bits(self, rows: int, *, row: int = 0) -> NDArray[np.uint16]:
        """A copy of rows [row, row + rows) as bf16 bits, synced from the device."""
        row_bytes = self.width * BF16_BYTES
        self._buffer.from_device(row * row_bytes, rows * row_bytes)
        copied: NDArray[np.uint16] = self._host[row : row + rows].copy()
        return copied

    def view(self, row: int, col: int, elems: int) -> View:
        """The `elems` elements from (row, col) on, as a kernel's argument.

        Raises:
            ValueError: they leave the buffer, its extra row included.
        """
        start = (row * self.width + col) * BF16_BYTES
        return self._buffer.view(start, elems * BF16_BYTES)
