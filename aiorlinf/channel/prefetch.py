"""Prefetch: a loop over a channel that keeps several gets under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from aiorlinf.channel.items import T
from aiorlinf.errors import ChannelClosed
from aiorlinf.work.base import AsyncWork

__all__ = ["Prefetch"]


class Prefetch(Generic[T]):
    """What `Channel.prefetch` returns: an async iterator over items."""

    def __init__(self, get: Callable[[], AsyncWork[T]], count: int) -> None:
        self._get = get
        self._count = count
        self._under_way: deque[AsyncWork[T]] = deque()
        self._closed = False

    def __aiter__(self) -> Prefetch[T]:
        return self

    async def __anext__(self) -> T:
        """Cancelling takes nothing: the item stays for the next turn of the loop."""
        if self._closed:
            raise StopAsyncIteration
        while len(self._under_way) < self._count:
            self._under_way.append(self._get())
        work = self._under_way[0]
        if not work.done():
            await _until_done(work)
        self._under_way.popleft()
        try:
            return work.result()
        except ChannelClosed:
            self.close()
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop; what is under way goes back."""
        self._closed = True
        # The newest first, so that each goes back before the one that comes before it in the queue.
        while self._under_way:
            work = self._under_way.pop()
            if not work.cancel() and not work.cancelled():
                work.exception()  # they end alike; the loop has seen the first one

    async def aclose(self) -> None:
        """As `close`. Cancelling does nothing: it returns at once."""
        self.close()

    async def __aenter__(self) -> Prefetch[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


async def _until_done(work: AsyncWork[Any]) -> None:
    """Wait without a claim on the value, and without cancelling the work when we are cancelled."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(_: AsyncWork[Any]) -> None:
        if not done.done():
            done.set_result(None)

    work.add_done_callback(tell)
    try:
        await done
    finally:
        work.remove_done_callback(tell)
