"""A bundle's tensors, mapped read-only: safetensors, or tensors.txt with tensors.bin.

Both files are a stranger's. Every name, dtype, shape, offset and size is checked before a byte of
a tensor is touched, and nothing is copied. The formats are specified in docs/bundle-format.md.
"""

import json
import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import BundleError
from .jsontext import check_values
from .manifest import bundle_path
from .records import parse_int, parse_records, read_limited, shown

SAFETENSORS = "tensors.safetensors"
TENSORS_TXT = "tensors.txt"
TENSORS_BIN = "tensors.bin"
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8

# Bytes an element. Only those with a reader in Tensors can be read as numbers.
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "u8": 1, "i8": 1, "f8_e4m3": 1, "f8_e5m2": 1,
    "u16": 2, "i16": 2, "f16": 2, "bf16": 2,
    "u32": 4, "i32": 4, "f32": 4,
    "u64": 8, "i64": 8, "f64": 8,
}  # fmt: skip
VIEWED = ("f32", "f16", "bf16", "u8", "i32", "i64")  # with a reader in Tensors
TXT_DTYPES = ("f32", "bf16", "u8", "i32")
_MAX_INT = 2**63 - 1
_REEXPORT = "re-export the bundle"

Shape = tuple[int | None, ...]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: bytes [begin, end) of the file, elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Tensors:
    """Named tensors of one file, as read-only views of its mapped bytes.

    A view stays valid after `close`; the file must not be rewritten while any is in use.
    """

    __slots__ = ("_action", "_aliases", "_content", "_entries", "file")

    def __init__(
        self,
        file: str,
        entries: Mapping[str, Entry],
        content: npt.NDArray[np.uint8] | None,
        aliases: Mapping[str, str] | None = None,
        action: str = _REEXPORT,
    ) -> None:
        self.file = file
        self._action = action
        self._aliases = dict(aliases or {})
        self._entries = dict(entries)
        self._content: npt.NDArray[np.uint8] | None = content

    def aliased(self, aliases: Mapping[str, str]) -> "Tensors":
        """The same tensors, which may also be asked for by aliases: alias -> a tensor's name.

        Errors keep to the name in the file.
        """
        aliases = {**self._aliases, **aliases}
        return Tensors(self.file, self._entries, self._content, aliases, self._action)

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order of the file's table."""
        return tuple(self._entries)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return self._aliases.get(name, name) in self._entries

    def dtype(self, name: str) -> str:
        """The tensor's dtype in lower case: `f32`, `bf16`, `u8`, `i32` ..."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; () for a scalar."""
        return self._entry(name).shape

    def f32(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.float32]:
        """The tensor, which must be float32 and of this shape (None: any extent there)."""
        return self._view(name, "f32", np.dtype("<f4"), shape)

    def f16(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.float16]:
        """The tensor, which must be float16 and of this shape."""
        return self._view(name, "f16", np.dtype("<f2"), shape)

    def bf16(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.uint16]:
        """The bits of the tensor, which must be bfloat16 and of this shape."""
        return self._view(name, "bf16", np.dtype("<u2"), shape)

    def u8(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.uint8]:
        """The tensor, which must be of bytes and of this shape."""
        return self._view(name, "u8", np.dtype("u1"), shape)

    def i32(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.int32]:
        """The tensor, which must be int32 and of this shape."""
        return self._view(name, "i32", np.dtype("<i4"), shape)

    def i64(self, name: str, shape: Shape | None = None) -> npt.NDArray[np.int64]:
        """The tensor, which must be int64 and of this shape."""
        return self._view(name, "i64", np.dtype("<i8"), shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor [bytes], whatever its dtype: how packed weights are read."""
        entry = self._entry(name)
        if self._content is None:
            raise ValueError(f"{self.file}: closed, wanted it open; open the bundle again.")
        return self._content[entry.begin : entry.end]

    def close(self) -> None:
        """Forgets the file; it is unmapped when the last view of it is gone."""
        self._content = None

    def _entry(self, name: str) -> Entry:
        name = self._aliases.get(name, name)
        try:
            return self._entries[name]
        except KeyError:
            raise BundleError(f"tensor {name} missing from {self.file}; {self._action}.") from None

    def _view(
        self, name: str, dtype: str, numpy_dtype: np.dtype[_Scalar], shape: Shape | None
    ) -> npt.NDArray[_Scalar]:
        entry = self._entry(name)
        where = f"{self.file}: tensor {self._aliases.get(name, name)}"
        if entry.dtype != dtype:
            raise BundleError(f"{where} is {entry.dtype}, wanted {dtype}; {self._action}.")
        # tensors.txt does not bind a packed tensor's shape to its bytes, so it is checked here.
        size_bytes = math.prod(entry.shape) * ITEM_BYTES[dtype]
        if size_bytes != entry.end - entry.begin:
            raise BundleError(
                f"{where}: {entry.end - entry.begin} bytes, wanted {size_bytes} for {dtype} "
                f"{list(entry.shape)}; {self._action}."
            )
        fits = shape is None or (
            len(shape) == len(entry.shape)
            and all(want in (None, found) for want, found in zip(shape, entry.shape, strict=True))
        )
        if shape is not None and not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise BundleError(
                f"{where} has shape {list(entry.shape)}, wanted [{wanted}]; {self._action}."
            )
        return self.raw(name).view(numpy_dtype).reshape(entry.shape)


def open_tensors(folder: Path) -> Tensors:
    """The tensors of the bundle in `folder`, in either of the two formats.

    Raises:
        BundleError: neither format or both are there, or the file is damaged.
    """
    ours, published = (folder / SAFETENSORS).exists(), (folder / TENSORS_TXT).exists()
    if ours and published:
        raise BundleError(
            f"{folder}: {SAFETENSORS} and {TENSORS_TXT}, wanted one of them; remove the other."
        )
    if published:
        return _open_txt(
            bundle_path(folder, TENSORS_TXT, str(folder)),
            bundle_path(folder, TENSORS_BIN, str(folder)),
        )
    return open_safetensors(bundle_path(folder, SAFETENSORS, str(folder)))


def open_safetensors(path: Path, *, name: str | None = None, action: str = _REEXPORT) -> Tensors:
    """The tensors of a safetensors file.

    name is what errors call it, else the path's last part; action is what they say to do.

    Raises:
        BundleError: the file is truncated or damaged; the message names the tensor at fault.
    """
    file = name or path.name
    content = _mapped(path, file, action)
    if content.size < 8:
        raise _truncated(file, "at least 8", content.size)
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise BundleError(
            f"{file}: a header of {header_bytes} bytes, wanted 2 to {MAX_HEADER_BYTES}; {action}."
        )
    start = 8 + header_bytes
    if content.size < start:
        raise _truncated(file, f"at least {start}", content.size)
    header = _json_object(content[8:start].tobytes(), file, action)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise BundleError(f"{file}: __metadata__ is no JSON object, wanted one; {action}.")
    entries = {key: _entry(key, value, start, file, action) for key, value in header.items()}
    end = _check_order(entries, start, file, action, gaps=False)
    if end > content.size:
        raise _truncated(file, str(end), content.size)
    if end < content.size:
        raise BundleError(
            f"file {file}: expected {end} bytes, found {content.size}, "
            f"{content.size - end} of them after the last tensor; {action}."
        )
    return Tensors(file, entries, content, action=action)


def write_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], bf16: Collection[str] = ()
) -> None:
    """Writes a safetensors file; the same tensors give the same bytes.

    Args:
        path: the file; one that exists is overwritten.
        tensors: by name, of dtypes that Tensors reads.
        bf16: names of uint16 tensors that hold the bits of bfloat16 numbers.

    Raises:
        ValueError: an array has another dtype, or a name is reserved.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    dtypes = {name: _dtype_of(name, array, name in bf16) for name, array in arrays.items()}
    # Large items first keeps every tensor aligned to its item without gaps, which are forbidden.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in order:
        end = offset + arrays[name].nbytes
        header[name] = {
            "dtype": dtypes[name].upper(),
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(arrays[name].reshape(-1).view(np.uint8).data)


def _dtype_of(name: str, array: npt.NDArray[Any], is_bf16: bool) -> str:
    dtype = {"f4": "f32", "f2": "f16", "u1": "u8", "i4": "i32", "i8": "i64", "u2": "bf16"}.get(
        array.dtype.str[1:] if array.dtype.str[0] in "<|" else ""
    )
    if dtype is None or (dtype == "bf16") != is_bf16 or name == "__metadata__":
        raise ValueError(
            f"tensor {name}: {array.dtype}{' as bf16' if is_bf16 else ''}, wanted float32, "
            "float16, uint8, int32, int64, or uint16 as bf16; convert it."
        )
    return dtype


def _mapped(path: Path, file: str, action: str = _REEXPORT) -> npt.NDArray[np.uint8]:
    """The file's bytes, mapped read-only. An empty file cannot be mapped and needs no map."""
    try:
        with path.open("rb") as opened:
            if opened.seek(0, 2) == 0:
                return np.frombuffer(b"", dtype=np.uint8)
            return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as exc:
        raise BundleError(f"{file}: {exc.strerror}, wanted a file; {action}.") from exc


def _truncated(file: str, expected: str, found: int) -> BundleError:
    return BundleError(f"file {file}: expected {expected} bytes, found {found}; copy it again.")


def _json_object(text: bytes, file: str, action: str) -> dict[str, Any]:
    """The JSON object that `text` spells, no key of any object in it given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise BundleError(f"{file}: {shown(name)} twice in the header; {action}.")
            made[name] = value
        return made

    check_values(f"{file}: the header", text, action)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        raise BundleError(f"{file}: the header is not JSON ({exc}); {action}.") from exc
    if not isinstance(header, dict):
        raise BundleError(f"{file}: the header is no JSON object, wanted one; {action}.")
    return header


def _entry(name: str, value: object, start: int, file: str, action: str) -> Entry:
    """The checked entry of a safetensors header; offsets become those of the file."""
    where = f"{file}: tensor {shown(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BundleError(f"{where}: wanted dtype, shape and data_offsets; {action}.")
    dtype = str(value["dtype"]).lower()
    if dtype not in ITEM_BYTES:
        raise BundleError(
            f"{where} is {shown(str(value['dtype']))}, wanted {', '.join(ITEM_BYTES)}; {action}."
        )
    shape, offsets = value["shape"], value["data_offsets"]
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(
            type(n) is int and 0 <= n <= _MAX_INT for n in numbers
        ):
            raise BundleError(
                f"{where}: {what} is {shown(str(numbers))}, wanted integers from 0; {action}."
            )
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise BundleError(
            f"{where}: {len(shape)} dimensions and {len(offsets)} offsets, wanted at most "
            f"{MAX_DIMS} and 2; {action}."
        )
    begin, end = offsets
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != wanted:
        raise BundleError(
            f"{where}: offsets {begin} to {end}, wanted {wanted} bytes for {dtype} {shape}; "
            f"{action}."
        )
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _check_order(
    entries: Mapping[str, Entry], start: int, file: str, action: str = _REEXPORT, *, gaps: bool
) -> int:
    """The end of the last tensor; none may overlap another, nor leave a gap unless allowed."""
    end, last = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end or (entry.begin > end and not gaps):
            problem = "overlaps" if entry.begin < end else "leaves a gap after"
            raise BundleError(
                f"{file}: tensor {shown(name)} at byte {entry.begin} {problem} {last}, which ends "
                f"at {end}; {action}."
            )
        end, last = entry.end, f"tensor {shown(name)}"
    return end


def _open_txt(table: Path, data: Path) -> Tensors:
    """The tensors of the published format: a table in text, and the bytes."""
    entries: dict[str, Entry] = {}
    for record in parse_records(read_limited(table), table.name):
        name = record.tag
        if len(record.fields) != 4:
            raise record.error(
                f"{len(record.fields) + 1} fields, wanted NAME DTYPE SHAPE OFFSET BYTES"
            )
        dtype, dims, *_ = record.fields
        if dtype not in TXT_DTYPES:
            raise record.error(f"tensor {name} is {shown(dtype)}, wanted {', '.join(TXT_DTYPES)}")
        shape = tuple(
            parse_int(dim, record.where, f"tensor {name} shape", minimum=0)
            for dim in dims.split(",")
        )
        begin = record.field_int(2, "OFFSET", minimum=0)
        size_bytes = record.field_int(3, "BYTES", minimum=0)
        if len(shape) > MAX_DIMS or begin % 8 or size_bytes % ITEM_BYTES[dtype]:
            raise record.error(
                f"tensor {name}: {len(shape)} dimensions at byte {begin}, {size_bytes} bytes, "
                f"wanted at most {MAX_DIMS}, a multiple of 8, whole {dtype} elements"
            )
        if name in entries:
            raise record.error(f"tensor {name} for the second time, wanted it once")
        entries[name] = Entry(dtype, shape, begin, begin + size_bytes)
    content = _mapped(data, data.name)
    end = _check_order(entries, 0, table.name, gaps=True)
    if end > content.size:
        raise _truncated(data.name, f"at least {end}", content.size)
    return Tensors(data.name, entries, content)
