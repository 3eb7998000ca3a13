"""Bytes of a TXN stream <-> Stream: header, ops, and the checks that make a stream valid.

Two encodings exist. Version 0.1 (mlir-aie, AMD's 2025 files) pads ops and gives most a size word;
version 1.0 (aiebu, aie-codegen "opt") leaves both out of the fixed ones. The header says which.
Either may stand in an outer wrapper of two words: 0, size + 8.

A stream is valid when its num_ops ops end exactly at its size. Everything a file claims is checked
against the words that are there before it is used.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .txn_layout import LAYOUTS, Layout
from .txn_ops import Op, TxnError

Words: TypeAlias = npt.NDArray[np.uint32]
Data: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint32]

_HEADER_WORDS = 4
_WRAPPER_WORDS = 2
MAX_OPS = 1 << 19  # of a stream; real ones have some thousands, and each takes 40 times its word
_REMEDY = "the instruction stream is damaged, make or download it again."


@dataclass(frozen=True, slots=True)
class Header:
    """The four words before the ops. dev_gen: 3 = NPU1, 4 = NPU2; size_bytes includes them."""

    major: int
    minor: int
    dev_gen: int
    num_rows: int
    num_cols: int
    num_memtile_rows: int
    num_ops: int
    size_bytes: int
    raw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """A decoded instruction stream.

    wrapper: the two words before the header, or none. padding_words: zero words after the stream,
    as files padded to an alignment have them.
    """

    header: Header
    ops: tuple[Op, ...]
    wrapper: tuple[int, ...] = ()
    padding_words: int = 0

    def encode(self) -> bytes:
        """The bytes this stream was decoded from: wrapper, header, words of all ops, padding."""
        words = [*self.wrapper, *self.header.raw]
        for op in self.ops:
            words += op.raw
        return np.array(words, "<u4").tobytes() + bytes(4 * self.padding_words)


def decode(data: Data, *, exact: bool = True) -> Stream:
    """The stream in `data`, version 0.1 or 1.0, with or without the outer wrapper.

    data: bytes in little endian order, or an array of uint32 words.
    exact: nothing but zero words may follow the stream. False is for instruction buffers, which
    may be longer than the stream they carry: the header's size decides, the rest is not read.

    Word indices in the result count from the first word of `data`, the wrapper's included.

    Raises:
        TxnError: `data` holds no valid stream; with the op and the word at fault.
    """
    words = as_words(data)
    start = _WRAPPER_WORDS if len(words) > _WRAPPER_WORDS and words[0] == 0 else 0
    header = _decode_header(words, start)
    end = start + header.size_bytes // 4
    if start and words[1] != header.size_bytes + 8:
        raise TxnError(
            f"word 1: wrapper size {words[1]} bytes, wanted the stream's {header.size_bytes} + 8; "
            f"{_REMEDY}",
            word=1,
        )
    padding_words = 0
    if exact:
        padding_words = len(words) - end
        if words[end:].any():
            word = end + int(np.flatnonzero(words[end:])[0])
            raise TxnError(
                f"word {word}: data after the stream's {header.size_bytes} bytes, wanted nothing "
                f"or zeros; {_REMEDY}",
                word=word,
            )
    ops = _decode_ops(words[:end].tolist(), start + _HEADER_WORDS, header)
    return Stream(header, ops, tuple(words[:start].tolist()), padding_words)


def assemble(
    ops: Iterable[Op],
    *,
    dev_gen: int,
    num_cols: int,
    num_rows: int = 6,
    num_memtile_rows: int = 1,
) -> Stream:
    """A version 0.1 stream of these ops, each with its word set to its place in the stream.

    Raises:
        TxnError: a header field exceeds 8 bits, or an op is not in its version 0.1 form.
    """
    fields = {
        "dev_gen": dev_gen,
        "num_rows": num_rows,
        "num_cols": num_cols,
        "num_memtile_rows": num_memtile_rows,
    }
    for name, value in fields.items():
        if not 0 <= value <= 0xFF:
            raise TxnError(f"header {name}: found {value}, wanted 0 to 255; pass a byte.")
    raws = [op.raw for op in ops]
    size_bytes = 4 * (_HEADER_WORDS + sum(map(len, raws)))
    head = struct.pack(
        "<6BHII", 0, 1, dev_gen, num_rows, num_cols, num_memtile_rows, 0, len(raws), size_bytes
    )
    body = np.array([word for raw in raws for word in raw], "<u4").tobytes()
    # Decoding our own bytes places the ops and refuses those of another version's form.
    return decode(head + body)


def as_words(data: Data) -> Words:
    """The data as a flat array of 32-bit words, in a view where possible.

    Raises:
        TxnError: the length is not a multiple of 4 bytes, or an array's words are not 32 bits wide.
    """
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint32:
            raise TxnError(f"word array: dtype {data.dtype}, wanted uint32; view or convert it.")
        return np.ascontiguousarray(data).ravel()
    view = memoryview(data)
    if view.nbytes % 4:
        raise TxnError(
            f"end of data: {view.nbytes} bytes, wanted a multiple of 4; {_REMEDY}",
            word=view.nbytes // 4,
        )
    return np.frombuffer(view if view.c_contiguous else view.tobytes(), "<u4")


def _decode_header(words: Words, start: int) -> Header:
    """The header at word `start`, its version known and its size inside the data."""
    there = len(words) - start
    if there < _HEADER_WORDS:
        raise TxnError(
            f"header: {max(there, 0)} words, wanted {_HEADER_WORDS}; {_REMEDY}", word=len(words)
        )
    raw: tuple[int, ...] = tuple(words[start : start + _HEADER_WORDS].tolist())
    first, second, num_ops, size_bytes = raw
    major, minor = first & 0xFF, first >> 8 & 0xFF
    if (major, minor) not in LAYOUTS:
        raise TxnError(
            f"header at word {start}: version {major}.{minor}, wanted 0.1 or 1.0; "
            "pass a TXN instruction stream.",
            word=start,
        )
    if size_bytes % 4 or not 4 * _HEADER_WORDS <= size_bytes <= 4 * there:
        raise TxnError(
            f"header at word {start}: size {size_bytes} bytes, wanted a multiple of 4 from 16 "
            f"to the {4 * there} there are; {_REMEDY}",
            word=start + 3,
        )
    if num_ops > MAX_OPS:
        raise TxnError(
            f"header at word {start}: {num_ops} ops, wanted at most {MAX_OPS}; {_REMEDY}",
            word=start + 2,
        )
    return Header(
        major=major,
        minor=minor,
        dev_gen=first >> 16 & 0xFF,
        num_rows=first >> 24,
        num_cols=second & 0xFF,
        num_memtile_rows=second >> 8 & 0xFF,
        num_ops=num_ops,
        size_bytes=size_bytes,
        raw=raw,
    )


def _decode_ops(words: list[int], at: int, header: Header) -> tuple[Op, ...]:
    """The ops from word `at` on, which must fill `words` exactly."""
    layouts = LAYOUTS[header.major, header.minor]
    end = len(words)
    ops: list[Op] = []
    while at < end:
        index = len(ops)
        if index == header.num_ops:
            raise TxnError(
                f"header: {header.num_ops} ops end at word {at}, wanted word {end}, where the size "
                f"says the stream ends; {_REMEDY}",
                op_index=index,
                word=at,
            )
        layout = layouts.get(words[at] & 0xFF)
        if layout is None:
            raise TxnError(
                f"op {index} at word {at}: unknown opcode {words[at] & 0xFF:#04x} in version "
                f"{header.major}.{header.minor}; {_REMEDY}",
                op_index=index,
                word=at,
            )
        length = _op_words(layout, words, at, index)
        raw = tuple(words[at : at + length])
        for high in layout.high_words:
            if high < length and raw[high]:
                raise TxnError(
                    f"op {index} ({layout.name}) at word {at}: {raw[high]:#x} in the upper "
                    f"half of a 32-bit field, wanted 0; {_REMEDY}",
                    op_index=index,
                    word=at + high,
                )
        ops.append(layout.build(raw, at))
        at += length
    if len(ops) != header.num_ops:
        raise TxnError(
            f"header: {header.num_ops} ops, found {len(ops)} in {header.size_bytes} bytes; "
            f"{_REMEDY}",
            op_index=len(ops),
            word=end,
        )
    return tuple(ops)


def _op_words(layout: Layout, words: list[int], at: int, index: int) -> int:
    """How many words the op at `at` has, all of them inside `words`."""
    there = len(words) - at
    length = layout.head_words
    if layout.size_word is not None and length <= there:
        size_bytes = words[at + layout.size_word]
        if layout.sizes:
            good, wanted = size_bytes in layout.sizes, " or ".join(map(str, layout.sizes))
        else:
            good = size_bytes % 4 == 0 and size_bytes >= 4 * length
            wanted = f"a multiple of 4 from {4 * length} on"
        if not good:
            raise TxnError(
                f"op {index} ({layout.name}) at word {at}: size {size_bytes} bytes, "
                f"wanted {wanted}; {_REMEDY}",
                op_index=index,
                word=at + layout.size_word,
            )
        length = size_bytes // 4
    if length > there:
        raise TxnError(
            f"op {index} ({layout.name}) at word {at}: needs {length} words, {there} are left in "
            f"the stream; {_REMEDY}",
            op_index=index,
            word=at,
        )
    return length
