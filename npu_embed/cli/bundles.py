"""Which bundle a command is about: a folder, one that a recipe makes, or the default one."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..errors import SettingError

bundle_option = click.option(
    "--bundle",
    metavar="BUNDLE",
    help="A bundle's folder, or the name of one for `npu-embed get`; default: NPU_EMBED_BUNDLE, "
    "else minilm, which is made if need be.",
)
bundle_argument = click.argument("bundle", required=False)


def named_bundle(given: str | None) -> Path | None:
    """The folder of the bundle that is named; None where none is.

    A name is a folder's, or, where there is no such folder, a recipe's, whose bundle is made if
    the cache does not have it.

    Raises:
        FetchError: the recipe's checkpoint could not be had.
        SettingError: the name is empty, as that of a variable that is not set.
    """
    if given == "":  # which as a path is the current folder
        raise SettingError(
            "bundle '': empty, wanted a folder or the name of a recipe; leave it out for the "
            "default one."
        )
    if given is None or os.path.lexists(given):
        return None if given is None else Path(given)
    from ..embedder import bundle_folder

    return bundle_folder(given)


def chosen_bundle(given: str | None) -> Path:
    """The folder of the bundle that is named, else of the one that `embed` takes.

    Raises:
        BundleError: there is no such folder.
        FetchError: the checkpoint of a recipe could not be had.
        SettingError: the name is empty.
    """
    from .. import settings
    from ..bundle import no_such_bundle
    from ..embedder import bundle_folder, default_bundle

    path, chosen = named_bundle(given), settings.bundle()
    if path is None:
        path = default_bundle() if chosen is None else bundle_folder(chosen)
    if not os.path.isdir(path):  # Path.is_dir raises where the name is too long
        raise no_such_bundle(path)
    return path
