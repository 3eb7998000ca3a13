"""What a check of a bundle found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .nearness import Figures

Status: TypeAlias = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found: `SKIP` where the bundle has nothing to check against.

    detail is a sentence for people, figures the same for programs.
    """

    check: str
    status: Status
    detail: str
    figures: Figures = field(default_factory=dict)
