"""The two kinds of channel, for tests that hold for both: within one process, and held by a channel worker (here on the same loop)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiorlinf import Channel, Worker, init
from aiorlinf.channel.host import ChannelHost

__all__ = ["KINDS", "Place", "place"]

KINDS = ("local", "hosted")


class Place:
    """Makes handles of one channel, each as if it were in a worker of its own; with a channel worker it is."""

    def __init__(self, kind: str, stack: contextlib.AsyncExitStack, settings: Mapping[str, Any]) -> None:
        self.kind = kind
        self.settings = settings
        self.workers: list[Worker] = []
        self.host: ChannelHost | None = None
        self._stack = stack
        self._first: Channel | None = None

    async def handle(self, **role: Any) -> Channel:
        """One more."""
        if self.kind == "local":
            if self._first is None:
                self._first = Channel.local("c", **self.settings)
                if not role:
                    return self._first
            return self._first.handle(**role)
        if self.host is None:
            held = await self._stack.enter_async_context(init("channel.c:0"))
            self.host = held.hold_channels()
        worker = await self._stack.enter_async_context(init(f"w:{len(self.workers)}"))
        self.workers.append(worker)
        if len(self.workers) == 1:
            return await worker.create_channel("c", **self.settings, **role)
        return await worker.connect_channel("c", **role)


@contextlib.asynccontextmanager
async def place(kind: str, **settings: Any) -> AsyncIterator[Place]:
    """Where a channel of these settings is."""
    async with contextlib.AsyncExitStack() as stack:
        yield Place(kind, stack, settings)
