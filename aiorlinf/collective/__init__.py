"""Groups of workers and the messages between them."""

from __future__ import annotations

__all__: list[str] = []
