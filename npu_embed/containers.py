"""Xclbin files of a bundle: what their kernels take, and whether they hold array programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .emulator import program, xclbin
from .errors import BundleError


@dataclass(frozen=True, slots=True)
class ArgumentLayout:
    """Where an xclbin's kernel takes what; positions from its XML, never assumed."""

    opcode: int
    instr: int
    ninstr: int
    buffers: tuple[int, ...]


def argument_layout(path: Path, kernel_name: str, columns: int | None = None) -> ArgumentLayout:
    """The argument positions of a kernel, in an xclbin for an array of so many columns.

    Raises:
        BundleError: the file is missing, no xclbin, wider than the array, has no such kernel, or
        its kernel takes no instructions.
    """
    parsed = read_xclbin(path)
    # The driver's own refusal could not be told from "no slot now".
    width = parsed.partition.column_width if parsed.partition is not None else 1
    if columns is not None and width > columns:
        raise BundleError(
            f"{path.name}: for {width} columns, this NPU has {columns}; it belongs to another NPU, "
            "re-export the bundle."
        )
    kernel = next((k for k in parsed.kernels if k.name == kernel_name), None)
    if kernel is None:
        known = ", ".join(k.name for k in parsed.kernels) or "none"
        raise BundleError(
            f"{path.name}: has kernels {known}, wanted {kernel_name}; re-export the bundle."
        )
    scalars = {a.name: a.index for a in kernel.args if a.qualifier == 0}
    pointers = {a.name: a.index for a in kernel.args if a.qualifier == 1}
    instr = next((i for name, i in pointers.items() if name.startswith("instr")), None)
    ninstr = next((i for name, i in scalars.items() if name.startswith("ninstr")), None)
    if instr is None or ninstr is None or "opcode" not in scalars:
        raise BundleError(
            f"{path.name}: kernel {kernel_name} takes {', '.join(a.name for a in kernel.args)}, "
            "wanted opcode, instr and ninstr among them; this xclbin runs no instruction streams."
        )
    buffers = tuple(sorted(i for i in pointers.values() if i != instr))
    return ArgumentLayout(scalars["opcode"], instr, ninstr, buffers)


def read_xclbin(path: Path) -> xclbin.Xclbin:
    """The parsed container at `path`.

    Raises:
        BundleError: missing, unreadable or no xclbin.
    """
    try:
        return xclbin.read(path)
    except xclbin.XclbinError as error:
        raise BundleError(f"{path.name}: no xclbin ({error}); re-export the bundle.") from error
    except OSError as error:
        raise BundleError(f"{path.name}: cannot be read ({error.strerror}).") from error


def holds_array_program(path: Path) -> bool:
    """Whether an xclbin names an array program of the emulated NPU rather than real code."""
    return array_program(path) is not None


def array_program(path: Path) -> dict[str, Any] | None:
    """The array program an xclbin names, with its compile-time constants; None for real code.

    Raises:
        BundleError: as read_xclbin.
    """
    partition = read_xclbin(path).partition
    for pdi in partition.pdis if partition is not None else ():
        try:
            return program.read_constants(pdi.image)
        except program.NoArrayProgram:
            continue
    return None
