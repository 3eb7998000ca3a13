"""What the server and its worker process say to each other, pickled through a pipe."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..bf16 import F32
from ..records import MANIFEST
from ..stats import Stats


@dataclass(frozen=True, slots=True)
class Opening:
    """What the worker opens; device as for Embedder."""

    bundle: Path
    device: str | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has opened its engine and run it once.

    fingerprint is the bundle's, to see that both processes read the same; pack_rows the most
    tokens of a pack.
    """

    device: str
    dim: int
    pack_rows: int
    contexts: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Order:
    """Texts to embed: their token ids one after another, and how many each has."""

    ids: NDArray[np.int32]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """How many contexts are held now?"""


@dataclass(frozen=True, slots=True)
class Done:
    """An order's vectors, float32 [texts, dim], and what they took; retried: at the second try."""

    vectors: F32
    stats: Stats
    contexts: int
    retried: bool


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to Ask."""

    contexts: int


@dataclass(frozen=True, slots=True)
class Failed:
    """What an order, or opening, failed with: the error's class and words."""

    kind: str
    message: str
    contexts: int = 0


@dataclass(frozen=True, slots=True)
class LogLine:
    """Something the engine logged, for the server's log."""

    logger: str
    level: int
    message: str


def fingerprint(bundle: Path) -> str:
    """The sha256 of a bundle's manifest, which names every file of it."""
    return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
