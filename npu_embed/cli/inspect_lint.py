"""A bundle's lint: findings a line each, or as JSON lines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..bundle import Bundle
from ..lint import lint
from .output import echo_json, visible


def show(path: Path, *, as_json: bool) -> bool:
    """Print every finding; whether there were any.

    Raises:
        BundleError: the bundle cannot be opened.
    """
    bundle = Bundle.open(path)
    count = 0
    try:
        for finding in lint(bundle):
            count += 1
            if as_json:
                echo_json(asdict(finding))
            else:
                click.echo(visible(str(finding)))
    finally:
        bundle.close()
    if as_json:
        echo_json({"verdict": "FAIL" if count else "PASS", "findings": count})
    else:
        click.echo(f"{count} findings" if count != 1 else "1 finding")
    return count > 0
