"""Warnings that a stranger can cause must not fill the log."""

from __future__ import annotations

import asyncio
import logging

__all__ = ["Throttle"]


class Throttle:
    """Five warnings at once, then one per second with a count of those left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._credit = 5.0
        self._last = 0.0
        self._skipped = 0

    def warn(self, text: str, reason: Exception) -> None:
        """Log ``text % reason``, or leave it out."""
        now = asyncio.get_running_loop().time()
        self._credit = min(5.0, self._credit + now - self._last)
        self._last = now
        if self._credit < 1.0:
            self._skipped += 1
            return
        self._credit -= 1.0
        if self._skipped:
            self._log.warning(text + " (%d more were not logged)", reason, self._skipped)
            self._skipped = 0
        else:
            self._log.warning(text, reason)
