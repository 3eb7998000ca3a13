"""What a model family makes of a checkpoint: everything a bundle holds but hashes and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..records import Record

ATTENTIONS = ("npu", "host")
LAYOUTS = ("npu-embed", "published")

# (stage, done, total): called now and then, for a progress bar.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller chose: the NPU generation, the bundle's name, where attention runs."""

    target: str
    name: str
    attention: str = "npu"


@dataclass(frozen=True, slots=True)
class Parts:
    """Manifest records in order, tensors by name, file contents by path in the bundle.

    bf16: the names of uint16 tensors that hold the bits of bfloat16 numbers. published: the files
    are those of the published layout, whose tensors hold the tokenizer.
    """

    records: tuple[Record, ...]
    tensors: Mapping[str, NDArray[Any]]
    files: Mapping[str, bytes]
    bf16: frozenset[str] = frozenset()
    published: bool = False
