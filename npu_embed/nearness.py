"""How near a bfloat16 model's numbers must be to float32 references.

bfloat16's 8 significant bits round a number by at most 2^-9 of itself, in mean square (2^-9)^2 / 3.
A layer puts about 12 such roundings between its input and its output (operand, weight and result of
each linear; probabilities; context), independent, so that their squares add up to e^2 = 1.5e-5; a
vector with relative error e has 1 - cos = e^2 / 2 = 7.6e-6. That is the average row, as measured:
3e-6 to 1.6e-5 after one layer. Where large terms cancel a row does worse: up to 11 times the
average was measured, 32 times is allowed, for every layer passed through. One key too many in
every attention costs some row 1e-2 in the first layer, forty times what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from .bf16 import F32

# The vector of a text, after any number of layers: pooling averages rows and their roundings.
MIN_COSINE = 0.9997

ROUNDINGS = 12
ROW_ALLOWANCE = 32
LAYER_DEVIATION = ROW_ALLOWANCE * ROUNDINGS * (2.0**-9) ** 2 / 3 / 2  # of 1 - cos, 2.4e-4

# Before the first layer all is float32 on the host: a relative error of 1.4e-4, hundreds of its
# roundings.
HOST_DEVIATION = 1e-8

# Of a vector of unit length: what the squares of float32 numbers add up to. Any other vector may be
# longer or shorter by its allowed relative error, sqrt(2 (1 - cos)).
UNIT_TOLERANCE = 1e-5

Figures: TypeAlias = dict[str, int | float | str]


@dataclass(slots=True)
class Nearness:
    """The lowest cosine of a stage's rows with their references, and the worst length.

    deviation is how far the cosine may be below 1; norm_tolerance how far the length may be from
    the reference's, as a share of it.
    """

    deviation: float
    norm_tolerance: float
    cosine: float = 1.0
    norm_ratio: float = 1.0
    texts: set[str] = field(default_factory=set)
    text: str = ""

    @classmethod
    def of_stage(cls, index: int) -> Nearness:
        """For the rows after `index` layers; 0 are the embeddings."""
        deviation = LAYER_DEVIATION * index if index else HOST_DEVIATION
        return cls(deviation, math.sqrt(2 * deviation))

    @classmethod
    def of_embeddings(cls, references: Sequence[F32], min_cosine: float = MIN_COSINE) -> Nearness:
        """For the vectors of texts; of unit length if all the references are."""
        deviation = 1 - min_cosine
        unit = all(abs(float(np.linalg.norm(r)) - 1) <= UNIT_TOLERANCE for r in references)
        return cls(deviation, UNIT_TOLERANCE if unit else math.sqrt(2 * deviation))

    def add(self, found: F32, wanted: F32, text: str) -> None:
        """Compare rows [rows, width] of a text; a NaN is the worst there is, and stays."""
        a, b = found.astype(np.float64), wanted.astype(np.float64)
        lengths, wanted_lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = float(np.min(np.einsum("ij,ij->i", a, b) / (lengths * wanted_lengths)))
            ratios = lengths / wanted_lengths
        ratio = float(ratios[np.argmax(np.abs(ratios - 1))])  # argmax finds a NaN first
        self.texts.add(text)
        if not (math.isnan(self.cosine) or cosine >= self.cosine):
            self.cosine, self.text = cosine, text
        if not (math.isnan(self.norm_ratio) or abs(ratio - 1) <= abs(self.norm_ratio - 1)):
            self.norm_ratio = ratio

    @property
    def good(self) -> bool:
        """Whether no row is too far in direction or in length."""
        near = self.cosine >= 1 - self.deviation
        return near and abs(self.norm_ratio - 1) <= self.norm_tolerance

    @property
    def detail(self) -> str:
        """The figures as a sentence."""
        digits = 9 if self.deviation < 1e-6 else 6
        where = f" (text {self.text})" if self.text else ""
        return (
            f"lowest cosine {self.cosine:.{digits}f}{where}, wanted {1 - self.deviation:.{digits}f}"
            f"; length {self.norm_ratio:.6f} at worst, wanted 1 +- {self.norm_tolerance:.6f}"
        )

    @property
    def figures(self) -> Figures:
        """The figures for programs."""
        return {
            "cosine": self.cosine,
            "cosine_wanted": 1 - self.deviation,
            "norm_ratio": self.norm_ratio,
            "norm_tolerance": self.norm_tolerance,
            "text": self.text,
            "texts": len(self.texts),
        }
