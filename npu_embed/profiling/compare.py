"""Every run of a forward beside the same computed in float64 from the run's own operands.

Because the operands are read where the device reads them, errors of earlier runs do not count: each
run answers for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..embedder import Embedder
from ..errors import DeviceError, InputError
from ..runs import GemmRun, MhaRun, Run
from ..specs import GemmSpec, MhaSpec
from . import reference
from .measure import Advance, packed_texts
from .operands import gemm_formula, mha_formula, unpacked, widened


@dataclass(slots=True)
class Comparison:
    """The worst element of a kernel's results: the one furthest from its reference for its bound.

    deviation, bound: absolute, of that element. problem: why the kernel was not compared.
    """

    kernel: str
    runs: int = 0
    deviation: float = 0.0
    bound: float = 0.0
    problem: str | None = None

    @property
    def of_bound(self) -> float:
        """The deviation in units of the bound; above 1 (or NaN) is wrong."""
        return self.deviation / self.bound if self.bound else 0.0

    @property
    def good(self) -> bool:
        """Whether no element is beyond its bound; also where nothing could be compared."""
        return self.of_bound <= 1

    def add(self, found: NDArray[np.float64], expected: reference.Expected) -> None:
        """Count a run's results."""
        self.runs += 1
        deviations = np.abs(found - expected.values)
        worst = int(np.argmax(deviations / expected.bounds))  # the first NaN, if there is one
        deviation, bound = float(deviations.flat[worst]), float(expected.bounds.flat[worst])
        known = self.bound > 0 and not deviation / bound > self.of_bound
        if math.isfinite(self.deviation) and not (known and math.isfinite(deviation)):
            self.deviation, self.bound = deviation, bound


def compare(embedder: Embedder, texts: Sequence[str], advance: Advance) -> list[Comparison]:
    """A comparison a kernel, in the order they first ran. advance: as for profile.

    Raises:
        InputError: no texts, or one that cannot be used.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    compared: dict[str, Comparison] = {}
    bundle = embedder.bundle

    def see(run: Run, start: Callable[[], None]) -> None:
        name = run.step(bundle.specs, bundle.no_window).name
        line = compared.setdefault(name, Comparison(name))
        try:
            expected = expect(bundle, run)
        except InputError as error:
            line.problem = str(error)
            start()
            return
        start()
        buffer, row, rows = run.results()
        width = expected.values.shape[1]
        line.add(widened(buffer.bits(rows, row=row)[:, :width]), expected)

    done = 0
    embedder.run_one_by_one(see)
    try:
        for call in packed_texts(embedder, texts):
            embedder.embed(call)
            done += len(call)
            advance(done)
    except DeviceError:
        # Of a vector that is not finite, or a run that failed: a kernel that was wrong says more.
        if all(line.good for line in compared.values()):
            raise
    finally:
        embedder.run_one_by_one(None)
    return list(compared.values())


def expect(bundle: Bundle, run: Run) -> reference.Expected:
    """What a run that is about to start must compute.

    Raises:
        InputError: the bundle does not say what its kernel computes.
    """
    spec = run.step(bundle.specs, bundle.no_window).spec
    if isinstance(run, GemmRun):
        assert isinstance(spec, GemmSpec)
        formula = gemm_formula(bundle, spec)
        a = widened(run.a.bits(run.rows)[:, run.col : run.col + spec.K])
        return reference.gemm(a, *unpacked(run.w.host, formula), formula)
    assert isinstance(run, MhaRun)
    assert isinstance(spec, MhaSpec)
    qkv = widened(run.qkv.bits(run.rows, row=run.row))
    return reference.attention(qkv, mha_formula(bundle, spec), run.window)
