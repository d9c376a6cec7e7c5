"""Tools for testing code that uses aiorlinf: import what you need from the modules in here."""

from __future__ import annotations

__all__: list[str] = []
