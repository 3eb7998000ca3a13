"""npu-embed inspect: what is in a bundle, an xclbin or an instruction stream."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from ..emulator import xclbin
from ..errors import InputError
from ..records import MANIFEST
from . import inspect_bundle, inspect_insts, inspect_xclbin
from .output import console, echo_json

MAX_OTHER_BYTES = 16 << 20  # of what is no xclbin
XCLBIN_MAGIC = b"xclbin2\0"


@click.command(
    short_help="What is in a bundle, xclbin or stream.",
    epilog="\b\nExamples:\n  npu-embed inspect minilm-bundle\n"
    "  npu-embed inspect --words minilm-bundle/kernels/mha_16.insts.bin",
)
@click.argument("path", metavar="BUNDLE|XCLBIN|INSTS")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--words", is_flag=True, help="All word indices to patch; the words of each instruction."
)
def inspect(path: str, as_json: bool, words: bool) -> None:
    """Show a bundle's contexts, kernels and tensors, an xclbin's contents, or disassemble a stream.

    What PATH is, its content tells and not its name. Streams may be TXN, binary or text, or of the
    form older than TXN.
    """
    place = Path(path)
    if os.path.isdir(place):  # where Path.is_dir raises, as for a name too long, _read says why
        if not (place / MANIFEST).exists():
            raise InputError(f"{place}: a folder without {MANIFEST}, wanted a bundle.")
        bundle = inspect_bundle.describe(place)
        if as_json:
            echo_json(bundle)
        else:
            inspect_bundle.show(console(), bundle, words=words)
        return
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


def _read(path: Path) -> bytes:
    """The content of a regular file of a size that its kind can have; its first bytes tell which.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    wanted = "wanted a bundle folder, an xclbin or an instruction stream"
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
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, {wanted}.") from error
    except ValueError as error:  # a NUL in the path; InputError is one, too
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r}: {error}, {wanted}.") from error
