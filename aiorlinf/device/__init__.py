"""Accelerators: one small contract over torch's runtimes, and what is built on it. Importing this starts none of them."""

from __future__ import annotations

__all__: list[str] = []
