"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InputError, InputTypeError


def as_path(where: str, value: object) -> Path:
    """The path of an argument; `where` is its name, which begins the error.

    Raises:
        InputTypeError: it is neither a str nor a path.
        InputError: no file can be called that.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputTypeError(f"{where}={value!r}: {type(value).__name__}, wanted a path as str.")
    if "\0" in text:
        raise InputError(f"{where}={text!r}: a NUL in a path, wanted none; correct the path.")
    return Path(text)
