"""How large a model may be that this exporter takes on.

A few numbers in a config.json can ask for more memory than any machine has, and the weights file
need not be large for it: attention takes the square of the heads, images the square of a kernel.
"""

from __future__ import annotations

from ..errors import BundleError
from .geometry import M
from .jsonfile import JsonFile

# What the array's descriptors can say: strides over a chunk's rows, and chunks of a GEMM.
MAX_WIDTH = 1 << 15  # numbers of any row that a GEMM reads or writes
MAX_PATCHES = 64 * M  # of an image

# Well above any published encoder's.
MAX_LAYERS = 1024  # what the models read, too
MAX_HEADS = 256
MAX_PATCH_SIZE = 64
MAX_POOLING = 64
MAX_SOFT_TOKENS = 1 << 14
MAX_HIDDEN_NUMBERS = 1 << 29  # of all hidden rows of a text's reference, in float32: 2 GiB


def check_width(config: JsonFile, what: str, width: int) -> None:
    """Refuse a model with rows too wide for the array.

    Raises:
        BundleError: naming what they are.
    """
    if width > MAX_WIDTH:
        raise BundleError(
            f"{config.name}: {what} of {width} numbers, wanted at most {MAX_WIDTH}; this exporter "
            "takes no model of that size."
        )


def check_hidden(config: JsonFile, tokens: int, layers: int, hidden_size: int) -> None:
    """Refuse a model whose hidden rows of the longest text would take memory out of proportion.

    Raises:
        BundleError: what all layers make of it is too much.
    """
    if (layers + 1) * tokens * hidden_size > MAX_HIDDEN_NUMBERS:
        raise BundleError(
            f"{config.name}: {tokens} tokens, {layers} layers, hidden_size {hidden_size} for the "
            f"longest text, wanted at most {MAX_HIDDEN_NUMBERS} numbers in all; this exporter "
            "takes no model of that size."
        )
