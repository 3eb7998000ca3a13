"""RoBERTa and XLM-RoBERTa: BERT, but for where positions begin and what is counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..device import Session
from ..manifest import Manifest
from ..packing import Pack
from .bert import Bert


def _pad_token_id(manifest: Manifest) -> int:
    return manifest.param_int("pad_token_id", minimum=0, maximum=1 << 24)


class Roberta(Bert):
    """A RoBERTa encoder with pooling, on a device."""

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None:
        self.pad_token_id = _pad_token_id(bundle.manifest)
        super().__init__(session, bundle, max_rows)

    @staticmethod
    def first_position(manifest: Manifest) -> int:
        """The position of a text's first token: behind the padding token's."""
        return _pad_token_id(manifest) + 1

    def position_ids(self, ids: NDArray[np.int32], pack: Pack) -> NDArray[np.intp]:
        """Each token's row of the position table: pad + 1, pad + 2, ... for each text in turn.

        A padding token, which a text has where somebody typed it, is at pad and is not counted.

        Source: transformers, RobertaEmbeddings.create_position_ids_from_input_ids.
        """
        counted = ids != self.pad_token_id
        running = np.cumsum(counted)
        starts = np.asarray(pack.starts)
        before = running[starts] - counted[starts]
        numbers: NDArray[np.intp] = counted * (running - np.repeat(before, pack.lengths))
        return numbers + self.pad_token_id
