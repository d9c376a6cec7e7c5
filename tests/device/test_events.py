"""Thousands of pending device events on one loop: what they cost it, and that nobody waits in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from aiorlinf.device.runtime import Event, Runtime
from aiorlinf.link.device_events import watch_events
from aiorlinf.testing.fake import FakeAccelerator, FakeEvent
from aiorlinf.work.home import LoopHome

__all__: list[str] = []

MANY = 10_000


@pytest.mark.asyncio
async def test_ten_thousand_pending_events_leave_the_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeAccelerator(self_moving=False) as fake:
        home = LoopHome(asyncio.get_running_loop(), name="test")
        done: list[BaseException | None] = []
        streams = [fake.new_stream() for _ in range(10)]
        for stream in streams:
            fake.launch("something long", stream, lambda: None, ticks=1)
        threads = threading.active_count()
        for number in range(MANY):
            events: list[tuple[Runtime, Event]] = [(fake, fake.record(streams[number % 10]))]
            watch_events(home, events, done.append)
        assert len(home.poller) == MANY
        asked = 0
        query = fake.query

        def counted(event: FakeEvent) -> bool:
            nonlocal asked
            asked += 1
            return query(event)

        monkeypatch.setattr(fake, "query", counted)
        gc.collect()
        delays = []
        for _ in range(200):  # each of them a turn of the loop, with a share of the polling
            begin = time.thread_time()
            await asyncio.sleep(0)
            delays.append(time.thread_time() - begin)
        assert threading.active_count() == threads
        assert asked <= 10 * 200  # the first event of each stream, once in a turn
        assert done == []
        middle = sorted(delays)[len(delays) // 2]
        print(f"a turn of the loop takes {1e6 * middle:.0f} us of its thread, the longest of 200 {1e6 * max(delays):.0f} us")
        assert middle < 0.001  # seconds of this thread; what others on the machine do is no matter
        fake.step()
        while len(done) < MANY:
            await asyncio.sleep(0)
        assert done == [None] * MANY
        await home.close()
