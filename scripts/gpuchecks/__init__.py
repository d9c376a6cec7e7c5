"""`scripts/gpu-check`: correctness and speed on real accelerators, with nothing but torch and what aiorlinf itself needs."""

from __future__ import annotations

__all__: list[str] = []
