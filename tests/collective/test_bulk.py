"""The memory of a broadcast, taken from shared memory that has to be made first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiorlinf import init
from aiorlinf.collective.bulk import Bulk
from tests.system import soon

__all__: list[str] = []

TURNS = ("before it is asked for", "while it is made", "as it comes", "one turn later")


@pytest.mark.asyncio
@pytest.mark.parametrize("when", TURNS)
async def test_cancelled_while_memory_is_made(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with init("a:0") as worker:
        table = worker._table
        assert table.memory is not None
        arena = table.memory.arena
        grow = arena.grow
        came = asyncio.Event()

        def growing(size: int, then: Callable[[Any], None]) -> bool:
            def grown(region: Any) -> None:
                then(region)
                if when == "as it comes":
                    tasks[0].cancel()
                came.set()

            return grow(size, grown)

        monkeypatch.setattr(arena, "grow", growing)
        tasks = [asyncio.create_task(Bulk.make(table, 100_000, shared=True))]
        if when != "before it is asked for":
            await asyncio.sleep(0)
        if when in TURNS[:2]:
            tasks[0].cancel()
        if when != "before it is asked for":
            await came.wait()
        if when == "one turn later":
            await asyncio.sleep(0)
            tasks[0].cancel()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled() or tasks[0].result().region is not None
        tasks.clear()
        await soon(lambda: not arena.stats().used_bytes)
        assert (await Bulk.make(table, 100_000, shared=True)).region is not None
