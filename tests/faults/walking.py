"""Cancelling something after each number of turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["cancelled_after", "points"]

_MOST_TURNS = 400
_STRIDE_FROM = 24
"""The first turns are walked one by one, later ones in growing strides: there the loop waits for a thread or a socket."""


def points(most: int = _MOST_TURNS) -> list[int]:
    """Numbers of turns after which to cancel."""
    found = list(range(_STRIDE_FROM))
    while found[-1] < most:
        found.append(found[-1] + 1 + found[-1] // 6)
    return found


async def cancelled_after(turns: int, operation: Callable[[], Awaitable[Any]]) -> tuple[bool, Any]:
    """Whether the operation was cancelled, else its value."""

    async def run() -> Any:
        return await operation()

    task = asyncio.create_task(run())
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    was_over = task.done()
    task.cancel()
    try:
        return False, await task
    except asyncio.CancelledError:
        assert not was_over
        return True, None
