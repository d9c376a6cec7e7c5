"""Idle memory goes after a pause; a worker at rest has no timer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.trimmer import Trimmer
from aiorlinf.work.home import LoopHome

SIZE = 1 << 20
PERIOD_S = 0.02


class Keeper:
    """Has something idle for some calls."""

    def __init__(self, periods: int) -> None:
        self.periods = periods
        self.calls = 0
        self.trims = 0

    def age(self) -> bool:
        self.calls += 1
        self.periods -= 1
        return self.periods > 0

    def trim(self) -> int:
        self.trims += 1
        return 0


async def until_at_rest(trimmer: Trimmer) -> None:
    async with asyncio.timeout(10):
        while trimmer._awake or trimmer._timer is not None:
            await asyncio.sleep(PERIOD_S / 2)


@pytest.mark.asyncio
async def test_it_asks_everyone_until_nobody_has_anything() -> None:
    keepers = [Keeper(1), Keeper(3)]
    trimmer = Trimmer(LoopHome(asyncio.get_running_loop()), keepers, period_s=PERIOD_S, short=lambda: False)
    trimmer.wake()
    trimmer.wake()
    await until_at_rest(trimmer)
    assert [keeper.calls for keeper in keepers] == [3, 3]
    trimmer.wake()
    await until_at_rest(trimmer)
    assert [keeper.calls for keeper in keepers] == [4, 4]


@pytest.mark.asyncio
async def test_short_memory_does_not_wait() -> None:
    keepers = [Keeper(5), Keeper(5)]
    trimmer = Trimmer(LoopHome(asyncio.get_running_loop()), keepers, period_s=PERIOD_S, short=lambda: True)
    trimmer.wake()
    await until_at_rest(trimmer)
    assert [(keeper.calls, keeper.trims) for keeper in keepers] == [(0, 1), (0, 1)]


@pytest.mark.asyncio
async def test_a_pool_gives_back_what_nobody_uses() -> None:
    pool = TensorBufferPool(8 * SIZE)
    trimmer = Trimmer(LoopHome(asyncio.get_running_loop()), [pool], period_s=PERIOD_S, short=lambda: False)
    pool.on_idle = trimmer.wake
    kept = pool.empty(SIZE)
    holder = [pool.empty(SIZE)]
    thread = threading.Thread(target=holder.clear)  # in another thread, as any tensor may end
    thread.start()
    await asyncio.to_thread(thread.join)
    assert pool.stats().cached_bytes == SIZE
    await until_at_rest(trimmer)
    stats = pool.stats()
    assert (stats.cached_bytes, stats.leased_bytes, stats.trims) == (0, SIZE, 1)
    del kept
    await until_at_rest(trimmer)
    assert pool.stats().trims == 2


@pytest.mark.asyncio
async def test_it_can_be_closed_at_any_time() -> None:
    keeper = Keeper(5)
    home = LoopHome(asyncio.get_running_loop())
    trimmer = Trimmer(home, [keeper], period_s=PERIOD_S, short=lambda: False)
    trimmer.wake()
    trimmer.close()
    await asyncio.sleep(PERIOD_S * 2)
    trimmer.wake()
    await asyncio.sleep(PERIOD_S * 2)
    trimmer = Trimmer(home, [keeper], period_s=PERIOD_S, short=lambda: False)
    trimmer.wake()
    await asyncio.sleep(0)
    trimmer.close()
    trimmer.close()
    await asyncio.sleep(PERIOD_S * 2)
    assert keeper.calls == 0


def test_after_the_loop() -> None:
    async def make() -> Trimmer:
        return Trimmer(LoopHome(asyncio.get_running_loop()), [Keeper(5)], period_s=PERIOD_S, short=lambda: False)

    trimmer = asyncio.run(make())
    trimmer.wake()
    trimmer.wake()
