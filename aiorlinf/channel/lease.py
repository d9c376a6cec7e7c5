"""Lease: an item that comes back unless it was dealt with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from aiorlinf.channel.items import T
from aiorlinf.errors import AiorlinfError, UsageError

if TYPE_CHECKING:
    from aiorlinf.channel.calls import GetCall, Port
    from aiorlinf.work.base import AsyncWork

__all__ = ["Lease"]


class Lease(Generic[T]):
    """What `Channel.lease` returns; used once, with ``async with``, or ``with`` in a thread that is not the loop's.

    Cancelling while it waits takes nothing; cancelling the block gives the item back.
    """

    def __init__(self, port: Port, call: GetCall, begin: Callable[[], AsyncWork[T]]) -> None:
        self._port = port
        self._call = call
        self._begin: Callable[[], AsyncWork[T]] | None = begin
        self._held = False

    def _start(self) -> AsyncWork[T]:
        begin, self._begin = self._begin, None
        if begin is None:
            raise UsageError("a lease is used once", hint="call channel.lease() for each item")
        return begin()

    async def __aenter__(self) -> T:
        value = await self._start()
        self._held = True
        return value

    def __enter__(self) -> T:
        value = self._start().wait()
        self._held = True
        return value

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._end(done=kind is None)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end(done=kind is None)

    def give_back(self) -> None:
        """Within the block: let the item go back now, without an error."""
        self._end(done=False)

    def done(self) -> None:
        """Within the block: the item is dealt with, whatever happens in the rest of the block."""
        self._end(done=True)

    def _end(self, *, done: bool) -> None:
        if not self._held:
            return
        self._held = False
        try:
            self._port.home.call(lambda: self._port.end_lease(self._call, done=done))
        except AiorlinfError:  # the loop is gone, and with it the worker: the item has gone back
            pass
