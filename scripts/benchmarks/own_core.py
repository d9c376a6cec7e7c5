"""A core for each of the two processes, where latency is measured.

Left to itself, the scheduler puts two processes that wake each other on one core at one time and on two at another. On one core a wake-up
costs a few microseconds, on two, the other of which sleeps, some forty: a yardstick that does little beside them then varies by six times,
from round to round, and a ratio to it says nothing. On machines that have a core for each worker they are on two.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

__all__ = ["ON_OWN_CORE", "own_core"]

ON_OWN_CORE: Final = frozenset({"small_dict_rtt", "small_tensor_rtt"})
"""The cases concerned."""


@contextlib.contextmanager
def own_core(role: int) -> Iterator[None]:
    """The calling thread, which is the one with the loop, stays on a core of its own meanwhile; other threads go where they like."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[role % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
