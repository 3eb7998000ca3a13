"""The xclbin2 container: a kernel's arguments, its memories, and the images for the array.

parse() reads files of any maker and raises XclbinError, and nothing else, for a malformed one;
build() writes ours.
"""

from .xclbin_format import (
    Argument,
    CdoGroup,
    Ip,
    KernelInfo,
    Memory,
    Partition,
    Pdi,
    Section,
    Xclbin,
    XclbinError,
)
from .xclbin_read import MAX_FILE_BYTES, parse, read
from .xclbin_write import build

__all__ = [
    "MAX_FILE_BYTES",
    "Argument",
    "CdoGroup",
    "Ip",
    "KernelInfo",
    "Memory",
    "Partition",
    "Pdi",
    "Section",
    "Xclbin",
    "XclbinError",
    "build",
    "parse",
    "read",
]
