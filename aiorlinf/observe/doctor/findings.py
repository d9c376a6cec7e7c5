"""What a check of the doctor finds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from aiorlinf.errors import AiorlinfError

__all__ = ["Check", "Finding", "Level", "examine", "lines"]


class Level(enum.Enum):
    """How bad it is."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: problem: something of this library does not work; warning: it works, but slower or less far than it could; note: worth
            knowing.
        subject: what was looked at, in a word or two.
        text: what was found.
        remedy: what to do about it, empty if nothing.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "level": self.level.value}


Check = Callable[[], Iterable[Finding]]


def examine(subject: str, check: Check) -> Iterator[Finding]:
    """Run one check. One that fails itself is a finding, too: the others are still wanted."""
    try:
        yield from check()
    except AiorlinfError as error:
        yield Finding(Level.PROBLEM, subject, error.message, error.hint or "see the README")
    except Exception as error:  # whatever a strange system makes a check raise
        yield Finding(
            Level.WARNING,
            subject,
            f"could not be looked at: {type(error).__name__}: {error}",
            "this is a fault of the doctor: please report it",
        )


_MARKS = {Level.GOOD: "ok  ", Level.NOTE: "note", Level.WARNING: "WARN", Level.PROBLEM: "FAIL"}


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """For people: one line per finding, the remedy below it."""
    for finding in findings:
        yield f"[{_MARKS[finding.level]}] {finding.subject}: {finding.text}"
        if finding.remedy:
            yield f"       -> {finding.remedy}"
