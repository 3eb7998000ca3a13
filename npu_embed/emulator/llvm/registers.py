"""What a machine's vector registers hold of a matrix product, and what a product may end in."""

from __future__ import annotations

from dataclasses import dataclass

NONE, BIAS, GELU = range(3)  # what becomes of A B: rounded; with a bias; GELU (erf) of that


@dataclass(frozen=True, slots=True)
class Registers:
    """What the machine's vector registers hold of C at a time.

    lanes: floats a vector; vectors: of a row; rows: at a time, the most that leave registers for
    A and B first, then fewer for the rows left over.
    """

    lanes: int
    vectors: int
    rows: tuple[int, ...]

    @property
    def columns(self) -> int:
        """The columns of a panel."""
        return self.lanes * self.vectors


# By what the processor can: 24 of 32 registers, 12 of 16. Machines without a fused multiply-add,
# or of registers unknown here, are left to BLAS.
REGISTERS = {"avx512f": Registers(16, 4, (6, 4, 2, 1)), "fma": Registers(8, 2, (6, 4, 2, 1))}
