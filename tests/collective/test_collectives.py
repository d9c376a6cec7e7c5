"""Broadcast, gather and all-to-all: everybody gets what he should, of any kind and size, over any layout of hosts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from aiorlinf import init
from aiorlinf.collective import spread
from aiorlinf.errors import UsageError
from aiorlinf.manager.service import ManagerService
from tests.cases.sameness import all_dtypes, assert_same, sample
from tests.collective.company import Company, company

LAYOUTS = {
    "one host": ["", "", "", ""],
    "two hosts": ["a", "a", "b", "b"],
    "all apart": ["a", "b", "c", "d"],
    "mixed up": ["b", "a", "b", "a", "c"],
}


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory must come back without one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest_asyncio.fixture(params=LAYOUTS)
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Company]:
    hosts = LAYOUTS[request.param]
    async with company(hosts, backend="stream" if "d" in hosts else "auto") as made:
        yield made


@dataclasses.dataclass
class Row:
    data: torch.Tensor
    name: str = "row"


def objects() -> dict[str, Any]:
    """Small and large ones of every kind."""
    return {
        "nothing": None,
        "text": "x" * 100,
        "tensor": torch.arange(6).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "large": torch.arange(300_000, dtype=torch.float32),
        "ragged": [torch.full((n * 9001,), n, dtype=torch.int16) for n in range(5)],
        "state": {"w": torch.nn.Parameter(torch.randn(200, 200)), "b": torch.zeros(3, dtype=torch.bfloat16), "n": torch.tensor(7)},
        "nested": {
            "row": Row(torch.ones(40_000)),
            "array": np.arange(30_000),
            "list": [(1, "a"), {"k": torch.zeros(2, 2)}],
            "b": b"y" * 90_000,
        },
        "long text": "z" * 200_000,
    }


@pytest.mark.asyncio
async def test_broadcast_brings_everything_to_everybody(workers: Company) -> None:
    for number, (name, obj) in enumerate(objects().items()):
        root = number % len(workers)
        await check_broadcast(workers, obj, root, name)
        del obj
    await workers.all_is_free()


async def check_broadcast(workers: Company, obj: Any, root: int, name: str) -> None:
    got = await workers.all(lambda rank: workers[rank].broadcast(obj if rank == root else None, root))
    for rank, value in enumerate(got):
        assert value is obj if rank == root else True, name
        assert_same(value, obj)


@pytest.mark.asyncio
async def test_what_one_member_writes_nobody_else_sees(workers: Company) -> None:
    tensor = torch.zeros(100_000)
    got = await workers.all(lambda rank: workers[rank].broadcast(tensor, f"w:{len(workers) - 1}"))
    for rank, value in enumerate(got):
        value += rank + 1
    for rank, value in enumerate(got):
        assert torch.equal(value, torch.full((100_000,), rank + 1.0))
    del got, value
    await workers.all_is_free()


@pytest.mark.asyncio
async def test_a_chain_hands_on_piece_by_piece(workers: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "PIECE_BYTES", 50_000)
    for size in (20_000, 12_500 * 7, 12_500 * 7 + 1):
        await check_broadcast(workers, torch.randn(size), 1, f"{size} numbers")


@pytest.mark.asyncio
async def test_gather_in_the_order_of_the_members(workers: Company) -> None:
    for root in range(len(workers)):
        await check_gather(workers, root)
    await workers.all_is_free()


async def check_gather(workers: Company, root: int) -> None:
    kinds = list(objects().values())
    got = await workers.all(lambda rank: workers[rank].gather(kinds[(rank + root) % len(kinds)], root))
    for rank, value in enumerate(got):
        if rank != root:
            assert value is None
            continue
        assert len(value) == len(workers)
        for other, part in enumerate(value):
            assert_same(part, kinds[(other + root) % len(kinds)])


@pytest.mark.asyncio
async def test_all_to_all_against_a_model() -> None:
    chance = random.Random(3)
    async with company([""] * 8) as workers:
        for _ in range(40):
            await check_all_to_all(workers, chance)
        await workers.all_is_free()


async def check_all_to_all(workers: Company, chance: random.Random) -> None:
    """Three at once."""
    ranks = range(len(workers))
    batch = [[[_random_object(chance) for _ in ranks] for _ in ranks] for _ in range(3)]
    works = [[workers[rank].all_to_all(sent[rank]) for rank in ranks] for sent in batch]
    for sent, made in zip(batch, works, strict=True):
        for rank, work in enumerate(made):
            got = await work.async_wait(20)
            for other in ranks:
                assert_same(got[other], sent[other][rank])


def _random_object(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(7 if depth < 2 else 4)
    if kind == 0:
        return chance.randrange(1000)
    if kind == 1:
        return "x" * chance.randrange(50)
    if kind == 2:
        return torch.full([chance.randrange(5) for _ in range(chance.randrange(3))], float(chance.randrange(9)))
    if kind == 3:
        return torch.full((chance.choice([3, 300, 20_000]),), chance.randrange(100), dtype=torch.int64)
    if kind == 4:
        return {f"k{n}": _random_object(chance, depth + 1) for n in range(chance.randrange(4))}
    made = [_random_object(chance, depth + 1) for _ in range(chance.randrange(4))]
    return made if kind == 5 else tuple(made)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("backend", "hosts"), [("shm", [""] * 3), ("stream", [""] * 3), ("gloo", ["a", "b", "c"]), ("auto", ["a", "a", "b"])]
)
async def test_parts_of_nothing_of_one_and_of_a_million_elements(backend: str, hosts: list[str]) -> None:
    parts: list[list[Any]] = [
        [torch.full((size,), float(3 * rank + other)) if size >= 0 else f"from {rank} to {other}" for other, size in enumerate(sizes)]
        for rank, sizes in enumerate([(0, 1, 1_000_000), (1_000_000, -1, 0), (1, 0, 1_000_000)])
    ]
    async with company(hosts, backend=backend) as workers:
        for _ in range(2):  # with and without links
            got = await workers.all(lambda rank: workers[rank].all_to_all(parts[rank]))
            assert_same(got, [[parts[other][rank] for other in range(3)] for rank in range(3)])
            rows = (await workers.all(lambda rank: workers[rank].gather(parts[rank])))[0]
            assert_same(rows, parts)
            del got, rows
        await workers.all_is_free()


@pytest.mark.asyncio
async def test_every_dtype_and_tensors_without_elements(workers: Company) -> None:
    shapes = [(), (3,), (2, 3), (2, 3, 4), (0,), (0, 3), (3, 0)]
    obj = {str(dtype): [sample(dtype, shape) for shape in shapes] for dtype in all_dtypes()}
    for sent in (obj, {**obj, "large": torch.ones(1 << 18)}):
        await check_every_way(workers, sent)
    await workers.all_is_free()


async def check_every_way(workers: Company, sent: Any) -> None:
    await check_broadcast(workers, sent, 1, "every dtype")
    count = len(workers)
    assert_same((await workers.all(lambda rank: workers[rank].gather(sent)))[0], [sent] * count)
    assert_same(await workers.all(lambda rank: workers[rank].all_to_all([sent] * count)), [[sent] * count] * count)


class Counting:
    """Knows how often it was taken apart."""

    taken_apart = 0

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        Counting.taken_apart += 1
        return Counting, (self.data,)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("kind", ["broadcast", "gather", "all_to_all"])
async def test_an_object_is_taken_apart_once_for_each_who_gets_it(workers: Company, kind: str, size: int) -> None:
    obj = Counting(torch.ones(size))
    before = Counting.taken_apart
    if kind == "broadcast":
        await workers.all(lambda rank: workers[rank].broadcast(obj if rank == 0 else None, 0))
        expected = 1  # all get the same
    elif kind == "gather":
        await workers.all(lambda rank: workers[rank].gather(obj if rank == 1 else None, 0))
        expected = 1
    else:
        await workers.all(lambda rank: workers[rank].all_to_all([obj if rank == 0 else None] * len(workers)))
        expected = len(workers) - 1
    assert Counting.taken_apart - before == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["broadcast", "gather", "all_to_all"])
async def test_tensors_of_empty_are_not_given_away(workers: Company, kind: str) -> None:
    """One may go to several, and stand in the own result."""
    tensors = []
    for rank, worker in enumerate(workers.workers):
        tensors.append(worker.empty(50_000))
        tensors[rank].fill_(rank)

    def call(rank: int) -> Any:
        if kind == "broadcast":
            return workers[rank].broadcast(tensors[rank], 0)
        if kind == "gather":
            return workers[rank].gather(tensors[rank], 0)
        return workers[rank].all_to_all([tensors[rank]] * len(workers))

    got = await workers.all(call)
    for rank, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((50_000,), float(rank)))
    if kind == "all_to_all":
        for row in got:
            assert [part[0].item() for part in row] == list(range(len(workers)))


@pytest.mark.asyncio
async def test_many_at_once_and_messages_in_between(workers: Company) -> None:
    big = torch.arange(50_000)
    first, last = workers.workers[0], workers.workers[-1]
    works: list[list[Any]] = [[] for _ in workers.addresses]
    for number in range(12):
        for rank in range(len(workers)):
            calls = workers[rank]
            works[rank] += [
                calls.broadcast((number, big + number), number % len(workers)),
                calls.gather((number, rank), (number + 1) % len(workers)),
                calls.all_to_all([(number, rank, other) for other in range(len(workers))]),
            ]
        await first.send(("message", number, big), last.address)
    for number in range(12):
        assert_same(await last.recv(first.address, timeout=20), ("message", number, big))
        for rank in range(len(workers)):
            broadcast, gathered, exchanged = [await work.async_wait(20) for work in works[rank][3 * number : 3 * number + 3]]
            assert_same(broadcast, (number, big + number))
            everybody = range(len(workers))
            assert gathered == ([(number, other) for other in everybody] if rank == (number + 1) % len(workers) else None)
            assert exchanged == [(number, other, rank) for other in everybody]


@pytest.mark.asyncio
async def test_groups_do_not_hear_each_other() -> None:
    async with company(["", "", ""]) as workers:
        groups = {
            name: [worker.collective.create_collective_group(workers.addresses, name) for worker in workers.workers]
            for name in (None, "x", "y")
        }
        works = {name: [group.broadcast((name, group.rank), 2) for group in reversed(groups[name])] for name in groups}
        for name, made in works.items():
            assert [await work.async_wait(20) for work in made] == [(name, 2)] * 3
        pair = [worker.collective.create_collective_group(workers.addresses[:2]) for worker in workers.workers[:2]]
        sent = pair[0].send("a message")
        assert await asyncio.gather(*(group.gather(group.rank, "w:1") for group in pair)) == [None, [0, 1]]
        assert await pair[1].recv(timeout=20) == "a message"
        await sent


@pytest.mark.asyncio
async def test_who_takes_part() -> None:
    async with init("w:0") as worker:
        with pytest.raises(UsageError, match="anybody may join this job"):
            worker.broadcast(1)
        with pytest.raises(UsageError, match="w:0 is not among the members x:0, x:1"):
            worker.gather(1, members=["x:0", "x:1"])
        nobody: list[Any] = [2, -1, "w:2", True, None]
        for root in nobody:
            with pytest.raises(UsageError, match="is no member"):
                worker.broadcast(1, root, members=["w:0", "w:1"])
        with pytest.raises(UsageError, match="in another order before"):
            worker.broadcast(1, members=["w:1", "w:0"])
        alone = ["w:0"]
        assert await worker.broadcast("x", members=alone) == "x"
        assert await worker.gather("x", members=alone) == ["x"]
        assert await worker.all_to_all(["x"], members=alone) == ["x"]


@pytest.mark.asyncio
async def test_the_whole_job_is_whom_it_began_with() -> None:
    service = ManagerService(config=None, token=b"token", expected=["w:0", "v:0", "w:10", "w:9"])
    await service.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            # A channel worker, say, comes second: those who join after it know of it.
            order = ("w:9", "channel:0", "v:0", "w:0", "w:10")
            joined = [await stack.enter_async_context(init(address, manager=service.address, token=b"token")) for address in order]
            extra = joined.pop(1)
            got = await asyncio.wait_for(asyncio.gather(*(worker.gather(str(worker.address), root="w:10") for worker in joined)), 20)
            assert got == [None, None, None, ["v:0", "w:0", "w:9", "w:10"]], "in the order of the addresses"
            with pytest.raises(UsageError, match="channel:0 is not among the members v:0, w:0, w:9, w:10"):
                extra.gather(1)
    finally:
        await service.close()
