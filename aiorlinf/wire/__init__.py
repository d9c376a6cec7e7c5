"""What travels between two workers, as bytes: frames, handshake, object tree, manifest. Pure: no sockets, no clock."""

from __future__ import annotations

__all__: list[str] = []
