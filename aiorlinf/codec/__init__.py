"""Buffers that are used again, giving idle memory back to the system, and lossless compression of tensors between them."""

from __future__ import annotations

__all__: list[str] = []
