"""How two workers find each other: hosts, interfaces, ports, and pairs of transports."""

from __future__ import annotations

__all__: list[str] = []
