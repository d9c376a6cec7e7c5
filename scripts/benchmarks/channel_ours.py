"""aiorlinf's channel: the leading half puts, the answering half gets, a third process holds the items."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from typing import Any, ClassVar, Final

import aiorlinf
from scripts.benchmarks.channel_balance import Consumers
from scripts.benchmarks.contender import Contender, Effort, Metrics, Place, unknown
from scripts.benchmarks.own_core import ON_OWN_CORE, children_elsewhere, wherever
from scripts.benchmarks.tensors import check_bulk, check_stream, make_bulk, make_stream

__all__ = ["OursChannel", "amount_of"]

WINDOW: Final = {"channel_items": 256, "channel_large": 16}
"""Puts and gets kept under way."""
WARM_UP: Final = 4
"""So many times the window goes through beforehand, so that connections and shared memory are there: the limits are warm, too."""

SIGNAL: Final = 7
ELEMENTS: Final = 256
MIB: Final = 1 << 20


def amount_of(case: str, effort: Effort) -> int:
    """Items of one round."""
    return {
        "channel_items": effort.stream_messages,
        "channel_large": 200 * effort.transfers,  # so many that filling and emptying the window is little of it
        "channel_balance": max(64, effort.stream_messages // 5),
    }[case]


class OursChannel(Contender):
    """Two workers; the one that leads embeds the manager and makes the channels."""

    needs: ClassVar[tuple[str, ...]] = ("uvloop", "torch", "aiorlinf")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.worker: aiorlinf.Worker | None = None
        self.numbers = itertools.count()
        self.balances = itertools.count()  # apart from the others: only the half that leads counts them
        self.consumers: Consumers | None = None

    @property
    def comm(self) -> aiorlinf.Worker:
        assert self.worker is not None
        return self.worker

    async def offer(self) -> dict[str, str]:
        if not self.leads:
            return {}
        self.worker = await aiorlinf.init("bench:0")
        return self.worker.env("bench:1")

    async def open(self, offer: dict[str, str]) -> None:
        if not self.leads:
            os.environ.update(offer)
            self.worker = await aiorlinf.init("bench:1")

    async def close(self) -> None:
        if self.consumers is not None:
            await asyncio.to_thread(self.consumers.close)
        if self.worker is not None:
            await self.worker.close()

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        if case == "channel_balance":
            if not self.leads:
                return {}
            if self.consumers is None:
                self.consumers = Consumers(self.comm)
                await self.consumers.ready()
            found = await self.consumers.unevenness(f"balance{next(self.balances)}", variant, amount_of(case, effort))
            return {"time": 100 * found}
        if case not in WINDOW:
            raise unknown(case, variant)
        if variant == "wherever":
            with wherever():
                return await self._through(case, "pipelined", effort)
        return await self._through(case, variant, effort)

    async def _through(self, case: str, variant: str, effort: Effort) -> Metrics:
        window = WINDOW[case] if variant == "pipelined" else 1
        count = amount_of(case, effort)
        if variant == "await":
            count = max(100, int(count * effort.slow_share))
        name = f"bench{next(self.numbers)}"
        if self.leads:
            channel = await self.comm.create_channel(name, worker="bench")
            with children_elsewhere() if case in ON_OWN_CORE else contextlib.nullcontext():
                return await self._put(channel, case, count, window)
        channel = await self.comm.connect_channel(name)
        await self._get(channel, case, count, window)
        return {}

    async def _put(self, channel: aiorlinf.Channel, case: str, count: int, window: int) -> Metrics:
        items = make_stream(ELEMENTS) if case == "channel_items" else [make_bulk(MIB)]
        await self.comm.recv("bench:1", tag=SIGNAL)  # it asks for the first items already
        await self._put_all(channel, items, WARM_UP * window, window)
        await self.comm.recv("bench:1", tag=SIGNAL)
        start = time.perf_counter()
        await self._put_all(channel, items, count, window)
        await self.comm.recv("bench:1", tag=SIGNAL)
        took = time.perf_counter() - start
        return {"rate": count / took if case == "channel_items" else count * MIB / took / 1e9}

    async def _put_all(self, channel: aiorlinf.Channel, items: list[Any], count: int, window: int) -> None:
        works: deque[aiorlinf.AsyncWork[None]] = deque()
        for index in range(count):
            works.append(channel.put(items[index % len(items)]))
            if len(works) >= window:
                await works.popleft()
        while works:
            await works.popleft()

    async def _get(self, channel: aiorlinf.Channel, case: str, count: int, window: int) -> None:
        await self.comm.send(None, "bench:0", tag=SIGNAL)
        item: Any = None
        async with channel.prefetch(window) as ahead:
            for _ in range(WARM_UP * window):
                await anext(ahead)
            await self.comm.send(None, "bench:0", tag=SIGNAL)
            for _ in range(count):
                item = await anext(ahead)
        if case == "channel_items":
            check_stream(item, count - 1, ELEMENTS)
        else:
            check_bulk(item, MIB)
        await self.comm.send(None, "bench:0", tag=SIGNAL)
        await asyncio.sleep(0)
