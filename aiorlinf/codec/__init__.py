"""Memory that payloads are received into and packed into: the pool of buffers, and giving idle memory back to the system."""

from __future__ import annotations

__all__: list[str] = []
