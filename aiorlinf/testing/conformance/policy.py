"""What every load-balance policy keeps to (`aiorlinf.LoadBalancePolicy`)."""

from __future__ import annotations

import asyncio
import operator
import pickle
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from aiorlinf.channel.channel import Channel
from aiorlinf.channel.policies import LoadBalancePolicy
from aiorlinf.channel.records import Consumer, ItemInfo, Producer
from aiorlinf.errors import ChannelClosed, ChannelEmpty

__all__ = ["PolicyConformance"]

GROWTH_BYTES = 1 << 13
COMING_AND_GOING = 3000


def _some_item(chance: random.Random, key: Any = None) -> ItemInfo:
    """An item that a producer puts."""
    return ItemInfo(key, chance.choice([0.0, 0.5, 1.0, 7.25, 1000.0]), chance.choice([0, 100, 1 << 30]), Producer("p").name)


def _some_consumer(chance: random.Random, name: str) -> Consumer:
    """One with a past."""
    consumer = Consumer(name, chance.choice([0.5, 1.0, 3.0]), {"host": chance.choice(["x", "y"])})
    consumer.free_memory = chance.choice([None, 0, 1 << 30])
    for _ in range(chance.randrange(3)):
        consumer.chosen(chance.choice([0.0, 1.0, 2.5]), chance.randrange(1000))
    consumer.busy_seconds = chance.choice([0.0, 0.1, 50.0])
    consumer.asking = chance.randrange(3)
    return consumer


def _seen(consumers: Sequence[Consumer]) -> list[tuple[Any, ...]]:
    """All that a policy could have changed."""
    return [
        (
            *(each.name, each.share, dict(each.labels), each.free_memory, each.pending_items, each.pending_weight, each.pending_bytes),
            *(each.speed, each.busy_seconds, each.head_start, each.asking),
        )
        for each in consumers
    ]


class PolicyConformance:
    """Tests of a policy. Say in `make` which one; it is made anew for each test.

    Attributes:
        keys: keys of items that it is tried with.
        names: begins of the names that consumers have, and `labels` what they say of themselves in channels.
        serves_all: of consumers that are alike, each gets something.
        picklable: it can be given to ``create_channel(policy=...)`` as an object, and not only by its import path.
    """

    keys: ClassVar[Sequence[Any]] = (None, "k", 7, b"x")
    labels: ClassVar[dict[str, str]] = {}
    serves_all: ClassVar[bool] = True
    picklable: ClassVar[bool] = True

    def make(self) -> LoadBalancePolicy:
        """A policy."""
        raise NotImplementedError(f"{type(self).__name__}.make() says which policy is tested")

    @pytest.fixture
    def policy(self) -> LoadBalancePolicy:
        """The one under test."""
        return self.make()

    def choose(self, policy: LoadBalancePolicy, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        """What it chooses, checked."""
        before = _seen(consumers)
        index = policy.select_consumer(item, consumers)
        assert not isinstance(index, bool)
        assert 0 <= operator.index(index) < len(consumers), f"{index} of {len(consumers)} consumers"
        assert _seen(consumers) == before, "a policy only looks"
        return operator.index(index)

    # ---- by itself

    @pytest.mark.parametrize("count", [1, 2, 5, 100])
    def test_it_chooses_one_of_those_that_are_there(self, policy: LoadBalancePolicy, count: int) -> None:
        chance = random.Random(count)
        for _ in range(20):
            consumers = [_some_consumer(chance, f"c:{number}") for number in range(count)]
            for _ in range(5):
                self.choose(policy, _some_item(chance, chance.choice(self.keys)), consumers)

    def test_it_takes_consumers_that_nothing_is_known_of(self, policy: LoadBalancePolicy) -> None:
        consumers = [Consumer(f"c:{number}") for number in range(3)]
        for key in self.keys:
            self.choose(policy, ItemInfo(key, 1.0, 0, "p"), consumers)

    def test_whether_an_item_may_move_is_yes_or_no(self, policy: LoadBalancePolicy) -> None:
        chance = random.Random(3)
        for _ in range(100):
            holder, taker = _some_consumer(chance, "holder"), _some_consumer(chance, "taker")
            before = _seen([holder, taker])
            answer: Any = policy.may_move(_some_item(chance, chance.choice(self.keys)), holder, taker, chance.choice([0.0, 0.5, 100.0]))
            assert type(answer).__name__ in ("bool", "bool_"), f"may_move says {answer!r}"
            assert _seen([holder, taker]) == before, "a policy only looks"

    def test_it_forgets_consumers_that_are_gone(self, policy: LoadBalancePolicy) -> None:
        if not self.picklable:
            pytest.skip("its state cannot be measured")
        chance = random.Random(4)
        there = [_some_consumer(chance, f"c:{number}") for number in range(4)]
        settled = 0
        for number in range(COMING_AND_GOING):
            there[number % 4] = _some_consumer(chance, f"d:{number}")
            self.choose(policy, _some_item(chance, chance.choice(self.keys)), there)
            if number == COMING_AND_GOING // 10:
                settled = len(pickle.dumps(policy))
        growth = len(pickle.dumps(policy)) - settled
        assert growth < GROWTH_BYTES, f"its state has grown by {growth} bytes, while {COMING_AND_GOING} consumers came and went"

    def test_it_can_be_given_to_a_channel_worker(self, policy: LoadBalancePolicy) -> None:
        if not self.picklable:
            pytest.skip("it says that it cannot")
        there = pickle.loads(pickle.dumps(policy))
        assert isinstance(there, type(policy))
        self.choose(there, ItemInfo(None, 1.0, 0, "p"), [Consumer("c:0"), Consumer("c:1")])

    # ---- in a channel

    @pytest.mark.asyncio
    async def test_of_those_that_are_alike_each_gets_something(self, policy: LoadBalancePolicy) -> None:
        if not self.serves_all:
            pytest.skip("it says that some get nothing")
        channel = Channel.local("conformance", policy=policy)
        consumers = [channel.handle(consumer=f"c:{number}", labels=self.labels) for number in range(4)]
        for consumer in consumers:
            consumer.report_memory(1 << 30)
            await consumer.stats()
        for number in range(40):
            await channel.put(number, key=self.keys[0])
        got = []
        for consumer in consumers:
            found = 0
            while True:
                try:
                    await consumer.get_nowait(key=self.keys[0])
                except ChannelEmpty:
                    break
                found += 1
                if found == 10:  # its share: what others are to have may move here
                    break
            got.append(found)
        assert min(got) > 0, f"they got {got}"
        await channel.shutdown(immediate=True)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("seed", range(3))
    async def test_nothing_is_lost_whoever_comes_and_goes(self, policy: LoadBalancePolicy, seed: int) -> None:
        chance = random.Random(seed)
        channel = Channel.local("conformance", maxsize=16, policy=policy)
        crowd, items = (50, 40) if seed == 2 else (5, 150)  # from some number on they are compared as arrays
        got: list[int] = []

        async def consume(number: int) -> None:
            mine = channel.handle(consumer=f"c:{number}", share=chance.choice([0.5, 1.0, 2.0]), labels=self.labels)
            try:
                for _ in range(chance.randrange(3, 30)):
                    key = chance.choice(self.keys)
                    try:
                        async with asyncio.timeout(0.002 * chance.random()):
                            if chance.random() < 0.3:
                                async with mine.lease(key=key) as item:
                                    await asyncio.sleep(0)
                                    got.append(item)  # each when it is done
                            else:
                                got.append(await mine.get(key=key))
                    except TimeoutError:
                        continue
            finally:
                await mine.close()

        async def produce() -> None:
            for number in range(items):
                await channel.put(number, weight=chance.choice([0.0, 1.0, 5.0]), key=chance.choice(self.keys))
                if chance.random() < 0.3:
                    await asyncio.sleep(0)

        producing = asyncio.create_task(produce())
        numbers = iter(range(10**9))
        running: set[asyncio.Task[None]] = set()
        while not producing.done():
            while len(running) < crowd:
                running.add(asyncio.create_task(consume(next(numbers))))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await producing
        await asyncio.gather(*running)
        await channel.close()
        last = channel.handle(consumer="last", labels=self.labels)
        for key in self.keys:
            while True:
                try:
                    got.append(await last.get(key=key, timeout=20))
                except ChannelClosed:
                    break
        assert sorted(got) == list(range(items))
