"""What the compiled kernels do to single numbers, and how kernels are declared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

f32 = np.float32

# A division by zero gives infinity, as in numpy.
INLINE: dict[str, Any] = {"inline": "always", "error_model": "numpy"}
# Other threads compute meanwhile.
_COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# Types of arguments: rows of bf16 in a flat buffer, matrices, and vectors that need not be writable
# nor aligned, as weights mapped from a file are not.
BITS = types.Array(types.uint16, 1, "C")
MATRIX = types.Array(types.float32, 2, "C")
CUBE = types.Array(types.float32, 3, "C")
VECTOR = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
TABLE = types.Array(types.uint16, 2, "C", readonly=True, aligned=False)
IDS = types.Array(types.int32, 1, "C")
INTEGERS = types.Array(types.int64, 2, "C")
INDEX, NUMBER, FLAG = types.int64, types.float32, types.boolean
ROWS = (BITS, INDEX, INDEX)  # elements, position of the first row's first, elements to the next row

# Kernel and signature; compiled one after another by `compiled`, which may be told to stop.
declared: list[tuple[Any, Any]] = []


def version(folder: Path = Path(__file__).parent) -> str:
    """A name for the present content of a folder's sources."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


_VERSION = version()


def kernel(*arguments: Any) -> Callable[[Any], Any]:
    """Declare a function a kernel with arguments of these types, to be compiled later."""

    def declare(function: Any) -> Any:
        # numba's cache goes by this name and notices changes of a kernel's own file only: of the
        # other files' functions it would go on using machine code of what they were.
        function.__qualname__ += f"_{_VERSION}"
        try:
            compiled = njit(cache=True, **_COMPILED)(function)
        except RuntimeError:  # no folder to keep machine code in can be written
            compiled = njit(**_COMPILED)(function)
        declared.append((compiled, types.void(*arguments)))
        return compiled

    return declare


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """The bits of a float32; an integer view of its array could alias the floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@njit(**INLINE)
def rounded(x: Any) -> Any:
    """The bfloat16 nearest to x, ties to even, a NaN quiet: bf16.to_bf16."""
    bits = bits_of(x)
    even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(quiet if is_nan else even)


@njit(**INLINE)
def widened(bits: Any) -> Any:
    """The float32 of a bfloat16's bits: bf16.to_f32."""
    return float_of(np.uint32(bits) << np.uint32(16))
