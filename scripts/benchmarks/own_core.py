"""A core for each of the two processes, where latency is measured, or how much of the work they do at the same time.

Left to itself, the scheduler puts two processes that wake each other on one core at one time and on two at another. On one core a wake-up
costs a few microseconds, on two, the other of which sleeps, some forty: a yardstick that does little beside them then varies by six times,
from round to round, and a ratio to it says nothing. On machines that have a core for each worker they are on two.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["ON_OWN_CORE", "children_elsewhere", "own_core", "wherever"]

ON_OWN_CORE: Final = frozenset({"small_dict_rtt", "small_tensor_rtt", "channel_large"})
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


@contextlib.contextmanager
def wherever() -> Iterator[None]:
    """Inside of `own_core`: after all where the scheduler likes."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextlib.contextmanager
def children_elsewhere() -> Iterator[None]:
    """Inside of `own_core`: meanwhile the loops of processes that this one has started are on other cores, if there are any."""
    everywhere = os.sched_getaffinity(os.getppid())
    others = everywhere - os.sched_getaffinity(0)
    for pid in _children():
        os.sched_setaffinity(pid, others or everywhere)
    try:
        yield
    finally:
        for pid in _children():
            os.sched_setaffinity(pid, everywhere)


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
