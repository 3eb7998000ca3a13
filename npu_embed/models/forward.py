"""What the embedder asks of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .. import jit
from ..bf16 import F32
from ..bundle import Bundle
from ..device import Buffer, Session
from ..errors import BundleError
from ..npu import Npu
from ..packing import Pack
from ..schedule import Steps, run_together
from ..trace import Timing

Tap = Callable[[str, F32], None]


class Forward(Protocol):
    """A model on a device."""

    dim: int
    max_rows: int
    npu: Npu

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None: ...

    def contexts(self) -> list[str]:
        """The xclbin keys of a forward's stretches, in order."""
        ...

    def steps(
        self,
        ids: Sequence[NDArray[np.int32]],
        pack: Pack,
        slot: int,
        timing: Timing,
        tap: Tap | None = None,
    ) -> Steps:
        """A forward of a pack as a generator of what it runs on the NPU.

        It returns the vectors of the pack's texts in the pack's order, float32 [texts, dim].
        ids: the token ids of each of the pack's texts. slot: whose buffers to use, below SLOTS.
        tap, if given, is called with each stage's name and its hidden rows, float32 [rows,
        hidden_size], which it must not keep or change.
        """
        ...

    def close(self) -> None:
        """Release kernels, contexts and buffers."""
        ...


def upload(session: Session, bundle: Bundle, name: str, key: str) -> Buffer:
    """A buffer on the device that holds the packed weight `name` of the GEMM `key`.

    Raises:
        BundleError: the weight is missing, or of another size than the GEMM's stream reads.
    """
    tensor = f"{name}.packed"
    packed = bundle.tensors.raw(tensor)
    gemm = bundle.specs.gemms[key]
    wanted = bundle.packed_bytes(gemm)
    # A kernel of another maker need not read all of its weight.
    more = packed.nbytes if bundle.published else wanted
    if packed.nbytes == 0 or (wanted and more and not wanted <= packed.nbytes <= more):
        raise BundleError(
            f"{bundle.tensors.file}: tensor {tensor} has {packed.nbytes} bytes, wanted "
            f"{wanted or 'some'} as gemm {key} (manifest.txt:{gemm.line}) reads; re-export the "
            "bundle."
        )
    buffer = session.buffer(packed.nbytes)
    buffer.host[:] = packed
    buffer.to_device(0, packed.nbytes)
    return buffer


def forward(
    model: Forward,
    ids: Sequence[NDArray[np.int32]],
    pack: Pack,
    timing: Timing,
    tap: Tap | None = None,
) -> F32:
    """The vectors of one pack's texts in the pack's order, float32 [texts, dim]."""
    return forward_together(model, [(ids, pack)], timing, tap)[0]


def forward_together(
    model: Forward,
    packs: Sequence[tuple[Sequence[NDArray[np.int32]], Pack]],
    timing: Timing,
    tap: Tap | None = None,
) -> list[F32]:
    """The vectors of up to SLOTS packs, run in step.

    Raises:
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    jit.note_rows(sum(pack.rows for _, pack in packs))
    model.npu.plan(model.contexts())
    steps = [model.steps(ids, pack, slot, timing, tap) for slot, (ids, pack) in enumerate(packs)]
    return run_together(model.npu, steps, timing)
