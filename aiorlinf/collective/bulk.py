"""The payload of a large broadcast at one member: one run of bytes, filled from one end to the other, and handed on from it meanwhile.

The leaves are packed as in shared memory (`link.placement`). Where neighbours on this host want it, it lies in a region of the arena, which
they are lent all together; who has such a region never writes to it, and takes what he keeps for himself as a private view.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.backends.shm.private import private_view
from aiorlinf.errors import AiorlinfError
from aiorlinf.link.memory import byte_view, fresh_bytes
from aiorlinf.link.packing import PACK_INLINE_BYTES, pack, pack_in_threads
from aiorlinf.link.placement import offsets

if TYPE_CHECKING:
    from aiorlinf.backends.shm.arena import Region
    from aiorlinf.link.table import LinkTable
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["Bulk", "split"]


class Bulk:
    """See the module. Home thread only.

    Attributes:
        total: bytes.
        array: the memory, of uint8. Everything that uses the memory refers to it; the region is free when nothing does any more.
        region: of the arena, None if it is ordinary memory.
        filled: so many bytes from the beginning are there.
    """

    def __init__(self, total: int, array: Any, region: Region | None = None) -> None:
        self.total = total
        self.array = array
        self.region = region
        self.filled: int = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @classmethod
    async def make(cls, table: LinkTable, total: int, *, shared: bool) -> Bulk:
        """Memory for so many bytes; if it is to be `shared`, in the arena, if that has room."""
        region = await _region(table, total) if shared else None
        if region is None:
            return cls(total, np.frombuffer(byte_view(fresh_bytes(total, table.pool)), dtype=np.uint8))
        array = region.segment.view(region.offset, total)
        finalizer = weakref.finalize(array, _release, table.home, region)
        finalizer.atexit = False
        return cls(total, array, region)

    def part(self, start: int, end: int) -> torch.Tensor:
        """Some of the memory, as a tensor with a version counter of its own."""
        return torch.from_numpy(self.array[start:end])

    def own(self) -> Any:
        """An array that the user may keep and write to."""
        if self.region is None:
            return self.array
        view = private_view(self.region.segment, self.region.offset, self.total)
        weakref.finalize(view, _nothing, self.array).atexit = False  # holds the region for as long as the view is there
        return view

    def advance(self, end: int) -> None:
        """Everything up to here is there."""
        self.filled = end
        for waiter in self._waiters[:]:
            if waiter[0] <= end:
                self._waiters.remove(waiter)
                if not waiter[1].done():
                    waiter[1].set_result(None)

    async def reached(self, end: int) -> None:
        """Wait until everything up to here is there."""
        if self.filled < end:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((end, waiter))
            await waiter

    async def pack(self, home: LoopHome, leaves: Sequence[Leaf]) -> None:
        """Fill it with these leaves. Cancelling does not stop the copying, which holds the memory until it is over."""
        address = self.array.ctypes.data
        if self.total <= PACK_INLINE_BYTES:
            pack(address, leaves)
        else:
            await _packed(home, self.array, leaves)
        self.advance(self.total)


async def _packed(home: LoopHome, array: Any, leaves: Sequence[Leaf]) -> None:
    over: asyncio.Future[None] = home.loop.create_future()

    def then(error: BaseException | None, array: Any = array) -> None:  # it keeps the memory
        if over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    pack_in_threads(home, array.ctypes.data, leaves, then)
    await over


def split(array: Any, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The leaves in a packed run of bytes, each one-dimensional uint8."""
    return [torch.from_numpy(array[start : start + size]) for start, size in zip(offsets(sizes), sizes, strict=False)]


async def _region(table: LinkTable, total: int) -> Region | None:
    memory = table.memory
    if memory is None or memory.problem is not None:
        return None
    region = memory.arena.take(total)
    if region is not None:
        return region
    future: asyncio.Future[Region | None] = table.home.loop.create_future()

    def grown(region: Region | None) -> None:
        if not future.cancelled():
            future.set_result(region)
        elif region is not None:
            region.release()

    if not memory.arena.grow(total, grown):
        return None
    try:
        return await future
    except asyncio.CancelledError:
        # In the moment in which it had come: nobody else knows of it.
        if future.done() and not future.cancelled() and (given := future.result()) is not None:
            given.release()
        raise


def _release(home: LoopHome, region: Region) -> None:
    """Called in whatever thread let go of it."""
    try:
        home.call_soon(region.release)
    except AiorlinfError:  # the loop is gone, and the arena with it
        pass


def _nothing(array: Any) -> None:
    """Its argument was kept until now."""
