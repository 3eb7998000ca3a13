"""The int8 ranges of a job: a calibration's, or the bundle's."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..manifest import sha256_file
from ..quantization import INT8, RANGES_FILE, Int8Ranges, bundle_ranges
from .compute import How
from .folder import write_whole
from .formats import NPY
from .row import Names
from .scan import bad_row_error
from .sources import STDIN, all_rows, expand, make_source

if TYPE_CHECKING:
    from ..embedder import Embedder

CALIBRATION_ROWS = 10_000
# Of other texts' numbers 2 in N + 1 lie beyond the ranges of N texts: with these, 1 in 100.
MIN_CALIBRATION_ROWS = 200

log = logging.getLogger("npu_embed")


def is_vectors(path: Path) -> bool:
    """Whether a calibration file holds vectors, not texts."""
    return path.suffix.lower() == f".{NPY}"


def identity(embedder: Embedder, dtype: str, file: Path | None) -> str:
    """What tells one job's ranges from another's; "" where none are used.

    Raises:
        InputError: the file is not there, or is of no use for this dtype.
    """
    if dtype != INT8:
        if file is not None:
            raise InputError(
                f"--calibrate {file}: dtype {dtype} has no ranges, wanted dtype int8; leave it out."
            )
        return ""
    if file is not None:
        if not file.is_file():
            raise InputError(f"--calibrate {file}: no such file, wanted texts or vectors (.npy).")
        return f"calibration {sha256_file(file)}"
    ranges = bundle_ranges(embedder.bundle.path)
    return "" if ranges is None else f"bundle {_digest(ranges)}"


def _digest(ranges: Int8Ranges) -> str:
    return hashlib.sha256(ranges.as_array().tobytes()).hexdigest()


def int8_ranges(
    embedder: Embedder, how: How, file: Path | None, names: Names, dim: int
) -> Int8Ranges | None:
    """The ranges of int8 vectors of `dim` numbers: of the file, else of the bundle, else None.

    Raises:
        InputError: the file is damaged, has another dim, or a text that cannot be embedded.
        BundleError: the bundle's are damaged.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    if how.dtype != INT8:
        return None
    if file is None:
        return bundle_ranges(embedder.bundle.path)
    if not is_vectors(file):
        return ranges_of_texts(embedder, how, [str(file)], None, names)
    vectors = _read_vectors(file)
    if vectors.shape[1:] != (dim,):
        raise InputError(
            f"--calibrate {file}: vectors of shape {list(vectors.shape)}, wanted [rows, {dim}]; "
            "make them with the same --dim."
        )
    _warn_of_few(len(vectors), f"--calibrate {file}", "vectors")
    return Int8Ranges.of(vectors)


def _warn_of_few(rows: int, where: str, what: str) -> None:
    if rows < MIN_CALIBRATION_ROWS:
        log.warning(
            "%s: %d %s, wanted %d at least: many numbers of other texts will lie beyond ranges of "
            "so few, and be set to the range's end; give more, like those to be embedded",
            where,
            rows,
            what,
            MIN_CALIBRATION_ROWS,
        )


def _read_vectors(file: Path) -> np.ndarray[Any, Any]:
    try:
        return np.lib.format.open_memmap(file, mode="r")  # of npy alone: no zip, no pickle
    except Exception as error:  # numpy reads the header with Python's tokenizer, with its errors
        raise InputError(f"--calibrate {file}: {error}, wanted an npy file of vectors.") from error


def ranges_of_texts(
    embedder: Embedder, how: How, files: list[str], input_format: str | None, names: Names
) -> Int8Ranges:
    """The ranges of the vectors of the first CALIBRATION_ROWS texts of some files.

    Raises:
        InputError: a file or a row that cannot be read.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    names = Names(names.text)
    sources = [make_source(file, input_format, None) for file in files]
    texts: list[str] = []
    for row in islice(all_rows(sources, names), CALIBRATION_ROWS):
        if row.problem:
            raise bad_row_error(row.where, row.problem, row.advice)
        texts.append(row.text)
    _warn_of_few(len(texts), f"calibration with {', '.join(files)[:200]}", "texts")
    return Int8Ranges.of(embedder.embed(texts, how.prompt, how.dim, how.truncate, progress=True))


def calibrate_bundle(
    embedder: Embedder, inputs: Iterable[str], *, column: str = "text", prompt: str | None = None
) -> Path:
    """The file with the int8 ranges of the embedder's bundle, made of the texts of some files.

    Raises:
        InputError: a file or a row that cannot be read.
        OutputError: the bundle's folder cannot be written.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    inputs = list(inputs)
    if STDIN in inputs:
        raise InputError("-: stdin, wanted files of texts; write it to one.")
    path = embedder.bundle.path / RANGES_FILE
    how = How(prompt, None, True, INT8)
    ranges = ranges_of_texts(embedder, how, expand(inputs, path), None, Names(column))
    content = io.BytesIO()
    np.save(content, ranges.as_array())
    write_whole(path, content.getvalue())
    return path
