"""`aiorlinf doctor`: is this machine fit for a job, and if not, what is to be done."""

from __future__ import annotations

__all__: list[str] = []
