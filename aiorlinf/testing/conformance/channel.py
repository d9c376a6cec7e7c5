"""What every channel keeps to, however it is held: a queue with keys, weights, batches, bounds, leases and an end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Protocol

import pytest
import torch

from aiorlinf.channel.channel import Channel
from aiorlinf.channel.policies import LoadBalancePolicy
from aiorlinf.channel.records import Consumer, ItemInfo
from aiorlinf.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    DeadlineExceeded,
    NonContiguousTensor,
    RemoteError,
    UsageError,
    WouldBlockLoop,
)
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all

__all__ = ["ChannelConformance", "Picky", "Place"]

LARGE = 100_000  # float32, more than rides with an entry


class Picky(LoadBalancePolicy):
    """Gives an item to the consumer of the item's key."""

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        if item.key == "nonsense":
            return len(consumers)
        return next(index for index, consumer in enumerate(consumers) if consumer.name == item.key)


class Place(Protocol):
    """Where one channel is."""

    async def handle(self, **role: Any) -> Channel[Any]:
        """One more handle of it, as if in a worker of its own; the first one makes the channel, which is called ``c``. `role`: as of
        `create_channel`."""


async def _until(work: AsyncWork[Any]) -> BaseException | None:
    """The error of a work."""
    try:
        await work
    except Exception as error:  # whatever it is, the test looks at it
        return error
    return None


async def _settle(channel: Channel[Any]) -> None:
    """Everything that was said before has arrived."""
    for _ in range(3):
        await channel.stats()


@pytest.mark.asyncio
class ChannelConformance:
    """Tests of a kind of channels. Say in `place` where they are.

    Attributes:
        copies: items are copied on their way, so that a put takes a moment and what was got is the consumer's own.
    """

    copies: ClassVar[bool] = True

    def place(self, **settings: Any) -> AbstractAsyncContextManager[Place]:
        """Where a channel with these settings of `create_channel` will be; everything is closed at the end of the block."""
        raise NotImplementedError(f"{type(self).__name__}.place() says which channel is tested")

    # ---- as a queue

    async def test_items_of_every_kind(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            tensor = torch.arange(float(LARGE))
            items = [
                None,
                1,
                "text",
                {"a": [1, (2, 3)]},
                tensor[:10].clone(),
                tensor,
                {"x": tensor, "n": 3},
                b"x" * LARGE,
                [tensor, "y", tensor[:3]],
                torch.eye(3).to_sparse(),
            ]
            for item in items:
                await put.put(item)
            got = [await get.get() for _ in items]
            for item, other in zip(items, got, strict=True):
                assert str(item) == str(other)
            assert torch.equal(got[5], tensor)
            assert await get.empty()

    async def test_nowait_and_looks(self) -> None:
        async with self.place(maxsize=2) as here:
            channel = await here.handle()
            error = await _until(channel.get_nowait())
            assert isinstance(error, ChannelEmpty)
            assert isinstance(error, asyncio.QueueEmpty)
            assert await channel.empty()
            await channel.put_nowait(1)
            await channel.put_nowait(2, key="k")
            assert await channel.full()
            error = await _until(channel.put_nowait(3))
            assert isinstance(error, ChannelFull)
            assert isinstance(error, asyncio.QueueFull)
            assert (await channel.qsize(), await channel.qsize(key="k"), await channel.qsize(key=7)) == (2, 1, 0)
            assert (await channel.peek_all(), await channel.peek_all(key="k"), await channel.peek_all(key=b"no")) == ([1], [2], [])
            assert await channel.get_nowait(key="k") == 2
            assert not await channel.full()
            assert await channel.get(timeout=5) == 1
            assert "c" in repr(channel)

    async def test_peeking_takes_nothing(self) -> None:
        async with self.place() as here:
            channel = await here.handle()
            for number in range(3):
                await channel.put(torch.full((LARGE,), float(number)))
            await channel.put("small")
            for _ in range(2):
                seen = await channel.peek_all()
                assert [float(each[0]) for each in seen[:3]] == [0.0, 1.0, 2.0]
                assert seen[3] == "small"
            assert [float((await channel.get())[0]) for _ in range(3)] == [0.0, 1.0, 2.0]

    async def test_keys_are_apart(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            keys = [None, "", "a", b"a", 0, -5]
            waiting = [get.get(key=key) for key in keys]
            for key in reversed(keys):
                await put.put(repr(key), key=key)
            assert [await work for work in waiting] == [repr(key) for key in keys]

    async def test_pipelined_puts_and_gets_keep_their_order(self) -> None:
        async with self.place(maxsize=20) as here:
            put, get = await here.handle(), await here.handle()
            sizes = [LARGE if number % 7 == 3 else 4 for number in range(100)]
            puts = [put.put(torch.full((size,), float(number))) for number, size in enumerate(sizes)]
            gets = [get.get() for _ in range(60)]
            assert [float((await work)[0]) for work in gets] == [float(number) for number in range(60)]
            async with get.prefetch(8) as ahead:
                assert [float((await anext(ahead))[0]) for _ in range(30)] == [float(number) for number in range(60, 90)]
            assert [float((await get.get())[0]) for _ in range(10)] == [float(number) for number in range(90, 100)]
            for work in puts:
                await work

    async def test_thousands_of_gets_may_wait(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            before = threading.active_count()
            gets = [get.get() for _ in range(5000)]
            await _settle(get)
            assert threading.active_count() <= before + 2
            for number in range(5000):
                put.put(number)
            assert [await work for work in gets] == list(range(5000))

    async def test_batches(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            batch = get.get_batch(10)
            for number, weight in enumerate([4, 4, 4, 20, 1]):
                await put.put([number, torch.zeros(LARGE if number == 1 else 3)], weight=weight)
            assert [number for number, _ in await batch] == [0, 1]
            assert [number for number, _ in await get.get_batch(10)] == [2]
            assert [number for number, _ in await get.get_batch(10)] == [3]
            rest = get.get_batch(10)
            await put.close()
            assert [number for number, _ in await rest] == [4]

    async def test_backpressure_in_bytes(self) -> None:
        async with self.place(max_bytes=3 * 4 * LARGE) as here:
            put, get = await here.handle(), await here.handle()
            puts = [put.put(torch.full((LARGE - 500,), float(number))) for number in range(6)]
            await puts[2]
            await _settle(put)
            assert [work.done() for work in puts] == [True] * 3 + [False] * 3
            for number in range(6):
                assert float((await get.get())[0]) == number
            for work in puts:
                await work
            await _settle(get)
            assert (await get.stats()).held_bytes == 0

    # ---- ends

    async def test_closing(self) -> None:
        async with self.place() as here:
            one, two, get = await here.handle(), await here.handle(), await here.handle()
            await one.put(1)
            await two.put(2)
            await one.close()
            await one.close()
            assert isinstance(await _until(one.put(3)), ChannelClosed)
            seen = []

            async def read() -> None:
                seen.extend([item async for item in get])

            reading = asyncio.create_task(read())
            await _settle(two)
            assert not reading.done()
            await two.put(4)
            await two.close()
            await reading
            assert seen == [1, 2, 4]
            assert isinstance(await _until(get.get()), ChannelClosed)
            assert isinstance(await _until(get.put(1)), ChannelClosed)

    @pytest.mark.parametrize("size", [3, LARGE])
    async def test_closing_while_puts_wait_for_room(self, size: int) -> None:
        """What was put before is put, and those who get wait for it, also for a key that has nothing in the channel yet."""
        async with self.place(maxsize=2) as here:
            put, get = await here.handle(), await here.handle()
            puts = [put.put(torch.full((size,), float(number)), key=number // 6) for number in range(8)]
            closing = put.close()
            assert isinstance(await _until(put.put(8)), ChannelClosed)
            last = [get.get(key=1) for _ in range(3)]
            await _settle(get)
            assert not any(work.done() for work in last)
            await closing
            assert [float((await get.get(key=0))[0]) for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
            assert [float((await work)[0]) for work in last[:2]] == [6.0, 7.0]
            assert isinstance(await _until(last[2]), ChannelClosed)
            assert isinstance(await _until(get.get(key=0)), ChannelClosed)
            for work in puts:
                await work

    async def test_a_put_that_is_cancelled_after_the_close_is_waited_for_by_nobody(self) -> None:
        async with self.place(maxsize=1) as here:
            put, get = await here.handle(), await here.handle()
            first, waiting = put.put("first", key="a"), put.put("never")
            await put.close()
            last = get.get()
            await _settle(get)
            assert not last.done()
            assert waiting.cancel()
            assert isinstance(await _until(last), ChannelClosed)
            assert await get.get(key="a") == "first"
            await first

    async def test_batches_of_what_was_put_just_before_the_close(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            batches = [get.get_batch(100), get.get_batch(100)]
            await _settle(get)
            puts = [put.put(number) for number in range(10)]
            await put.close()
            assert await batches[0] == list(range(10))
            assert isinstance(await _until(batches[1]), ChannelClosed)
            for work in puts:
                await work

    async def test_one_handle_for_both(self) -> None:
        async with self.place() as here:
            channel = await here.handle()
            for number in range(3):
                await channel.put(number)
            await channel.close()
            assert [item async for item in channel] == [0, 1, 2]

    async def test_a_producer_that_had_nothing(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            work = get.get()
            await put.close()
            assert isinstance(await _until(work), ChannelClosed)

    async def test_a_consumer_leaves(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            work = get.get()
            await _settle(get)
            await get.close()
            assert isinstance(await _until(work), ChannelClosed)
            assert isinstance(await _until(get.get()), ChannelClosed)
            await put.put(1)
            assert await put.get() == 1

    async def test_producers_that_are_expected(self) -> None:
        async with self.place(producers=2) as here:
            one, two, get = await here.handle(), await here.handle(), await here.handle()
            await one.put(1)
            await one.close()
            assert await get.get() == 1
            work = get.get()
            await two.put(2)
            assert await work == 2
            await two.close()
            assert isinstance(await _until(get.get()), ChannelClosed)

    async def test_shutdown(self) -> None:
        async with self.place(maxsize=1) as here:
            put, other = await here.handle(), await here.handle()
            await put.put(1)
            waiting = put.put(2)
            await _settle(put)
            await other.shutdown()
            assert isinstance(await _until(waiting), ChannelClosed)
            assert await other.get() == 1
            assert isinstance(await _until(other.get()), ChannelClosed)
            await other.shutdown(immediate=True)

    # ---- exactly once

    async def test_a_cancelled_get_takes_nothing(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            works = [get.get() for _ in range(3)]
            await _settle(get)
            works[0].cancel()
            works[2].cancel()
            await put.put(1)
            await put.put(2)
            assert await works[1] == 1
            assert await get.get() == 2

    async def test_a_get_cancelled_when_it_was_done_gives_back(self) -> None:
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            items = ["small", torch.arange(float(LARGE)), "last"]
            for item in items:
                await put.put(item)
            works = [get.get() for _ in range(2)]
            batch = get.get_batch(2)
            await put.put([torch.ones(LARGE)])
            while not batch.done():
                await asyncio.sleep(0.001)
            for work in (works[1], works[0], batch):
                assert work.cancel()
            got = [await get.get() for _ in range(4)]
            assert (got[0], got[2]) == ("small", "last")
            assert torch.equal(got[1], items[1])  # type: ignore[arg-type]  # a tensor
            assert got[3][0].sum() == LARGE

    async def test_a_cancelled_put_puts_nothing(self) -> None:
        async with self.place(maxsize=1) as here:
            put, get = await here.handle(), await here.handle()
            await put.put("first")
            waiting = [put.put(item) for item in ("a", torch.zeros(LARGE), "b")]
            await _settle(put)
            waiting[0].cancel()
            waiting[1].cancel()
            assert await get.get() == "first"
            assert await get.get() == "b"
            await waiting[2]
            work = put.put("c")
            cancelled = work.cancel()  # where nothing lies between, it is there already
            await _settle(put)
            assert await get.empty() == cancelled == self.copies

    async def test_puts_that_are_waited_for_together(self) -> None:
        async with self.place(maxsize=2) as here:
            put, get = await here.handle(), await here.handle()
            together = wait_all([put.put(number) for number in range(10)])
            stepwise = put.put(10).then(lambda _: put.put(11))
            reading = wait_all([get.get() for _ in range(12)])
            await together
            await stepwise
            assert await reading == list(range(12))

    async def test_time_limits(self) -> None:
        async with self.place(maxsize=1) as here:
            channel = await here.handle()
            error = await _until(channel.get(timeout=0.02))
            assert isinstance(error, DeadlineExceeded)
            assert "gave nothing" in str(error)
            await channel.put(1)
            error = await _until(channel.get_batch(3, timeout=0.02))
            assert isinstance(error, DeadlineExceeded)
            assert "had no whole batch of weight 3" in str(error)
            assert "stays in the channel" in str(error), "it had something"
            error = await _until(channel.put(2, timeout=0.02))
            assert isinstance(error, DeadlineExceeded)
            assert "had no room" in str(error)
            assert await channel.get() == 1
            assert await channel.empty()

    @pytest.mark.parametrize("batches", [False, True])
    async def test_limits_and_cancellations_at_random(self, batches: bool) -> None:
        async with self.place(maxsize=8) as here:
            put, one, two = await here.handle(), await here.handle(), await here.handle()
            got: dict[int, list[int]] = {0: [], 1: []}
            count = 400
            generator = torch.Generator().manual_seed(5)

            def chance() -> float:
                return float(torch.rand((), generator=generator))

            async def produce() -> None:
                for number in range(count):
                    while True:
                        try:
                            async with asyncio.timeout(0.002 if chance() < 0.5 else None):
                                await put.put([number, torch.zeros(LARGE)] if chance() < 0.1 else [number])
                            break
                        except TimeoutError:
                            pass
                    if chance() < 0.3:
                        await asyncio.sleep(0.002 * chance())
                await put.close()

            async def consume(channel: Channel[Any], index: int) -> None:
                limit = 0.003
                while True:
                    try:
                        async with asyncio.timeout(limit * chance()):
                            found = await (channel.get_batch(3) if batches else channel.get())
                    except TimeoutError:
                        limit *= 1.1  # where the machine is busy, nothing at all might come in time
                        continue
                    except ChannelClosed:
                        return
                    limit = 0.003
                    got[index] += [item[0] for item in (found if batches else [found])]

            await asyncio.gather(produce(), consume(one, 0), consume(two, 1))
            assert sorted(got[0] + got[1]) == list(range(count))
            # A consumer may see an older item after a newer one only if that had been on its way to the other one, which gave it back.
            assert got[0]
            assert got[1]

    async def test_what_was_taken_is_kept_by_nobody_else(self) -> None:
        """An item lives as long as the program wants it, not until this consumer asks again."""
        async with self.place() as here:
            put, get = await here.handle(), await here.handle()
            waited = get.get_batch(5)
            for _ in range(5):
                await put.put(torch.zeros(LARGE))
            seen = [weakref.ref(item) for item in await waited]
            del waited
            for take in (get.get, get.__anext__, get.prefetch(1).__anext__):
                await put.put(torch.zeros(LARGE))
                seen.append(weakref.ref(await take()))
            await put.put(torch.zeros(LARGE))
            async with get.lease() as item:
                seen.append(weakref.ref(item))
            del item
            await _settle(get)
            assert [index for index, ref in enumerate(seen) if ref() is not None] == []

    # ---- leases

    async def test_leases(self) -> None:
        async with self.place() as here:
            put, one, two = await here.handle(), await here.handle(), await here.handle()
            tensor = torch.arange(float(LARGE))
            await put.put(tensor)
            await put.put("next")
            with pytest.raises(ZeroDivisionError):
                async with one.lease() as item:
                    item += 1  # the channel has its own
                    raise ZeroDivisionError
            while await put.qsize() < 2:  # it is on its way back; another worker's request may be quicker
                await asyncio.sleep(0.001)
            async with two.lease() as item:
                assert torch.equal(item, tensor)
            lease = one.lease(target_weight=5)
            work = asyncio.create_task(lease.__aenter__())
            await _settle(one)
            await put.close()
            assert await work == ["next"]
            lease.give_back()
            assert await two.get() == "next"
            assert (await put.stats()).redeliveries == 2
            with pytest.raises(UsageError, match="used once"):
                await lease.__aenter__()

    async def test_the_time_of_a_lease(self) -> None:
        async with self.place() as here:
            put, one, two = await here.handle(), await here.handle(), await here.handle()
            await put.put("slow")
            async with one.lease(seconds=0.05) as item:
                assert item == "slow"
                assert await two.get(timeout=10) == "slow"
            assert await put.empty()

    # ---- policies

    async def test_a_policy_of_the_user(self) -> None:
        async with self.place(policy=Picky()) as here:
            put = await here.handle()
            for name in ("a", "b"):
                await here.handle(consumer=name)
            one = await here.handle(consumer="x")
            work = one.get(key="x")
            await _settle(one)
            for wrong, kinds in (("nobody", (StopIteration, RuntimeError, RemoteError)), ("nonsense", ChannelError)):
                error = await _until(put.put(1, key=wrong))
                assert isinstance(error, kinds)
            await put.put(2, key="x")
            assert await work == 2
            stats = await put.stats()
            assert [consumer.name for consumer in stats.consumers] == ["a", "b", "x"]
            assert stats.puts == 1

    @pytest.mark.parametrize("policy", ["weighted_round_robin", "shortest_queue", "performance_aware", "memory_aware"])
    async def test_built_in_policies(self, policy: str) -> None:
        async with self.place(policy=policy) as here:
            put = await here.handle()
            consumers = [await here.handle(consumer=name, share=share) for name, share in (("a", 1.0), ("b", 3.0))]
            for consumer, free in zip(consumers, (100, 10**6), strict=True):
                consumer.report_memory(free)
            for number in range(40):
                await put.put(number)
            await put.close()
            got: list[list[int]] = [[], []]

            async def consume(index: int) -> None:
                async for item in consumers[index]:
                    got[index].append(item)
                    await asyncio.sleep(0.001)

            await asyncio.gather(consume(0), consume(1))
            assert sorted(got[0] + got[1]) == list(range(40))
            if policy == "weighted_round_robin":
                assert (len(got[0]), len(got[1])) == (10, 30)
            elif policy == "memory_aware":
                assert not got[0]
            else:
                assert min(len(got[0]), len(got[1])) > 10

    # ---- arguments, statistics, threads

    async def test_wrong_arguments(self) -> None:
        async with self.place() as here:
            channel = await here.handle()
            for call in (
                lambda: channel.put(1, weight=-1),
                lambda: channel.put(1, weight=float("nan")),
                lambda: channel.put(1, weight=10**400),
                lambda: channel.get(key=10**5000),
                lambda: channel.get_batch(10**400),
                lambda: channel.put(1, weight="2"),  # type: ignore[call-overload]  # that is what is tested
                lambda: channel.put(1, key=1.5),  # type: ignore[call-overload]
                lambda: channel.put(1, key=True),
                lambda: channel.get(key="x" * 2000),
                lambda: channel.get(key=2**70),
                lambda: channel.get_batch(0),
                lambda: channel.lease(seconds=0),
                lambda: channel.prefetch(0),
                lambda: channel.report_memory(-1),
            ):
                with pytest.raises(UsageError):
                    call()
            if self.copies:
                with pytest.raises(NonContiguousTensor):
                    channel.put(torch.zeros(4, 4).t())
            with pytest.raises(WouldBlockLoop):
                channel.get(async_op=False)
            assert await channel.empty()

    async def test_statistics(self) -> None:
        async with self.place(maxsize=5) as here:
            put, get = await here.handle(), await here.handle()
            for number in range(4):
                await put.put(torch.zeros(10), weight=number, key="k" if number == 3 else None)
            await get.get()
            stats = await get.stats()
            assert (stats.name, stats.length, stats.weight, stats.puts, stats.gets, stats.maxsize) == ("c", 3, 6.0, 4, 1, 5)
            assert {key.key: key.length for key in stats.keys} == {None: 2, "k": 1}
            assert stats.bytes >= 3 * 40
            assert stats.consumers[0].taken == 1
            assert stats.producers[0].puts == 4
            assert stats.wait_p50_seconds is not None
            assert stats.puts_per_second > 0
            assert "3 items, weight 6" in str(stats)

    async def test_from_another_thread(self) -> None:
        async with self.place(maxsize=2) as here:
            put, get = await here.handle(), await here.handle()

            def produce() -> None:
                for number in range(50):
                    put.put(number, async_op=False)
                with put.lease() as item:
                    assert item == 49
                put.close().wait()

            thread = asyncio.create_task(asyncio.to_thread(produce))
            assert [await get.get() for _ in range(49)] == list(range(49))
            await thread
            assert isinstance(await _until(get.get()), ChannelClosed)
