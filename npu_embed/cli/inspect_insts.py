"""An instruction stream as a description (JSON as it is) and as text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..emulator import txn
from ..errors import InputError
from .output import visible

if TYPE_CHECKING:
    from rich.console import Console

_GENERATIONS = {3: "npu1", 4: "npu2"}


def describe(path: Path, data: bytes, *, words: bool) -> dict[str, Any]:
    """Header, counts and disassembly of the stream in `data`; with each op's words if asked.

    Raises:
        InputError: it is no instruction stream of any form.
    """
    try:
        binary = txn.read_insts(data)
        stream = txn.decode_legacy(binary) if txn.is_legacy(binary) else txn.decode(binary)
    except txn.TxnError as error:
        found = f"begins {data[:16].hex(' ', -4)}" if data else "empty"
        raise InputError(
            f"{path}: {found}, wanted a bundle folder, an xclbin or an instruction stream; "
            f"read as a stream: {error}"
        ) from error
    lines = list(txn.disassemble(stream))
    described: dict[str, Any] = {
        "kind": "insts",
        "path": str(path),
        "form": _form(stream, text=binary is not data),
        "words": len(binary) // 4,
        "header": None,
        "ops": dict(Counter(line.split(maxsplit=2)[1] for line in lines)),
        "buffers": _buffers(stream),
        "disassembly": lines,
    }
    if isinstance(stream, txn.Stream):
        header = stream.header
        described["header"] = {
            "version": f"{header.major}.{header.minor}",
            "dev_gen": header.dev_gen,
            "generation": _GENERATIONS.get(header.dev_gen),
            "num_rows": header.num_rows,
            "num_cols": header.num_cols,
            "num_memtile_rows": header.num_memtile_rows,
            "num_ops": header.num_ops,
            "size_bytes": header.size_bytes,
        }
    if words:
        described["op_words"] = [list(op.raw) for op in stream.ops]
    return described


def show(out: Console, described: dict[str, Any]) -> None:
    """Print a description: a head, then a line an op, with its words below it if they are there."""
    del out  # long lines of a listing are better left to the terminal
    click.echo(
        f"{visible(described['path'])}: {described['form']}, {described['words']} words, "
        f"buffers {', '.join(map(str, described['buffers'])) or 'none'}"
    )
    if header := described["header"]:
        generation = f" ({header['generation']})" if header["generation"] else ""
        click.echo(
            f"version {header['version']}, dev_gen {header['dev_gen']}{generation}, "
            f"{header['num_cols']} columns, {header['num_rows']} rows, "
            f"{header['num_memtile_rows']} of memory tiles, {header['size_bytes']} bytes"
        )
    counts = ", ".join(f"{count} {name}" for name, count in described["ops"].items())
    click.echo(f"{sum(described['ops'].values())} ops: {counts}\n")
    raw = described.get("op_words")
    for index, line in enumerate(described["disassembly"]):
        click.echo(line)
        if raw is not None:
            click.echo(" " * 8 + " ".join(f"{word:08x}" for word in raw[index]))


def _form(stream: txn.Stream | txn.LegacyStream, *, text: bool) -> str:
    written = "text" if text else "binary"
    if isinstance(stream, txn.LegacyStream):
        prolog = "with" if stream.prolog else "without"
        return f"instruction stream older than TXN, {written}, {prolog} prolog"
    wrapped = ", wrapped" if stream.wrapper else ""
    return f"TXN instruction stream, {written}{wrapped}"


def _buffers(stream: txn.Stream | txn.LegacyStream) -> list[int]:
    """The buffer arguments whose addresses the stream uses."""
    used = {op.arg_index for op in stream.ops if isinstance(op, txn.DdrPatch)}
    used |= {op.ddr_id for op in stream.ops if isinstance(op, txn.LegacyWriteBd)}
    return sorted(used)
