"""Traces: what became of each message and call, and when; for a picture in Perfetto or Chrome."""

from __future__ import annotations

__all__: list[str] = []
