"""``scripts/fuzz``: mutated input for everything that reads what a peer sent."""

from __future__ import annotations

__all__: list[str] = []
