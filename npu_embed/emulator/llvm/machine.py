"""Compiled: C = A B for rows of float32 and weights in bfloat16, by LLVM alone.

BLAS packs B anew at each product, which for a short text's few rows costs more than the arithmetic.
Here B is packed once, into panels of as many columns as the registers hold of some rows of C:
[panel][k][column]. Every element of C is one chain of fused multiply-adds over k, in slices of K
that are added one after another; so its bits depend on its row of A and its column of B alone: not
on the other rows, nor on how wide a machine's registers are. The slices are those of OpenBLAS for
AVX-512 machines: there the bits are numpy's too.

numba would do, but takes half a second to import and comes in the middle of a process' work (see
jit); the first text's products are to be the same as the last's. llvmlite, which numba stands on,
imports and compiles this in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import settings
from .registers import NONE, REGISTERS, Registers

log = logging.getLogger("npu_embed")

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

SLICE = 448  # of K, in one chain
SLICE_STEP = 16  # what is left for the last two slices is halved, to this multiple


RowBuffer = tuple[U16, int, int]  # elements, position of a row's first, elements to the next row


class Product:
    """The machine's products."""

    def __init__(self, registers: Registers, engine: Any) -> None:
        address, size = ctypes.c_void_p, ctypes.c_int64
        # Foreign functions called so let other threads run meanwhile.
        product = ctypes.CFUNCTYPE(
            None, *(address, size, size), *(address, size), *(address, address, size)
        )
        gemm = ctypes.CFUNCTYPE(
            None,
            *(address, size, size, size),
            *(address, size, address, size),
            *(address, size, address, address, address, size),
        )
        self.columns = registers.columns
        self._product = product(engine.get_function_address("product"))
        self._gemm = gemm(engine.get_function_address("gemm"))
        self._engine = engine  # owns the machine code

    def pack(self, b: U16) -> U16:
        """B [K, N], N a multiple of `columns`, in panels: [N / columns, K, columns]."""
        k, _ = b.shape
        return np.ascontiguousarray(b.reshape(k, -1, self.columns).transpose(1, 0, 2))

    def multiply(self, a: F32, panels: U16, c: F32) -> None:
        """C = A B; a [M, K], panels [N / columns, K, columns], c [M, N], all C-contiguous."""
        rows, k = a.shape
        count = len(panels)
        self._check(panels, k)
        if c.shape != (rows, count * self.columns) or not (
            a.flags.c_contiguous and c.flags.c_contiguous
        ):
            raise ValueError(f"product of {a.shape} and {panels.shape} into {c.shape}")
        ends = _slices(k)
        self._product(
            *(a.ctypes.data, rows, k, panels.ctypes.data, count, c.ctypes.data, ends, len(ends))
        )

    def gemm(
        self,
        a: RowBuffer,
        panels: U16,
        bias: F32 | None,
        epilogue: int,
        out: RowBuffer,
        work: tuple[F32, F32],
    ) -> None:
        """Write epilogue(A B + bias), rounded, to rows of out.

        work: float32 [M, K] and [M, columns]. a and out may not overlap.
        """
        rows, k = work[0].shape
        count = len(panels)
        width = count * self.columns
        self._check(panels, k)
        for (bits, first, stride), columns in ((a, k), (out, width)):
            if first < 0 or stride < 0 or first + (rows - 1) * stride + columns > bits.size:
                raise ValueError(f"{rows} rows of {columns} at {first}: past {bits.size} elements")
        if work[1].shape != (rows, self.columns) or (None if bias is None else bias.shape) != (
            None if epilogue == NONE else (width,)
        ):
            raise ValueError(f"gemm of {rows} rows and {panels.shape}: work or bias do not fit")
        ends = _slices(k)
        self._gemm(
            *(a[0].ctypes.data + 2 * a[1], a[2], rows, k, panels.ctypes.data, count),
            *(None if bias is None else bias.ctypes.data, epilogue),
            *(out[0].ctypes.data + 2 * out[1], out[2]),
            *(work[0].ctypes.data, work[1].ctypes.data, ends, len(ends)),
        )

    def _check(self, panels: U16, k: int) -> None:
        if panels.shape[1:] != (k, self.columns) or not panels.flags.c_contiguous:
            raise ValueError(f"panels {panels.shape}, wanted [.., {k}, {self.columns}]")


@cache
def _slices(k: int) -> Any:
    """Where each slice of K ends, as C longs."""
    ends = [0]
    while ends[-1] < k:
        left = k - ends[-1]
        size = left
        if left >= 2 * SLICE:
            size = SLICE
        elif left > SLICE:
            size = -(-(left // 2) // SLICE_STEP) * SLICE_STEP
        ends.append(ends[-1] + size)
    return (ctypes.c_int64 * len(ends[1:]))(*ends[1:])


class _Loader:
    """Compiles the product at most once in a process, whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.product: Product | None = None

    def load(self) -> Product | None:
        if not self.done:
            with self.lock:
                if not self.done:
                    self.product = _compile() if settings.compiled() != "off" else None
                    self.done = True
        return self.product


def load() -> Product | None:
    """The product for this machine; None where it is BLAS' (numpy's) to compute."""
    return _loader.load()


def _compile() -> Product | None:
    try:
        llvm = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        log.debug("matrix products are left to numpy: %s", error)
        return None
    try:
        features = llvm.get_host_cpu_features()
        for name, registers in REGISTERS.items():
            if features.get(name):
                return build(registers)
        log.debug("matrix products are left to numpy: no registers known here")
    except Exception:
        log.warning("LLVM cannot compile here; computing with numpy", exc_info=True)
    return None


def build(registers: Registers) -> Product:
    """The products for such registers, which this machine must have."""
    import llvmlite.binding as llvm

    from .product_ir import module_of

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    module = llvm.parse_assembly(module_of(registers))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return Product(registers, engine)


def _after_fork() -> None:
    """In a child: the lock may be held by a thread of the parent's."""
    _loader.lock = threading.Lock()


_loader = _Loader()
os.register_at_fork(after_in_child=_after_fork)
