"""The command line. Each command has a file; what they share is in output.py.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a check failed or an error,
2 the command was not understood, 130 interrupted, 141 whoever read stdout stopped reading.
"""

from __future__ import annotations

from typing import IO, Any

import click

from ..api import __version__
from ..errors import NpuEmbedError
from .batch import batch, calibrate
from .check import check
from .doctor import doctor
from .embed import embed
from .export import export
from .get import get
from .inspect import inspect
from .output import in_options, log_to_stderr, replace_unencodable, visible
from .profile import profile
from .serve import serve

INTERRUPTED = 130
STDOUT_CLOSED = 141


class _Failure(click.ClickException):
    """An error of the package, in one line."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the message to stderr."""
        message = visible(in_options(self.message), keep_lines=True)
        click.echo(f"error: {message}", file=file, err=file is None)


class _Group(click.Group):
    """The commands, with every ending that is no bug turned into an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except NpuEmbedError as error:
            raise _Failure(str(error)) from error
        except BrokenPipeError:
            ctx.exit(STDOUT_CLOSED)
        except OSError as error:
            raise _Failure(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='\b\nExample:\n  npu-embed embed "two cats on a sofa" "a red car"',
)
@click.version_option(__version__, prog_name="npu-embed", message="%(prog)s %(version)s")
def main() -> None:
    """Text embeddings on AMD XDNA NPUs, and on an emulated NPU where there is none."""
    log_to_stderr()
    replace_unencodable()


for _command in (embed, batch, serve, export, get, calibrate, inspect, check, profile, doctor):
    main.add_command(_command)

__all__ = ["main"]
