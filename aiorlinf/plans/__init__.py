"""Who sends what to whom in a collective, as plain data. Pure: no sockets, no clock, nothing of torch."""

from __future__ import annotations

__all__: list[str] = []
