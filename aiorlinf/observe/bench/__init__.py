"""``aiorlinf bench``: how fast two workers exchange messages here."""

from __future__ import annotations

__all__: list[str] = []
