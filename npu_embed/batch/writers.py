"""Writers of finished shards as one file: npy, safetensors, jsonl; a shard is held at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .shards import COLUMNS, EMBEDDING, ID, ROW, Store

if TYPE_CHECKING:
    import pyarrow as pa

DATA_ALIGNMENT_BYTES = 64
_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What is written: rows vectors of `width` numbers of a numpy dtype, and what they are.

    shards: the indices of those that hold them. schema: of the columns, where the output is a
    table. ids: whether the shards have integer ids.
    """

    rows: int
    width: int
    dtype: np.dtype[Any]
    shards: Sequence[int]
    metadata: Mapping[str, str]
    schema: pa.Schema | None
    ids: bool


def write_npy(file: BinaryIO, store: Store, layout: Layout) -> None:
    """The vectors as one npy array [rows, width]."""
    header = {
        "descr": np.lib.format.dtype_to_descr(layout.dtype),
        "fortran_order": False,
        "shape": (layout.rows, layout.width),
    }
    np.lib.format.write_array_header_1_0(file, header)
    for index in layout.shards:
        file.write(store.tensor(index, EMBEDDING).tobytes())


def write_safetensors(file: BinaryIO, store: Store, layout: Layout) -> None:
    """The tensors `embedding` [rows, width], `row` [rows] and, with ids, `id` [rows].

    The library's own writer wants them whole in memory.
    """
    integers = np.dtype(np.int64)
    tensors = [
        # The widest items first, so that each tensor is aligned to its items.
        *([(ID, integers, [layout.rows])] if layout.ids else []),
        (ROW, integers, [layout.rows]),
        (EMBEDDING, layout.dtype, [layout.rows, layout.width]),
    ]
    header: dict[str, object] = {"__metadata__": dict(layout.metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype.name],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, _, _ in tensors:
        for index in layout.shards:
            file.write(store.tensor(index, name).tobytes())


def write_jsonl(file: BinaryIO, store: Store, layout: Layout) -> None:
    """An object a line: the row's columns, and `embedding`, a list of numbers."""
    for index in layout.shards:
        vectors = numbers(store.tensor(index, EMBEDDING))
        lines = store.tensor(index, COLUMNS).tobytes().split(b"\n")
        for line, vector in zip(lines, vectors, strict=False):  # the last line is empty
            columns = line.removesuffix(b"}")
            comma = b"" if columns == b"{" else b", "
            file.write(b'%s%s"embedding": [%s]}\n' % (columns, comma, vector.encode("ascii")))


def numbers(vectors: NDArray[Any]) -> Iterator[str]:
    """Each vector's numbers as JSON, with the fewest digits that give the same number back."""
    for vector in vectors:
        yield ", ".join(vector.astype("U32").tolist())
