"""Being told of the end of a work at once, within the call that ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiorlinf.work.base import AsyncWork
from aiorlinf.work.waiters import Entry

__all__ = ["watch"]


class _Watch(Entry):
    __slots__ = ("fn",)
    counts = False

    def __init__(self, fn: Callable[[AsyncWork[Any]], object]) -> None:
        self.fn = fn

    def _settled(self, work: AsyncWork[Any]) -> None:
        work._mark_seen()
        self.fn(work)


def watch(work: AsyncWork[Any], fn: Callable[[AsyncWork[Any]], object]) -> None:
    """Call `fn(work)` when the work is over, now if it is. Home thread only."""
    entry = _Watch(fn)
    if work._state:
        entry._settled(work)
    else:
        work._attach(entry)
