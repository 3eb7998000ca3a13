"""npu-embed inspect: what is in a bundle, an xclbin or an instruction stream."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from ..bundle import no_such_bundle
from ..emulator import xclbin
from ..errors import InputError
from ..records import MANIFEST
from . import inspect_bundle, inspect_insts, inspect_lint, inspect_xclbin
from .bundles import chosen_bundle, named_bundle
from .output import console, echo_json

MAX_OTHER_BYTES = 16 << 20  # of what is no xclbin
XCLBIN_MAGIC = b"xclbin2\0"
_MAKE = (
    "make one with `npu-embed export CHECKPOINT OUT`, or the default one with `npu-embed get "
    "minilm`"
)


@click.command(
    short_help="Show what is in a bundle, xclbin or stream.",
    epilog="\b\nExamples:\n  npu-embed inspect\n"
    "  npu-embed inspect --lint minilm\n"
    "  npu-embed inspect --words $(npu-embed get minilm)/kernels/mha_16.insts.bin",
)
@click.argument("path", metavar="[BUNDLE|XCLBIN|INSTS]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--words", is_flag=True, help="All word indices to patch; the words of each instruction."
)
@click.option("--lint", is_flag=True, help="What is wrong with a bundle's kernels; exit 1 if any.")
@click.pass_context
def inspect(ctx: click.Context, path: str | None, as_json: bool, words: bool, lint: bool) -> None:
    """Show a bundle's contexts, kernels and tensors, an xclbin's contents, or disassemble a stream.

    A BUNDLE is a folder, or the name of one for `npu-embed get`; the default one where nothing is
    named.

    What it is, its content tells and not its name. Streams may be TXN, binary or text, or of the
    form older than TXN. --lint reads all streams of a bundle and says what a run would fail or hang
    at: operations, words to patch, arguments, views and tokens that do not fit each other.
    """
    place = chosen_bundle(path) if path is None else named_bundle(path) or Path(path)
    if os.path.isdir(place):  # where Path.is_dir raises, as for a name too long, _read says why
        if _bundle(place, as_json=as_json, words=words, lint=lint):
            ctx.exit(1)
        return
    if lint and not os.path.lexists(place):
        raise no_such_bundle(place)
    if lint:
        raise InputError(
            f"{place}: no folder, wanted a bundle to lint; `npu-embed get minilm` prints one's."
        )
    data = _read(place)
    if data.startswith(XCLBIN_MAGIC):
        try:
            container = inspect_xclbin.describe(place, xclbin.parse(data))
        except xclbin.XclbinError as error:
            raise InputError(f"{place}: {error}") from error
        if as_json:
            echo_json(container)
        else:
            inspect_xclbin.show(console(), container)
        return
    stream = inspect_insts.describe(place, data, words=words)
    if as_json:
        echo_json(stream)
    else:
        inspect_insts.show(console(), stream)


def _bundle(folder: Path, *, as_json: bool, words: bool, lint: bool) -> bool:
    """Show a bundle, or what is wrong with it; whether something is.

    Raises:
        InputError: it is no bundle.
    """
    if not (folder / MANIFEST).exists():
        raise InputError(f"{folder}: a folder without {MANIFEST}, wanted a bundle; {_MAKE}.")
    if lint:
        return inspect_lint.show(folder, as_json=as_json)
    bundle = inspect_bundle.describe(folder)
    if as_json:
        echo_json(bundle)
    else:
        inspect_bundle.show(console(), bundle, words=words)
    return False


def _read(path: Path) -> bytes:
    """The content of a regular file of a size that its kind can have; its first bytes tell which.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    wanted = "wanted a bundle, an xclbin or an instruction stream"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file, {wanted}.")
        with path.open("rb") as file:
            magic = file.read(len(XCLBIN_MAGIC))
            most = xclbin.MAX_FILE_BYTES if magic == XCLBIN_MAGIC else MAX_OTHER_BYTES
            if status.st_size > most:
                raise InputError(f"{path}: {status.st_size} bytes, {wanted} of at most {most}.")
            return magic + file.read(most)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such folder or file, {wanted}; {_MAKE}.") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, {wanted}.") from error
    except ValueError as error:  # a NUL in the path; InputError is one, too
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r}: {error}, {wanted}.") from error
