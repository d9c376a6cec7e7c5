"""One file per type of device: each is named as torch's device type and has a function `make_runtime()`."""

from __future__ import annotations

__all__: list[str] = []
