"""Ways for payload bytes to get from one device to another, and the choice between them."""

from __future__ import annotations

__all__: list[str] = []
