"""Which bundle a command is about: a folder, one that a recipe makes, or the default one."""

from __future__ import annotations

import os
from pathlib import Path

import click

bundle_option = click.option(
    "--bundle",
    metavar="BUNDLE",
    help="A bundle's folder, or the name of one for `npu-embed get`; default: minilm, which is "
    "made if need be.",
)
bundle_argument = click.argument("bundle", required=False)


def named_bundle(given: str | None) -> Path | None:
    """The folder of the bundle that is named; None where none is.

    A name is a folder's, or, where there is no such folder, a recipe's, whose bundle is made if
    the cache does not have it.

    Raises:
        FetchError: the recipe's checkpoint could not be had.
    """
    if given is None or os.path.lexists(given):
        return None if given is None else Path(given)
    from .. import fetch
    from ..progress import stages

    if given not in fetch.recipe_names():
        return Path(given)
    with stages(show=True) as progress:
        return fetch.get(given, progress=progress)


def chosen_bundle(given: str | None) -> Path:
    """The folder of the bundle that is named, else of the one that `embed` takes.

    Raises:
        BundleError: there is no such folder.
        FetchError: the checkpoint of a recipe could not be had.
    """
    from .. import settings
    from ..bundle import no_such_bundle
    from ..embedder import default_bundle

    path = named_bundle(given) or settings.bundle() or default_bundle()
    if not os.path.isdir(path):  # Path.is_dir raises where the name is too long
        raise no_such_bundle(path)
    return path
