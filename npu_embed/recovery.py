"""Recovery: what the device computes is verified, and what fails is computed once more.

A forward that fails is repeated once, on contexts made anew. One that fails again marks the device
bad: later calls are refused at once, until somebody who knows better says `forgive`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from . import settings
from .bf16 import F32
from .canary import Canary
from .errors import DeviceBad, DeviceError, NoFreeContext, RunFailed
from .npu import Npu

log = logging.getLogger("npu_embed")

Vectors = TypeVar("Vectors", bound="list[F32] | F32")


class Kind:
    """What is embedded, texts or images: its canary, and the contexts it was last checked in.

    make: makes the canary, or None where the bundle has nothing to make one of.
    """

    def __init__(self, make: Callable[[], Canary | None]) -> None:
        self._make = make
        self._made = False
        self._canary: Canary | None = None
        self.checked = 0  # of Npu.contexts_taken

    @property
    def canary(self) -> Canary | None:
        """The canary, made when it is first asked for."""
        if not self._made:
            self._canary, self._made = self._make(), True
        return self._canary


class Recovery:
    """Forwards on one device, verified as `verify` says.

    never      nothing is verified
    startup    a canary is embedded whenever contexts were taken that replace none of ours
    always     that, and every forward is run twice, and must give the same bits
    auto       startup on an NPU, never on the emulated one, where runs do not go wrong unplanned
    """

    def __init__(self, npu: Npu, verify: str) -> None:
        if verify == "auto":
            verify = "startup" if npu.session.kind == "npu" else "never"
        self.verify = verify
        self._npu = npu
        self._bad: str | None = None

    def run(self, kind: Kind, forward: Callable[[], Vectors]) -> Vectors:
        """The vectors of a forward; after a failure, those of its one repetition.

        A vector that is not finite counts as a failure, but is returned the second time: it may
        be its text's own fault, and marks nothing.

        Raises:
            DeviceBad: it failed twice, or another one has before.
            NoFreeContext: others hold all contexts; it has waited, and is not repeated.
        """
        if self._bad is not None:
            raise DeviceBad(self._bad)
        try:
            vectors = self._verified(kind, forward)
            if _finite(vectors):
                return vectors
            first = "a vector is not finite."
        except NoFreeContext:
            raise
        except DeviceError as error:
            first = str(error)
        log.warning("%s; once more, on contexts made anew", first.rstrip("."))
        self._npu.unload_all()
        self._npu.session.counters.rebuilds += 1
        try:
            return self._verified(kind, forward)
        except NoFreeContext:
            raise
        except DeviceError as error:
            self._npu.unload_all()
            self._bad = (
                f"{self._npu.bundle.path.name}: failed twice on {self._npu.session.device_name}, "
                "the second time on contexts made anew, so that the device counts as bad and is "
                "not used; run `npu-embed doctor` and look at `dmesg`, then release() or another "
                f"Embedder tries it again. First: {first} Then: {error}"
            )
            raise DeviceBad(self._bad) from error

    def forgive(self) -> None:
        """Let the device be used again."""
        self._bad = None

    def _verified(self, kind: Kind, forward: Callable[[], Vectors]) -> Vectors:
        # A wrong run's results may be any numbers: whether vectors are finite is asked at the end.
        with np.errstate(all="ignore"):
            return self._computed(kind, forward)

    def _computed(self, kind: Kind, forward: Callable[[], Vectors]) -> Vectors:
        if self.verify == "never":
            return forward()
        self._check(kind)
        vectors = forward()
        self._check(kind)  # in contexts it has taken itself; nothing of it was used yet
        if self.verify == "always" and not _same(vectors, forward()):
            raise RunFailed(
                f"{', '.join(self._npu.loaded())}: two runs of the same pack gave other bits, "
                "wanted the same; the NPU's results cannot be trusted. Run `npu-embed doctor`."
            )
        return vectors

    def _check(self, kind: Kind) -> None:
        if self._npu.contexts_held and kind.checked == self._npu.contexts_taken:
            return
        if kind.canary is not None:
            kind.canary.check()
        kind.checked = self._npu.contexts_taken


def check_verify(where: str, verify: object) -> str:
    """The value, if it is one that `verify` may have.

    Raises:
        SettingError: naming `where`, the value and what is accepted.
    """
    return settings.check_choice(where, "way to verify", verify, settings.VERIFY)


def _finite(vectors: list[F32] | F32) -> bool:
    return all(bool(np.isfinite(one).all()) for one in vectors)


def _same(a: list[F32] | F32, b: list[F32] | F32) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
