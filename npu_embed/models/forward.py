"""What the embedder asks of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..bf16 import F32
from ..bundle import Bundle
from ..device import Session
from ..packing import Pack
from ..trace import Timing

Tap = Callable[[str, F32], None]


class Forward(Protocol):
    """A model on a device."""

    dim: int
    max_rows: int

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None: ...

    def forward(
        self,
        ids: Sequence[NDArray[np.int32]],
        pack: Pack,
        timing: Timing,
        tap: Tap | None = None,
    ) -> F32:
        """The vectors of a pack's texts in the pack's order, float32 [texts, dim].

        ids: the token ids of each of the pack's texts. tap, if given, is called with each stage's
        name and its hidden rows, float32 [rows, hidden_size], which it must not keep or change.
        """
        ...

    def close(self) -> None:
        """Release kernels, contexts and buffers."""
        ...
