"""Copying the leaves of a message into one region: by one thread, or large ones by several at the same time, each a share of the bytes.

One thread rarely reaches what the memory can do. More than two would take the machine away from those who compute on it.
"""

from __future__ import annotations

import ctypes
import os
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorlinf.link.placement import offsets

if TYPE_CHECKING:
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["PACK_INLINE_BYTES", "pack", "pack_in_threads", "shares"]

PACK_INLINE_BYTES = 1 << 20
"""Smaller copies are done on the loop: a thread costs more than they do."""

_SHARED_BYTES = 8 << 20
"""Larger ones are shared by two threads."""


def pack(address: int, leaves: Sequence[Leaf]) -> None:
    """Copy the leaves to this address, each where `offsets` says. Any thread; others go on meanwhile."""
    if len(leaves) == 1:
        leaf = leaves[0]
        _copy(((address, leaf, 0, leaf.spec.nbytes),))
        return
    _copy([(address + start, leaf, 0, leaf.nbytes) for start, leaf in zip(_starts(leaves), leaves, strict=True)])


def pack_in_threads(home: LoopHome, address: int, leaves: Sequence[Leaf], then: Callable[[BaseException | None], None]) -> None:
    """As `pack`, in private threads; then call back on the home thread when all of them are done with the memory, with the error of the
    first that failed. Home thread only."""
    sizes = [leaf.nbytes for leaf in leaves]
    starts = _starts(leaves)
    jobs = [
        [(address + starts[index] + begin, leaves[index], begin, end) for index, begin, end in share]
        for share in shares(sizes, _threads(sum(sizes)))
    ]
    left = len(jobs)
    failure: BaseException | None = None

    def done(work: Any) -> None:
        nonlocal left, failure
        left -= 1
        error = CancelledError() if work.cancelled() else work.exception()
        failure = failure or error
        if not left:
            then(failure)

    for job in jobs:
        home.submit(_copy, job).add_done_callback(done)


def shares(sizes: Sequence[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut leaves of these sizes into at most `count` runs of as many bytes, in order: of each, the leaves and from where to where.

    There is always one run, perhaps an empty one.
    """
    most = -(-sum(sizes) // count)
    found: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not room:
                found.append([])
                room = most
            end = min(size, begin + room)
            found[-1].append((index, begin, end))
            room -= end - begin
            begin = end
    return found


def _threads(nbytes: int) -> int:
    return 2 if nbytes > _SHARED_BYTES and (os.cpu_count() or 1) > 1 else 1


def _starts(leaves: Sequence[Leaf]) -> list[int]:
    return offsets([leaf.nbytes for leaf in leaves])[:-1]


def _copy(parts: Sequence[tuple[int, Leaf, int, int]]) -> None:
    for target, leaf, begin, end in parts:
        if begin < end:
            memory = leaf.memory
            ctypes.memmove(target, (memory.data_ptr() if memory is not None else _address_of(leaf)) + begin, end - begin)


def _address_of(leaf: Leaf) -> int:
    assert leaf.raw is not None
    address: int = np.frombuffer(leaf.raw, dtype=np.uint8).ctypes.data
    return address
