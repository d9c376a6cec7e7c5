"""Strict order of arrival: a producer that is slower than all others waits no longer for its items to be taken than they do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiorlinf import Channel
from tests.channel.places import KINDS, place

__all__: list[str] = []

FAST = 9
BOUND = 8
TARGET = 4
SLOW_ITEMS = 15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_what_a_slow_one_puts_comes_within_one_round(kind: str) -> None:
    """Nine keep the channel full all the time; batches are made by weight, and an item of the slow one is most of a batch."""
    taken = 0
    rounds: list[int] = []
    async with place(kind, maxsize=BOUND) as here:
        get, slow = await here.handle(), await here.handle()

        async def put_and_put(channel: Channel, number: int) -> None:
            while True:
                await channel.put((number, 0))

        async def put_now_and_then() -> None:
            for _ in range(SLOW_ITEMS):
                await slow.put(("slow", taken), weight=3)
                await asyncio.sleep(0.01)

        async def take() -> None:
            nonlocal taken
            while len(rounds) < SLOW_ITEMS:
                batch: list[Any] = await get.get_batch(TARGET)
                for who, when in batch:
                    if who == "slow":
                        rounds.append(taken - when)
                taken += len(batch)

        fast = [asyncio.ensure_future(put_and_put(await here.handle(), number)) for number in range(FAST)]
        try:
            async with asyncio.timeout(20):
                await asyncio.gather(put_now_and_then(), take())
        finally:
            for task in fast:
                task.cancel()
            await asyncio.gather(*fast, return_exceptions=True)
    # What is in the channel, one put of each that waits before it, and what comes while it is on its way there and back.
    assert max(rounds) <= 2 * (BOUND + FAST + TARGET), rounds
    assert taken > 3 * SLOW_ITEMS, "the fast ones were there all the time"
