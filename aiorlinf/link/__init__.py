"""The one connection between two workers: its state machine, the connection itself, and the table of all links."""

from __future__ import annotations

__all__: list[str] = []
