"""npu-embed batch: files of texts -> a file of vectors; npu-embed calibrate: ranges of int8."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import click

from ..errors import InputError, SettingError
from ..settings import DEVICES
from .bundles import bundle_option, named_bundle
from .output import echo_json, echo_path, visible
from .tracing import trace_option, traced

if TYPE_CHECKING:
    from ..batch.engines import Engines
    from ..embedder import Embedder

# Spelled here, so that --help imports neither numpy nor the engine.
INPUT_FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet", "arrow")
DTYPES = ("float32", "float16", "int8", "binary")


@click.command(
    short_help="Embed files of texts into a file of vectors.",
    epilog="\b\nExamples:\n  npu-embed batch reviews.jsonl -o reviews.parquet --column body\n"
    "  npu-embed batch 'shards/*.parquet' -o all.arrow --id-column id --dim 128\n"
    "  zcat lines.txt.gz | npu-embed batch - -o lines.npy --dtype float16\n"
    "  npu-embed batch 'shards/*.jsonl' -o all.parquet --ray=head:6379",
)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="OUTPUT",
    required=True,
    type=click.Path(path_type=Path),
    help="Where the vectors go: .npy, .safetensors, .parquet, .arrow, .feather or .jsonl.",
)
@bundle_option
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option(
    "--column", metavar="NAME", default="text", show_default=True, help="The column of texts."
)
@click.option("--id-column", metavar="NAME", help="The column of ids; every row must have one.")
@click.option(
    "--input-format",
    type=click.Choice(INPUT_FORMATS),
    help="What the inputs are, where their endings do not tell; default for stdin: txt.",
)
@click.option("--prompt", metavar="NAME", help="One of the bundle's prompts, put before each text.")
@click.option("--dim", type=int, metavar="N", help="Keep the first N numbers, unit length again.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="What a number becomes; binary is one bit each, eight to a byte.",
)
@click.option(
    "--calibrate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The ranges of int8: those of these texts' vectors, or of the vectors of an .npy; "
    "default: the bundle's.",
)
@click.option(
    "--truncate/--no-truncate",
    default=True,
    show_default=True,
    help="Cut texts that are too long, or let them be rows that cannot be embedded.",
)
@click.option(
    "--on-error",
    type=click.Choice(("stop", "skip")),
    default="stop",
    show_default=True,
    help="At a row that cannot be embedded: stop, or list it in OUTPUT.skipped.jsonl and go on.",
)
@click.option(
    "--shard-rows",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="Rows that are embedded, and saved, together.",
)
@click.option("--restart", is_flag=True, help="Begin anew; replace an OUTPUT that is there.")
@click.option(
    "--ray",
    "ray_address",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Compute on a Ray cluster: the one at ADDRESS, else at RAY_ADDRESS, else one started on "
    "this machine.",
)
@click.option(
    "--ray-actors",
    type=click.IntRange(min=1),
    metavar="N",
    help="Engines on the Ray cluster; default: one a machine.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON line of what was done.")
@trace_option
def batch(
    inputs: tuple[str, ...],
    output: Path,
    bundle: str | None,
    device: str | None,
    column: str,
    id_column: str | None,
    input_format: str | None,
    prompt: str | None,
    dim: int | None,
    dtype: str,
    calibrate: Path | None,
    truncate: bool,
    on_error: str,
    shard_rows: int,
    restart: bool,
    ray_address: str | None,
    ray_actors: int | None,
    as_json: bool,
    trace: Path | None,
) -> None:
    """Embed files of texts, of any length, into OUTPUT; print its path.

    An INPUT is a file, a glob in quotes, or - for stdin: .txt (a text a line), .jsonl, .csv, .tsv,
    .parquet, .arrow or .feather. Several are read one after another. Parquet, Arrow and JSON lines
    keep the input's columns and get one more, "embedding".

    A run that ends early, however, keeps what it has done in OUTPUT.partial. The same command goes
    on with it, and OUTPUT is then byte for byte what an unbroken run makes.
    """
    from ..batch import Job, check, run

    job = Job(
        inputs=inputs,
        output=output,
        column=column,
        id_column=id_column,
        input_format=input_format,
        prompt=prompt,
        dim=dim,
        dtype=dtype,
        truncate=truncate,
        on_error=on_error,
        calibrate=calibrate,
        shard_rows=shard_rows,
        restart=restart,
    )
    check(job)  # before a bundle is opened or made
    cluster = _cluster(ray_address, ray_actors)
    from ..embedder import Embedder

    begun = perf_counter()
    stdin = sys.stdin.buffer if sys.stdin is not None else None
    folder = named_bundle(bundle)
    with traced(trace), Embedder(folder, device) as embedder:
        engines = cluster(embedder) if cluster is not None else None
        done = run(embedder, job, stdin=stdin, progress=True, engines=engines)
        stats = {"bundle": embedder.bundle.name, "device": embedder.device}
        if engines is None:  # else others did it
            stats.update(embedder.stats.as_dict())
    seconds = perf_counter() - begun
    if as_json:
        echo_json(
            {**asdict(done), "output": str(output), "seconds": round(seconds, 3), "stats": stats}
        )
        return
    kept = f"; {done.computed:,} computed, {done.kept:,} done before" if done.kept else ""
    skipped = f"; {done.skipped:,} skipped, see {output}.skipped.jsonl" if done.skipped else ""
    click.echo(visible(f"{done.rows:,} rows in {seconds:.1f} s{kept}{skipped}"), err=True)
    echo_path(output)


def _cluster(address: str | None, actors: int | None) -> Callable[[Embedder], Engines] | None:
    """What gives an Embedder's work to a Ray cluster, connected to; None where none is asked for.

    Raises:
        InputError: there is no cluster at that address; actors for none.
        SettingError: Ray is not installed.
    """
    if address is None:
        if actors is not None:
            raise InputError(f"--ray-actors {actors}: no cluster, wanted one; pass --ray as well.")
        return None
    try:
        from ..integrations.ray import connect, on_cluster
    except ImportError as error:
        raise SettingError(str(error)) from error
    connect(address or None)
    return partial(on_cluster, actors=actors)


@click.command(
    short_help="Store a bundle's ranges for int8 vectors.",
    epilog="\b\nExample:\n  npu-embed calibrate minilm sample.jsonl",
)
@click.argument("bundle")
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--device", type=click.Choice(DEVICES), help="Where to run; default auto.")
@click.option(
    "--column", metavar="NAME", default="text", show_default=True, help="The column of texts."
)
@click.option("--prompt", metavar="NAME", help="One of the bundle's prompts, put before each text.")
def calibrate(
    bundle: str, inputs: tuple[str, ...], device: str | None, column: str, prompt: str | None
) -> None:
    """Store in BUNDLE what the int8 numbers of its vectors stand for.

    The ranges are those of the vectors of the INPUT texts, each dimension's lowest and highest
    number. They are for vectors of the model's whole length. Some thousand texts like those to be
    embedded are enough; at most 10,000 are read, and fewer than 200 are warned of.
    """
    from ..batch.calibration import calibrate_bundle
    from ..embedder import Embedder

    with Embedder(named_bundle(bundle), device) as embedder:
        echo_path(calibrate_bundle(embedder, inputs, column=column, prompt=prompt))
