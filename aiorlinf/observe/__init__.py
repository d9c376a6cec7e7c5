"""Looking at machines and jobs from outside."""

from __future__ import annotations

__all__: list[str] = []
