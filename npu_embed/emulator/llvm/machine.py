"""The machine code of this process: compiled once, called without Python's lock.

BLAS packs B anew at each product, which for a short text's few rows costs more than the arithmetic;
here it is packed once, in bfloat16, into panels of as many columns as the registers hold of some
rows of C: [panel][k][column]. An element's bits depend on its row of A and its column of B alone:
not on the other rows, nor on how wide a machine's vector registers are. The slices that K is summed
in are those of OpenBLAS on AVX-512 machines: there a product by vector registers has numpy's bits.
Tile registers sum in an order of their own.

numba, which the host's loops are compiled by, would do, but takes half a second to import and comes
in the middle of a process' work; the first text's products are to be the same as the last's.
llvmlite, which numba stands on, imports and loads this in a tenth of that.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ... import settings
from ...bf16 import BF16, F32, RowBuffer
from ...cores import Scratch
from ..epilogue_numbers import GEGLU_TANH
from ..heads import Heads
from . import tile_permission
from .kept import kept
from .registers import LANES, PAIR, REGISTERS, Registers

log = logging.getLogger("npu_embed")

SLICE = 448  # of K, in one chain
SLICE_STEP = 16  # what is left for the last two slices is halved, to this multiple


@dataclass(frozen=True, slots=True)
class Attention:
    """Where an attention's operands are, from the first head, query row and key on.

    share: query heads to a key/value head. Row i is query first + i in positions of the keys.
    """

    q: tuple[Heads, int, int]  # heads, the first one's number, the first row of them
    k: tuple[Heads, int, int]
    v: tuple[Heads, int, int]
    o: tuple[Heads, int, int]
    kv_heads: int
    share: int
    rows: int
    keys: int
    dim: int
    first: int
    window: int


class Machine:
    """What this machine computes in its own code."""

    def __init__(self, registers: Registers, engine: Any) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        gemm = ctypes.CFUNCTYPE(
            None,
            *(pointer, size, size, size),
            *(pointer, size, size, pointer, size, pointer, size),
            *(pointer, pointer, pointer, size),
        )
        self.registers = registers
        self.columns = registers.columns
        self._gemm = gemm(engine.get_function_address("gemm"))
        self._attention = ctypes.CFUNCTYPE(None, pointer)(engine.get_function_address("attention"))
        self._engine = engine  # owns the machine code

    def pack(self, b: BF16) -> BF16:
        """B [K, N] in panels: [N / columns, K, columns].

        N is a multiple of `columns`. For tile registers K is a multiple of their step, and a
        panel's bits are those of [K / 2, columns, 2].
        """
        k = len(b)
        together = PAIR if self.registers.tiles else 1
        panels = b.reshape(k // together, together, -1, self.columns).transpose(2, 0, 3, 1)
        return np.ascontiguousarray(panels).reshape(-1, k, self.columns)

    def fits(self, k: int, tile: int) -> bool:
        """Whether it multiplies by B [K, N], in whole tiles of columns, in GeGLU pairs or not."""
        return k % self.registers.step == 0 and tile % max(self.columns, 2 * LANES) == 0

    def gemm(
        self,
        a: RowBuffer,
        rows: int,
        panels: BF16,
        tile: int,
        bias: F32 | None,
        epilogue: int,
        out: RowBuffer,
        scratch: Scratch,
    ) -> None:
        """Write epilogue(A B + bias), rounded, to rows of out; a and out may not overlap.

        panels: B as pack() gives it; tile: the columns of a GeGLU pair, which fit with K.

        Raises:
            ValueError: sizes that do not fit each other.
        """
        count, k, columns = panels.shape
        width = count * self.columns
        made = width // 2 if epilogue == GEGLU_TANH else width
        for (bits, first, stride), wide in ((a, k), (out, made)):
            if first < 0 or stride < 0 or first + (rows - 1) * stride + wide > bits.size:
                raise ValueError(f"{rows} rows of {wide} at {first}: past {bits.size} elements")
        if (
            rows < 1
            or columns != self.columns
            or not panels.flags.c_contiguous
            or not self.fits(k, tile)
            or width % tile
            or (bias is not None and bias.shape != (width,))
        ):
            raise ValueError(f"gemm: {rows} rows, panels {panels.shape}, tile {tile}: do not fit")
        ends = _slices(k)
        room = -(-rows // self.registers.row_step) * self.registers.row_step
        work = scratch.take("a", (room, k)), scratch.take("acc", (room, tile))
        self._gemm(
            *(address(a[0]) + 2 * a[1], a[2], rows, k),
            *(address(panels), width // tile, tile),
            *(None if bias is None else address(bias), epilogue),
            *(address(out[0]) + 2 * out[1], out[2]),
            *(address(work[0]), address(work[1]), ends, len(ends)),
        )

    def attend(self, of: Attention, scratch: Scratch) -> None:
        """O = softmax2(Q K^T) V, rounded; as emulator.mha_call has it. dim is a multiple of LANES.

        Raises:
            ValueError: no rows or keys, or heads that are not in their buffers.
        """
        width = -(-of.keys // LANES) * LANES
        if of.rows < 1 or of.keys < 1 or of.dim % LANES:
            raise ValueError(f"{of.rows} rows, {of.keys} keys, heads of {of.dim}")
        heads = of.kv_heads * of.share
        places: list[int] = []
        for (where, head, row), count, rows in (
            (of.q, heads, of.rows),
            (of.k, of.kv_heads, of.keys),
            (of.v, of.kv_heads, of.keys),
            (of.o, heads, of.rows),
        ):
            first = where.at(head, row)
            last = first + (count - 1) * where.head_stride + (rows - 1) * where.row_stride + of.dim
            if min(first, where.head_stride, where.row_stride) < 0 or last > where.elements.size:
                raise ValueError(f"heads [{count}, {rows}, {of.dim}] at {first}: not in the buffer")
            places += [
                address(where.elements) + 2 * first,
                where.head_stride,
                where.row_stride,
            ]
        work = (
            scratch.take("q", (of.rows, of.dim)),
            scratch.take("k", (width * of.dim // 2,)),
            scratch.take("p", (of.rows, width)),
            scratch.take("o", (of.rows, of.dim)),
        )
        sizes = of.kv_heads, of.share, of.rows, of.keys, of.dim, of.first, of.window
        values = *places, *sizes, *(address(array) for array in work)
        self._attention((ctypes.c_int64 * len(values))(*values))


def address(array: BF16 | F32) -> int:
    """Where a writable array's first element is; a quarter of the time its ctypes.data takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


@cache
def _slices(k: int) -> Any:
    """Where each slice of K ends, as C integers."""
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
    """Compiles at most once in a process, whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.done = False
        self.machine: Machine | None = None

    def load(self) -> Machine | None:
        if not self.done:
            with self.lock:
                if not self.done:
                    self.machine = _compile() if settings.compiled() != "off" else None
                    self.done = True
        return self.machine


def load() -> Machine | None:
    """This machine's code; None where numpy computes."""
    return _loader.load()


def _compile() -> Machine | None:
    try:
        llvm = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        log.debug("the emulated array is computed by numpy: %s", error)
        return None
    try:
        features = llvm.get_host_cpu_features()
        for name, registers in REGISTERS.items():
            if registers.tiles and (
                settings.compiled() == "vectors" or not tile_permission.granted()
            ):
                continue
            if features.get(name):
                return build(registers)
        log.debug("the emulated array is computed by numpy: no registers known here")
    except MemoryError:
        raise  # of the moment: the next call may have some
    except Exception:
        log.warning("LLVM cannot compile here; computing with numpy", exc_info=True)
    return None


def build(registers: Registers) -> Machine:
    """The code for such registers, which this machine must have.

    Raises:
        PermissionError: its kernel does not let tile registers be used.
    """
    if registers.tiles and not tile_permission.granted():
        raise PermissionError("the kernel does not grant this process tile registers")
    import llvmlite
    import llvmlite.binding as llvm

    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    versions = llvmlite.__version__, ".".join(map(str, llvm.llvm_version_info))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )

    def compiled() -> bytes:
        from .module import module_of

        module = llvm.parse_assembly(module_of(registers))
        module.verify()
        code: bytes = target.emit_object(module)
        return code

    code = kept((repr(registers), cpu, features, *versions), compiled)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Machine(registers, engine)


def _before_fork() -> None:
    """Let loading end first: a child would wait for ever for locks of LLVM's and of imports'."""
    _loader.lock.acquire()


def _after_fork_in_parent() -> None:
    _loader.lock.release()


def _after_fork_in_child() -> None:
    _loader.lock = threading.RLock()  # a lock is its thread's, and that has another number here


_loader = _Loader()
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
