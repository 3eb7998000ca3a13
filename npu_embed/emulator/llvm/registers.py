"""What a processor's vector registers hold of a matrix product.

All vectors are of LANES floats; where registers are narrower, LLVM makes two of one. So sums over
lanes come out the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16


@dataclass(frozen=True, slots=True)
class Registers:
    """What is held of C at a time.

    vectors: of a row, a power of two. rows: first as many as leave registers for A and B, then
    fewer for the rows left over.
    """

    vectors: int
    rows: tuple[int, ...] = (6, 4, 2, 1)

    @property
    def columns(self) -> int:
        """The columns of a panel of B."""
        return LANES * self.vectors

    @property
    def widths(self) -> tuple[int, ...]:
        """Vectors of panels, the widest first, down to one."""
        return tuple(self.vectors >> i for i in range(self.vectors.bit_length()))


# By what the processor can: 24 of 32 registers, 12 of 16. Others, and those without a fused
# multiply-add, are left to BLAS.
REGISTERS = {"avx512f": Registers(4), "fma": Registers(1)}
