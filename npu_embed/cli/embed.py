"""npu-embed embed: texts and images -> their vectors, or how near they are to each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ..errors import InputError
from ..progress import is_terminal
from ..settings import DEVICES
from .bundles import bundle_option, named_bundle
from .output import console, echo_json, one_line, print_table
from .tracing import trace_option, traced

if TYPE_CHECKING:
    from rich.console import Console

    from ..bf16 import F32
    from ..embedder import Embedder

STDIN = "-"
FIRST_NUMBERS = 8
TEXT_COLUMNS = 24  # what a similarity table keeps for index and text
COSINE_COLUMNS = 7  # "-0.123" and a space


@click.command(
    short_help="Embed texts and images, or compare them.",
    epilog='\b\nExamples:\n  npu-embed embed "two cats on a sofa" "a red car"\n'
    "  npu-embed embed - < lines.txt > vectors.jsonl\n"
    '  npu-embed embed --bundle embeddinggemma-2-bundle --image cats.jpg "two cats on a sofa"',
)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    help="An image, where the bundle embeds them; may be given more than once.",
)
@bundle_option
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option("--prompt", metavar="NAME", help="One of the bundle's prompts, put before each text.")
@click.option("--dim", type=int, metavar="N", help="Keep the first N numbers, unit length again.")
@click.option(
    "--truncate/--no-truncate",
    default=True,
    show_default=True,
    help="Cut texts that are too long, or refuse them.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines, also on a terminal.")
@click.option("--table", "as_table", is_flag=True, help="The table, also in a pipe.")
@click.option("--stats", is_flag=True, help="What it took: runs, swaps, bytes, seconds.")
@trace_option
def embed(
    texts: tuple[str, ...],
    images: tuple[str, ...],
    bundle: str | None,
    device: str | None,
    prompt: str | None,
    dim: int | None,
    truncate: bool,
    as_json: bool,
    as_table: bool,
    stats: bool,
    trace: Path | None,
) -> None:
    """Embed texts and images.

    A TEXT of - stands for the lines of stdin; after -- any TEXT is a text.

    On a terminal a table shows the cosine of every pair (of one text: its first numbers). Otherwise
    there is a JSON line for each text: {"index": 0, "text": "...", "embedding": [...]}; then one
    for each image, with "image" and its file's name in the place of the text.

    The statistics are a table on stderr; with JSON they are one more line, the last:
    {"stats": {...}}.
    """
    if as_json and as_table:
        raise click.UsageError("--json and --table: two forms, wanted one.")
    table = as_table or (not as_json and is_terminal(sys.stdout))
    if not texts and not images:
        raise click.UsageError("nothing to embed, wanted a TEXT, - or --image FILE.")
    everything = _with_stdin(texts)
    from ..embedder import Embedder

    folder = named_bundle(bundle)
    with traced(trace), Embedder(folder, device) as embedder:
        named = [*(("text", text) for text in everything), *(("image", file) for file in images)]
        vectors = _vectors(embedder, everything, images, prompt, dim, truncate)
        if table:
            _print_vectors([name for _, name in named], vectors)
        else:
            for index, ((kind, name), vector) in enumerate(zip(named, vectors, strict=True)):
                echo_json({"index": index, kind: name, "embedding": numbers(vector)})
        if stats:
            _print_stats(_stats(embedder), as_json=not table)


def _vectors(
    embedder: Embedder,
    texts: Sequence[str],
    images: Sequence[str],
    prompt: str | None,
    dim: int | None,
    truncate: bool,
) -> F32:
    """The vectors of the texts, then those of the images."""
    import numpy as np

    parts = []
    if images:  # before the texts: a bundle without images says so at once
        parts.append(embedder.embed_image(images, dim))
    if texts or not images:
        parts.insert(0, embedder.embed(texts, prompt, dim, truncate, progress=True))
    return np.concatenate(parts)


def _with_stdin(texts: Sequence[str]) -> list[str]:
    """The texts, with the lines of stdin in the place of `-`."""
    if texts.count(STDIN) > 1:
        raise click.UsageError("-: twice, wanted once; stdin can be read only once.")
    everything: list[str] = []
    for text in texts:
        if text == STDIN:
            if sys.stdin is None:
                raise InputError("stdin: closed, wanted lines of text; give TEXT, or < FILE.")
            everything += read_lines(sys.stdin.buffer)
        else:
            everything.append(text)
    return everything


def read_lines(stream: BinaryIO, name: str = "stdin") -> list[str]:
    r"""The lines of a UTF-8 stream without their ends (\n or \r\n); an empty one is a text.

    Raises:
        InputError: a line is not UTF-8; the message names it.
    """
    lines = []
    for number, raw in enumerate(stream, start=1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}:{number}: byte {error.start + 1} of the line is "
                f"0x{line[error.start]:02x}, wanted UTF-8 text; convert it first, as with iconv."
            ) from error
    return lines


def numbers(vector: F32) -> list[float]:
    """The vector's numbers, each with the fewest digits that give the float32 back."""
    return [float(str(number)) for number in vector]


def _print_vectors(texts: Sequence[str], vectors: F32) -> None:
    out = console()
    if len(texts) > 1:
        _print_similarity(out, texts, vectors)
    elif texts:
        import numpy as np

        first = " ".join(f"{x:+.4f}" for x in vectors[0, :FIRST_NUMBERS])
        more = " ..." if vectors.shape[1] > FIRST_NUMBERS else ""
        norm = float(np.linalg.norm(vectors[0]))
        rows = (("dim", vectors.shape[1]), ("norm", f"{norm:.6f}"), ("vector", first + more))
        print_table(out, one_line(texts[0]), ("", ""), rows)


def _print_similarity(out: Console, texts: Sequence[str], vectors: F32) -> None:
    """The cosine of every pair; where those do not fit a line, each text's nearest other."""
    import numpy as np
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..hostops import unit_rows

    unit = np.nan_to_num(unit_rows(vectors))  # a zero vector is near to nothing
    whole = len(texts) * COSINE_COLUMNS + TEXT_COLUMNS <= out.width
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("cosine", overflow="ellipsis", no_wrap=True)
    for heading in map(str, range(len(texts))) if whole else ("nearest", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (text, vector) in enumerate(zip(texts, unit, strict=True)):
        row = unit @ vector  # not all rows at once: many texts have too many pairs
        others = row.copy()
        others[index] = -np.inf
        best = int(np.argmax(others))
        if whole:
            styles = ["dim" if i == index else "bold" if i == best else "" for i in range(len(row))]
            cells = [Text(f"{x:.3f}", style) for x, style in zip(row, styles, strict=True)]
        else:
            cells = [Text(str(best)), Text(f"{row[best]:.3f}")]
        table.add_row(str(index), Text(one_line(text)), *cells)
    out.print(table)


def _stats(embedder: Embedder) -> dict[str, Any]:
    """The embedder's statistics, with what they are of."""
    of = {"bundle": embedder.bundle.name, "device": embedder.device}
    return {**of, **embedder.stats.as_dict()}


def _print_stats(stats: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        echo_json({"stats": stats})
        return
    seconds = stats.pop("seconds")
    counted = [(name, f"{x:,}" if isinstance(x, int) else x) for name, x in stats.items()]
    spent = [(f"{stage} seconds", f"{s:.3f}") for stage, s in seconds.items()]
    print_table(console(stderr=True), "statistics", ("", ""), (*counted, *spent))
