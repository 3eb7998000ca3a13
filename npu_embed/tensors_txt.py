"""tensors.txt and tensors.bin written, as the published layout has them; tensors.py reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .tensors import TENSORS_BIN, TENSORS_TXT

ALIGN_BYTES = 64
_DTYPES = {"f4": "f32", "u2": "bf16", "u1": "u8", "i4": "i32"}


def write_tensors_txt(
    folder: Path, tensors: Mapping[str, npt.NDArray[Any]], bf16: Collection[str] = ()
) -> None:
    """Writes the two files in `folder`, each tensor at a multiple of 64 bytes, in the given order.

    bf16: names of uint16 tensors that hold the bits of bfloat16 numbers.

    Raises:
        ValueError: an array has a dtype the format has not, no dimension, or a name with spaces.
    """
    lines = []
    offset = 0
    with (folder / TENSORS_BIN).open("wb") as file:
        for name, array in tensors.items():
            dtype = _DTYPES.get(array.dtype.newbyteorder("<").str[1:])
            wrong = dtype is None or array.dtype.byteorder == ">" or not array.ndim
            if wrong or (dtype == "bf16") != (name in bf16) or name.split() != [name]:
                raise ValueError(
                    f"tensor {name!r}: {array.dtype} {list(array.shape)}, wanted float32, uint8, "
                    "int32 or uint16 as bf16, with a dimension, and a name without spaces."
                )
            shape = ",".join(map(str, array.shape))
            file.write(bytes(-offset % ALIGN_BYTES))
            offset += -offset % ALIGN_BYTES
            lines.append(f"{name} {dtype} {shape} {offset} {array.nbytes}\n")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            offset += array.nbytes
    (folder / TENSORS_TXT).write_text("".join(lines), encoding="utf-8", newline="\n")
