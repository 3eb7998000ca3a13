"""What a processor's registers hold of a matrix product.

All vectors are of LANES floats; where registers are narrower, LLVM makes two of one. So sums over
lanes come out the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16
TILE = 16  # rows of a tile register, and columns of 32 bits
PAIR = 2  # numbers in bfloat16 in 32 bits
TILES = 2  # of columns side by side: with as many rows of them, 4 of C, 2 of A and 2 of B


@dataclass(frozen=True, slots=True)
class Registers:
    """What is held of C at a time.

    vectors: of a row, a power of two. rows: first as many as leave registers for A and B, then
    fewer for the rows left over. tiles: a GEMM's products are made in tile registers instead.
    """

    vectors: int
    rows: tuple[int, ...] = (6, 4, 2, 1)
    tiles: bool = False

    @property
    def columns(self) -> int:
        """The columns of a panel of a GEMM's B."""
        return TILES * TILE if self.tiles else LANES * self.vectors

    @property
    def step(self) -> int:
        """What a GEMM's K is a multiple of."""
        return PAIR * TILE if self.tiles else 1

    @property
    def row_step(self) -> int:
        """The multiple of rows that a GEMM's sums have room for."""
        return TILE if self.tiles else 1

    @property
    def flop_per_microsecond(self) -> int:
        """What a core does of a GEMM, about."""
        return 500_000 if self.tiles else 100_000

    @property
    def widths(self) -> tuple[int, ...]:
        """Vectors of panels, the widest first, down to one."""
        return tuple(self.vectors >> i for i in range(self.vectors.bit_length()))


# By what the processor can, the fastest first: Intel's AMX, whose processors have AVX-512 too; 24
# of 32 vector registers; 12 of 16. Others, without a fused multiply-add too, are left to BLAS.
REGISTERS = {
    "amx-bf16": Registers(4, tiles=True),
    "avx512f": Registers(4),
    "fma": Registers(1),
}
