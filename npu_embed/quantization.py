"""Vectors in fewer bytes: float16, int8 within fixed ranges, one bit a number.

A vector's bytes depend on that vector alone: the ranges of int8 come from the bundle or from the
caller, never from the vectors that happen to be embedded together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32
from .errors import BundleError, InputError, InputTypeError
from .manifest import bundle_path

FLOAT32, FLOAT16, INT8, BINARY = "float32", "float16", "int8", "binary"
DTYPES = (FLOAT32, FLOAT16, INT8, BINARY)
RANGES_FILE = "int8_ranges.npy"  # of a bundle that has ranges
MAX_FILE_BYTES = 16 << 20  # of that file
BITS = 8  # of a packed byte
MAX_FLOAT16 = 65504.0
LOWEST_INT8, HIGHEST_INT8 = -128, 127

Quantized = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Ranges:
    """What -128 and 127 stand for in each dimension: low < high, float32 [dim] each."""

    low: F32
    high: F32

    def __post_init__(self) -> None:
        """Check that every dimension has a width."""
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        if not (wrong := np.flatnonzero(~(finite & (self.low < self.high)))).size:
            return
        i = int(wrong[0])
        raise InputError(
            f"int8 ranges: dimension {i} goes from {self.low[i]:g} to {self.high[i]:g}, wanted "
            "finite numbers, the lower one first; take them from more texts."
        )

    @property
    def dim(self) -> int:
        """How many dimensions they are for."""
        return len(self.low)

    @classmethod
    def of(cls, vectors: F32) -> Int8Ranges:
        """The lowest and the highest number of each dimension of float32 vectors [rows, dim].

        Raises:
            InputError: there are no vectors, or a dimension has one value only.
            InputTypeError: they are no matrix of floats.
        """
        found = np.asarray(vectors)
        if found.ndim != 2 or found.dtype.kind != "f":
            raise InputTypeError(
                f"calibration: {found.dtype} {list(found.shape)}, wanted floats [rows, dim]."
            )
        if not len(found):
            raise InputError("calibration: no vectors, wanted those of some hundred texts.")
        wide = found.astype(np.float32)
        return cls(wide.min(axis=0), wide.max(axis=0))

    def as_array(self) -> F32:
        """Both as float32 [2, dim], as the bundle's file has them."""
        return np.stack([self.low, self.high])


def bundle_ranges(bundle: Path) -> Int8Ranges | None:
    """The ranges stored in a bundle's folder, for vectors of its whole dim; None without them.

    Raises:
        BundleError: the file is damaged, or no regular file inside the bundle.
    """
    if not os.path.lexists(bundle / RANGES_FILE):
        return None
    path = bundle_path(bundle, RANGES_FILE, str(bundle))
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{size_bytes} bytes (at most {MAX_FILE_BYTES})")
        stored = np.lib.format.open_memmap(path, mode="r")  # of npy alone: no zip, no pickle
        if stored.ndim == 2 and len(stored) == 2:
            return Int8Ranges.of(np.array(stored))
        found = f"shape {list(stored.shape)}"
    except Exception as error:  # numpy reads the header with Python's tokenizer, which has its own
        found = str(error)
    raise BundleError(
        f"{RANGES_FILE}: {found}, wanted float32 [2, dim], the lowest numbers and the highest; "
        "make it again with `npu-embed calibrate`."
    )


def quantize(vectors: F32, dtype: str, ranges: Int8Ranges | None = None) -> Quantized:
    """The vectors [rows, dim] as a dtype of DTYPES: float32, float16, int8 [rows, dim], or bits.

    int8 is round(255 (x - low) / (high - low)) - 128, with what lies outside of the range set to
    its end. binary is uint8 [rows, dim / 8]: a 1 for each number above 0, the first number in the
    highest bit. A float16 that would be infinite is the largest finite one.

    Raises:
        InputError: int8 without ranges or with those of another dim; binary of a dim that is
            no multiple of 8; an unknown dtype.
    """
    dim = vectors.shape[1]
    check_dtype(dtype, dim, ranges)
    if dtype == FLOAT16:
        return np.clip(vectors, -MAX_FLOAT16, MAX_FLOAT16).astype(np.float16)
    if dtype == INT8:
        assert ranges is not None
        # In float64, where neither a difference nor a quotient of float32 numbers overflows.
        low, high = ranges.low.astype(np.float64), ranges.high.astype(np.float64)
        steps = np.rint((vectors - low) * (255.0 / (high - low))) + LOWEST_INT8
        saturated: Quantized = np.clip(steps, LOWEST_INT8, HIGHEST_INT8).astype(np.int8)
        return saturated
    if dtype == BINARY:
        bits: Quantized = np.packbits(vectors > 0, axis=1)
        return bits
    return vectors


def check_dtype(dtype: str, dim: int, ranges: Int8Ranges | None = None) -> None:
    """Check that vectors of that dim can be had as a dtype.

    Raises:
        InputError: as quantize.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r}: unknown, wanted {', '.join(DTYPES)}.")
    if dtype == BINARY and dim % BITS:
        raise InputError(
            f"dtype binary: {dim} dimensions, wanted a multiple of {BITS}, the bits of a byte; "
            f"cut the vectors to {dim // BITS * BITS}."
            if dim > BITS
            else f"dtype binary: {dim} dimensions, wanted a multiple of {BITS}."
        )
    if dtype == INT8 and ranges is None:
        raise InputError(
            "dtype int8: no ranges, neither in the bundle nor from a calibration, wanted them; "
            "store them with `npu-embed calibrate`, or pass --calibrate FILE."
        )
    if dtype == INT8 and ranges is not None and ranges.dim != dim:
        raise InputError(
            f"dtype int8: ranges of {ranges.dim} dimensions, wanted {dim} as the vectors have; "
            "pass --calibrate FILE with vectors of that length, or texts."
        )


def width(dtype: str, dim: int) -> int:
    """How many numbers a quantized vector has."""
    return dim // BITS if dtype == BINARY else dim


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """What numpy stores a dtype of DTYPES as."""
    return np.dtype(np.uint8 if dtype == BINARY else dtype)
