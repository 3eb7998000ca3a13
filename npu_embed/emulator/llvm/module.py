"""The LLVM module of all functions; importing this imports llvmlite."""

from __future__ import annotations

from llvmlite import ir

from .attention_code import attention
from .gemm_code import Products, VectorProducts, gemm
from .panel_code import Panels, fused_multiply_add
from .registers import Registers
from .tile_code import TileProducts


def module_of(registers: Registers) -> str:
    """The text of the functions `gemm` and `attention`."""
    module = ir.Module("npu_embed")
    fma = fused_multiply_add(module)
    panels = Panels(module, registers, fma)
    products: Products = VectorProducts(registers, panels)
    if registers.tiles:
        products = TileProducts(module)
    gemm(module, registers, products, fma)
    attention(module, registers, panels, fma)
    return str(module)
