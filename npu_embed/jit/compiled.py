"""Every compiled kernel, by its name; importing this imports numba.

compile_all() makes them machine code, one after another: what was compiled before is read from
numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable

from . import scalars
from .gemma import gate_rows, table_rows
from .heads import make_heads, put_heads
from .rms import add_rms_norm, add_rows, put_rms_norm
from .rows import add_layer_norm, layer_norm, round_rows, widen_rows

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "add_rows",
    "compile_all",
    "gate_rows",
    "layer_norm",
    "make_heads",
    "put_heads",
    "put_rms_norm",
    "round_rows",
    "table_rows",
    "widen_rows",
]


def compile_all(stopped: Callable[[], bool]) -> bool:
    """Compile every kernel; False if `stopped` said so in between."""
    for function, signature in scalars.declared:
        if stopped():
            return False
        function.compile(signature)
        function.disable_compile()
    return True
