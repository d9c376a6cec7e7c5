"""One time budget for all steps of an operation."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Deadline"]


class Deadline(NamedTuple):
    """A moment on the monotonic clock by which something has to be over."""

    end: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline | None:
        """The moment in ``seconds`` from now; None means no limit."""
        return None if seconds is None else cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, never less than 0."""
        return max(0.0, self.end - time.monotonic())
