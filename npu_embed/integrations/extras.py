"""What is said where a framework is not installed."""

from __future__ import annotations


def missing(module: str, package: str) -> ModuleNotFoundError:
    """The error of an adapter's import: which package is missing, and the extra that brings it.

    module is the adapter's, in integrations; the extra has its name.
    """
    extra = module.replace("_", "-")
    return ModuleNotFoundError(
        f"npu_embed.integrations.{module}: {package} cannot be imported, wanted it for this "
        f"adapter; pip install 'npu-embed[{extra}]'."
    )
