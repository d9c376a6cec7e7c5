"""Prefetch: a loop over a channel that keeps several gets under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from aiorlinf.channel.items import T
from aiorlinf.errors import ChannelClosed, DeadlineExceeded
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.channel.stream import GetStream

__all__ = ["Prefetch"]


class Prefetch(Generic[T]):
    """What `Channel.prefetch` and `Channel.batches` return: an async iterator.

    Args:
        get: begins one.
        count: so many are kept under way.
        stream: does both, on the home loop; None where that is not possible.
        limit: puts a work under the limit that the caller is under.
    """

    def __init__(
        self, get: Callable[[], AsyncWork[T]], count: int, stream: GetStream | None, limit: Callable[[AsyncWork[Any]], None]
    ) -> None:
        self._get = get
        self._count = count
        self._stream = stream
        self._limit = limit
        self._under_way: deque[AsyncWork[T]] = deque()
        self._closed = False

    def __aiter__(self) -> Prefetch[T]:
        return self

    async def __anext__(self) -> T:
        """Cancelling takes nothing: the item stays for the next turn of the loop."""
        if self._closed:
            raise StopAsyncIteration
        stream = self._stream
        if stream is None:
            return await self._next_of_works()
        try:
            stream.fill()
            if not stream.ready:
                work = stream.wait()
                self._limit(work)
                await work
            else:
                home = stream.port.home
                home.turns = turns = home.turns + 1
                if not turns & 63:  # as with works that are done already
                    await asyncio.sleep(0)
            value: T = stream.take()
            return value
        except asyncio.CancelledError:
            raise
        except ChannelClosed:
            self.close()
            raise StopAsyncIteration from None
        except BaseException as error:
            if not isinstance(error, DeadlineExceeded):
                self.close()
            raise

    async def _next_of_works(self) -> T:
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
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.port.home.call(stream.close)
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
