"""A local channel with a thread of its own: the thread ends with the last item, and the channel goes on answering."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from aiorlinf import Channel
from aiorlinf.errors import ChannelClosed

__all__: list[str] = []

NAME = "aiorlinf channel local"


def ended() -> None:
    """The thread is gone."""
    while any(thread.name == NAME for thread in threading.enumerate()):
        time.sleep(0.001)


def test_the_last_item_is_taken_after_the_end() -> None:
    channel = Channel.local(loop="thread")
    for number in range(3):
        channel.put(number, async_op=False)
    channel.close().wait()
    assert [channel.get(async_op=False) for _ in range(3)] == [0, 1, 2]
    ended()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.get(async_op=False)
        with pytest.raises(ChannelClosed):
            channel.put(1, async_op=False)
    assert channel.qsize().wait() == 0
    assert channel.stats().wait().puts == 3
    channel.close().wait()


def test_a_lease_keeps_it() -> None:
    channel = Channel.local(loop="thread")
    channel.put("x", async_op=False)
    with channel.lease() as item:
        channel.close().wait()
        assert item == "x"
        with pytest.raises(ChannelClosed):
            channel.get_nowait().wait(timeout=5)
        assert any(thread.name == NAME for thread in threading.enumerate())
    ended()
    with pytest.raises(ChannelClosed), channel.lease():
        pass


def test_what_is_given_back_after_the_end_can_be_taken() -> None:
    channel = Channel.local(loop="thread")
    channel.put("x", async_op=False)
    work = channel.get()
    while not work.done():
        time.sleep(0.001)
    channel.close().wait()
    ended()
    assert work.cancel()
    assert channel.get().wait(timeout=5) == "x"
    with pytest.raises(ChannelClosed):
        channel.get().wait(timeout=5)


@pytest.mark.asyncio
async def test_from_a_loop() -> None:
    channel = Channel.local(loop="thread")
    for number in range(100):
        await channel.put(number)
    await channel.close()
    assert [item async for item in channel] == list(range(100))
    await asyncio.to_thread(ended)
    assert [item async for item in channel] == []


def test_many_threads_take_the_last_ones() -> None:
    for _ in range(20):
        channel = Channel.local(loop="thread")
        for number in range(8):
            channel.put(number, async_op=False)
        got: list[int] = []

        def take(channel: Channel = channel, got: list[int] = got) -> None:
            try:
                while True:
                    got.append(channel.get(timeout=20).wait())
            except ChannelClosed:
                pass

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        channel.close().wait()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert sorted(got) == list(range(8))
        ended()
