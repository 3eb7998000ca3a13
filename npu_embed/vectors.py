"""What is asked of vectors, and what they must be before they are returned."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .bf16 import F32
from .errors import DeviceError, InputError, InputTypeError
from .hostops import unit_rows


def checked_dim(dim: object, whole: int) -> int:
    """The length asked for, an int from 1 to whole; None is whole.

    Raises:
        InputError, InputTypeError: it is no such number.
    """
    if dim is None:
        return whole
    try:
        value = operator.index(dim) if not isinstance(dim, bool | np.bool_) else None  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None:
        raise InputTypeError(
            f"dim={dim!r}: {type(dim).__name__}, wanted an integer from 1 to {whole}."
        )
    if not 1 <= value <= whole:
        raise InputError(f"dim={value}: wanted 1 to {whole}.")
    return value


def cut(vectors: F32, dim: int, kind: str = "texts", first: int = 0) -> F32:
    """The first dim numbers of each vector, of unit length again; whole vectors as they are.

    `first` is the index that errors give the first.

    Raises:
        DeviceError: those numbers of one are all zero, or nearly so.
    """
    return normalized(vectors[:, :dim], kind, first) if dim < vectors.shape[1] else vectors


def normalized(vectors: F32, kind: str = "texts", first: int = 0) -> F32:
    """The vectors at unit length, float32 [vectors, dim].

    Raises:
        DeviceError: one is shorter than 1e-12, so that it has no direction.
    """
    unit = unit_rows(vectors)
    check_finite(unit, range(first, first + len(unit)), kind)
    return unit


def check_finite(vectors: F32, indices: Sequence[int], kind: str = "texts") -> None:
    """A vector with a NaN or an infinity is never returned; indices: of what is embedded.

    Raises:
        DeviceError: there is one.
    """
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        index = indices[int(np.argmin(finite))]
        raise DeviceError(
            f"{kind}[{index}]: its vector is not finite, or zero where unit length is wanted; "
            "nothing is returned. Run `npu-embed check` on the bundle to see which stage fails."
        )
