"""npu-embed export: a checkpoint folder -> a bundle folder."""

from __future__ import annotations

import click

from ..bundle import TARGETS
from .output import echo_path


@click.command(
    short_help="Make a bundle of a checkpoint.",
    epilog="\b\nExample:\n  npu-embed export sentence-transformers/all-MiniLM-L6-v2 minilm-bundle",
)
@click.argument("checkpoint")
@click.argument("out")
@click.option("--force", is_flag=True, help="Replace a bundle that is already at OUT.")
@click.option(
    "--target",
    type=click.Choice(tuple(reversed(TARGETS))),
    default="npu2",
    show_default=True,
    help="The NPU generation.",
)
@click.option(
    "--attention",
    type=click.Choice(("npu", "host")),
    help="Where a model that can do either computes attention; default npu, host if published.",
)
@click.option(
    "--layout",
    type=click.Choice(("npu-embed", "published")),
    default="npu-embed",
    show_default=True,
    help="How the bundle is laid out: our own way, or as taconite's published bundles.",
)
@click.option("--name", help="What the bundle calls the model; default: CHECKPOINT's name.")
def export(
    checkpoint: str,
    out: str,
    force: bool,
    target: str,
    attention: str | None,
    layout: str,
    name: str | None,
) -> None:
    """Make the bundle OUT from a checkpoint, and print its path.

    CHECKPOINT is a Hugging Face or sentence-transformers folder (config.json, model.safetensors,
    tokenizer.json), or a hub id like org/name where huggingface_hub is installed.
    """
    from ..exporters import export_checkpoint
    from ..progress import stages

    with stages(show=True) as progress:
        path = export_checkpoint(
            checkpoint,
            out,
            force=force,
            target=target,
            name=name,
            attention=attention,
            layout=layout,
            progress=progress,
        )
    echo_path(path)
