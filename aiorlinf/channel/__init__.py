"""Channels: named queues between workers, held by a worker of their own."""

from __future__ import annotations

__all__: list[str] = []
