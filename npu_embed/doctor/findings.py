"""What the doctor found: a line for people, the same in fields for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["PASS", "WARN", "FAIL"]
Fact: TypeAlias = "str | int | float | bool | list[int] | list[str] | None"

PASSED = "ok"  # the situation of every PASS


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, wanted, and what to do about the difference.

    WARN: it works, or is not needed, but not as it could be. situation is a word that tells the
    ways apart in which a check can end; facts are what was read, by name.
    """

    check: str
    status: Status
    situation: str
    found: str
    wanted: str = ""
    action: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The line: what was found, what was wanted, what to do."""
        wanted = f", wanted {self.wanted}" if self.wanted else ""
        action = f"; {self.action}" if self.action else ""
        return f"{self.found}{wanted}{action}"


def passed(check: str, found: str, **facts: Fact) -> Finding:
    """A check that found what it wanted."""
    return Finding(check, "PASS", PASSED, found, facts=facts)
