"""A get that is cancelled at once: what it was given goes back before the next one looks."""

from __future__ import annotations

import asyncio

import pytest

from tests.channel.places import KINDS, place

__all__: list[str] = []


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", range(4))
async def test_a_get_that_is_cancelled_at_once_changes_nothing_of_the_order(kind: str, turns: int) -> None:
    async with place(kind) as here:
        putting, getting = await here.handle(), await here.handle()
        for number in range(1, 6):
            await putting.put(number)
        while await getting.qsize() < 5:
            await asyncio.sleep(0)
        got = []
        for _ in range(5):
            dropped = getting.get()
            for _ in range(turns):
                await asyncio.sleep(0)
            if dropped.cancel():
                got.append(await getting.get(timeout=0.9))
            else:
                got.append(await dropped)
        assert got == [1, 2, 3, 4, 5]
