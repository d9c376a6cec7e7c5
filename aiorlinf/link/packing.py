"""Copying the leaves of a message into one region: by one thread, or large ones by several at the same time.

One thread rarely reaches what the memory can do. More than two would take the machine away from those who compute on it.
"""

from __future__ import annotations

import ctypes
import os
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorlinf.link.placement import offsets

if TYPE_CHECKING:
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["PACK_INLINE_BYTES", "pack", "pack_in_threads", "runs"]

PACK_INLINE_BYTES = 1 << 20
"""Smaller copies are done on the loop: a thread costs more than they do."""

_SHARED_BYTES = 8 << 20
"""Larger ones are shared by two threads."""

_LEAST_BYTES = 2 << 20
"""A thread takes no less at once, while there is so much: a fifth of a millisecond."""


def pack(address: int, leaves: Sequence[Leaf]) -> None:
    """Copy the leaves to this address, each where `offsets` says. Any thread; others go on meanwhile."""
    _copy([(address + start, leaf, 0, leaf.nbytes) for start, leaf in zip(_starts(leaves), leaves, strict=True)])


def pack_in_threads(home: LoopHome, address: int, leaves: Sequence[Leaf], then: Callable[[BaseException | None], None]) -> None:
    """As `pack`, in private threads; then call back on the home thread when all of them are done with the memory, with the error of the
    first that failed. Home thread only."""
    sizes = [leaf.nbytes for leaf in leaves]
    starts = _starts(leaves)
    threads = _threads(sum(sizes))
    todo = deque(
        [(address + starts[index] + begin, leaves[index], begin, end) for index, begin, end in run]
        for run in runs(sizes, threads, _LEAST_BYTES)
    )
    left = threads
    failure: BaseException | None = None

    def done(work: Any) -> None:
        nonlocal left, failure
        left -= 1
        error = CancelledError() if work.cancelled() else work.exception()
        failure = failure or error
        if not left:
            then(failure)

    for _ in range(threads):
        home.submit(_copy_runs, todo).add_done_callback(done)


def runs(sizes: Sequence[int], threads: int, least: int) -> list[list[tuple[int, int, int]]]:
    """Cut leaves of these sizes into runs, in order: of each, the leaves and from where to where. There is always one, perhaps an empty.

    Each thread takes one after the other. The first is one thread's share, the next such a share of the rest, and so on down to `least`
    bytes: so all end at nearly the same time, also if somebody else has used the core of one of them, and none of them has to get the
    interpreter's lock back often, for which it may have to wait.
    """
    left = sum(sizes)
    found: list[list[tuple[int, int, int]]] = [[]]
    room = left if threads == 1 else max(-(-left // threads), least)
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not room:
                found.append([])
                room = max(-(-left // threads), least)
            end = min(size, begin + room)
            found[-1].append((index, begin, end))
            room -= end - begin
            left -= end - begin
            begin = end
    return found


def _threads(nbytes: int) -> int:
    return 2 if nbytes > _SHARED_BYTES and (os.cpu_count() or 1) > 1 else 1


def _starts(leaves: Sequence[Leaf]) -> list[int]:
    return offsets([leaf.nbytes for leaf in leaves])[:-1]


def _copy_runs(todo: deque[list[tuple[int, Leaf, int, int]]]) -> None:
    while True:
        try:
            run = todo.popleft()
        except IndexError:
            return
        _copy(run)


def _copy(parts: Sequence[tuple[int, Leaf, int, int]]) -> None:
    for target, leaf, begin, end in parts:
        if begin < end:
            memory = leaf.memory
            ctypes.memmove(target, (memory.data_ptr() if memory is not None else _address_of(leaf)) + begin, end - begin)


def _address_of(leaf: Leaf) -> int:
    assert leaf.raw is not None
    address: int = np.frombuffer(leaf.raw, dtype=np.uint8).ctypes.data
    return address
