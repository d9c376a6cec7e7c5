"""One order of submission for every device: many pairs on few devices, whose transfers are begun in an unlucky order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from aiorlinf import init
from aiorlinf.backends.device_pairs import register_pairs, unregister_pairs
from aiorlinf.device.turns import INWARD, OUTWARD, Turn, Turns, turns_of
from aiorlinf.errors import ClosedError
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.testing.fake.pairs import FakeMaker

__all__: list[str] = []

Pair = tuple[int, int]
DEVICES = 4


class Anarchy(Turns):
    """The mutant: everybody goes at once."""

    def take(self, owner: object, go: Callable[[Turn], None], call: object) -> Turn:
        turn = Turn(self, owner, go, lambda fn: fn())
        go(turn)
        return turn

    def _end(self, turn: Turn) -> None:
        pass


class Model:
    """Workers with a device each, and links that deliver START frames whenever chance has it. A device does what it was given in each
    direction one after the other, and a transfer moves only when both ends have come to it."""

    def __init__(self, seed: int, kind: type[Turns]) -> None:
        self.chance = random.Random(seed)
        self.turns: defaultdict[tuple[int, str], Turns] = defaultdict(kind)
        self.engines: defaultdict[tuple[int, str], deque[tuple[Pair, int, Turn]]] = defaultdict(deque)
        self.calls: deque[Callable[[], None]] = deque()
        self.starts: defaultdict[Pair, deque[int]] = defaultdict(deque)
        self.over: defaultdict[Pair, list[int]] = defaultdict(list)

    def send(self, pair: Pair, number: int) -> None:
        def go(turn: Turn) -> None:
            self.engines[pair[0], OUTWARD].append((pair, number, turn))
            self.starts[pair].append(number)

        self.turns[pair[0], OUTWARD].take(pair, go, self.calls.append)

    def deliver(self, pair: Pair) -> None:
        number = self.starts[pair].popleft()

        def go(turn: Turn) -> None:
            self.engines[pair[1], INWARD].append((pair, number, turn))

        self.turns[pair[1], INWARD].take(pair, go, self.calls.append)

    def move(self, pair: Pair) -> None:
        _, number, turn = self.engines[pair[0], OUTWARD].popleft()
        _, _, other = self.engines[pair[1], INWARD].popleft()
        self.calls += [turn.end, other.end]
        self.over[pair].append(number)

    def choices(self) -> Iterator[Callable[[], None]]:
        if self.calls:
            yield lambda: self.calls.popleft()()
        for pair, waiting in self.starts.items():
            if waiting:
                yield partial(self.deliver, pair)
        for (_, way), engine in self.engines.items():
            if way == OUTWARD and engine:
                pair, number, _ = engine[0]
                other = self.engines.get((pair[1], INWARD))
                if other and other[0][:2] == (pair, number):
                    yield partial(self.move, pair)

    def run(self, messages: int) -> bool:
        """Whether everything arrived, each pair's in its order."""
        pairs = [(one, other) for one in range(DEVICES) for other in range(DEVICES) if one != other]
        sent: defaultdict[Pair, list[int]] = defaultdict(list)
        left = messages
        while True:
            found = list(self.choices())
            if left and (not found or self.chance.random() < 0.4):
                pair = self.chance.choice(pairs)
                sent[pair].append(left)
                self.send(pair, left)
                left -= 1
            elif found:
                self.chance.choice(found)()
            else:
                return self.over == sent


@pytest.mark.parametrize("seed", range(60))
def test_everything_arrives_whatever_comes_first(seed: int) -> None:
    model = Model(seed, Turns)
    assert model.run(60)
    assert all(turns.idle for turns in model.turns.values())


def test_without_turns_devices_wait_for_each_other() -> None:
    """The model can see what the turns are there for."""
    stuck = [seed for seed in range(60) if not Model(seed, Anarchy).run(60)]
    assert len(stuck) > 10


def test_one_pair_at_a_time_and_its_own_in_order() -> None:
    turns, came, calls = Turns(), list[str](), deque[Callable[[], None]]()
    owners = {"a": "x", "b": "x", "c": "y", "d": "z", "e": "y"}

    def go(name: str, turn: Turn) -> None:
        came.append(name)

    taken = [turns.take(owner, partial(go, name), calls.append) for name, owner in owners.items()]
    assert came == ["a", "b"]  # the second joined, the rest wait for another pair
    taken[1].end()
    taken[2].end()  # it does not want to any more
    assert not calls
    taken[0].end()
    taken[0].end()
    assert taken[0].over
    late = turns.take("x", lambda turn: came.append("late"), calls.append)
    assert came == ["a", "b"]
    calls.popleft()()
    assert came == ["a", "b", "d"]
    taken[3].end()
    taken[4].end()  # before it could come
    while calls:
        calls.popleft()()
    assert came == ["a", "b", "d", "late"]
    late.end()
    assert turns.idle


def test_whose_loop_has_ended_gives_way() -> None:
    turns, came = Turns(), list[str]()

    def closed(fn: Callable[[], None]) -> None:
        raise ClosedError("the loop is closed")

    first = turns.take("x", lambda turn: came.append("first"), closed)
    turns.take("y", lambda turn: came.append("never"), closed)
    last = turns.take("z", lambda turn: came.append("last"), lambda fn: fn())
    first.end()
    assert came == ["first", "last"]
    last.end()
    assert turns.idle


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [0, 1])
async def test_workers_that_share_devices(seed: int) -> None:
    """Every one of four workers sends to every other one, all at once, through pairs."""
    chance = random.Random(seed)
    values = torch.arange(5000)
    with FakeAccelerator(DEVICES, seed=seed, ticks=(1, 5)) as fake:
        maker = FakeMaker(fake)
        register_pairs("fake", maker)
        try:
            async with (
                init("w:0", backend="nccl", device="fake:0") as zero,
                init("w:1", backend="nccl", device="fake:1") as one,
                init("w:2", backend="nccl", device="fake:2") as two,
                init("w:3", backend="nccl", device="fake:3") as three,
            ):
                workers = [zero, one, two, three]
                ways = [(source, target, number) for source in range(4) for target in range(4) if source != target for number in range(3)]
                chance.shuffle(ways)
                works = []
                for source, target, number in ways:
                    works.append(workers[source].send([fake.late(values + number, source), source], f"w:{target}", tag=number))
                    if chance.random() < 0.3:
                        await asyncio.sleep(0)
                for source, target, number in ways:
                    tensor, who = await workers[target].recv(f"w:{source}", tag=number)
                    assert who == source
                    assert torch.equal(tensor.cpu(), values + number)
                await asyncio.gather(*works)
                assert {link.device_backend for worker in workers for link in worker.stats().links} == {"nccl"}
                assert maker.crowded == 0
                assert all(turns_of(fake, index, way).idle for index in range(DEVICES) for way in (OUTWARD, INWARD))
        finally:
            unregister_pairs("fake")
