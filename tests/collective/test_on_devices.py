"""Collectives of tensors on accelerators: everybody has them on a device of his own, after streams that take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from aiorlinf.errors import UsageError
from aiorlinf.testing.fake import FakeAccelerator
from tests.collective.company import Company, company
from tests.device.test_staging import same

__all__: list[str] = []

SIZES = (5, 300_000)
LAYOUTS = {"one host": ["", "", ""], "two hosts": ["a", "a", "b"], "all apart": ["a", "b", "c"]}


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=3, ticks=(1, 9)) as fake:
        yield fake


def share(workers: Company, root: int, obj: Any, targets: Mapping[int, Any] | None = None) -> Callable[[int], Any]:
    """What each rank calls for a broadcast."""
    into = targets or {}
    return lambda rank: workers[rank].broadcast(obj if rank == root else None, root, into=into.get(rank))


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
async def test_broadcast(fake: FakeAccelerator, hosts: list[str]) -> None:
    """A device tensor that its stream has not written yet, one of another device, and one in CPU memory, in one object."""
    async with company(hosts) as workers:
        for root in range(len(hosts)):
            for size in SIZES:
                values = torch.arange(size, dtype=torch.float32) + root
                sent = {"late": fake.late(values, ticks=40), "other": fake.late(values, index=1), "here": values.clone(), "step": size}
                got = await workers.all(share(workers, root, sent))
                for rank, each in enumerate(got):
                    where = ("fake:0", "fake:1" if rank == root else "fake:0")  # the root keeps its own; others have theirs on one device
                    assert same(fake, each["late"], values, where[0])
                    assert same(fake, each["other"], values, where[1])
                    assert same(fake, each["here"], values, "cpu")
                    assert each["step"] == size
                others = [each["late"] for rank, each in enumerate(got) if rank != root]
                fake.write(others[0], torch.zeros(size))
                assert same(fake, others[1], values, "fake:0"), "each has a copy of its own"
                del got, others, sent, each
        await workers.all_is_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
async def test_into_the_models_that_are_there(fake: FakeAccelerator, hosts: list[str]) -> None:
    async with company(hosts) as workers:
        for size in SIZES:
            values = torch.arange(size, dtype=torch.float32)
            source = {"w": fake.late(values, ticks=30), "b": torch.ones(3)}
            # One receiver has its weights on the other device, the other in CPU memory.
            targets = {
                1: {"w": fake.late(torch.zeros(size), index=1), "b": torch.zeros(3)},
                2: {"w": torch.zeros(size), "b": torch.zeros(3)},
            }
            await workers.all(share(workers, 0, source, targets))
            assert same(fake, targets[1]["w"], values, "fake:1")
            assert same(fake, targets[2]["w"], values, "cpu")
            assert all(torch.equal(target["b"], torch.ones(3)) for target in targets.values())
            del source, targets
        await workers.all_is_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
async def test_gather_and_all_to_all(fake: FakeAccelerator, hosts: list[str]) -> None:
    async with company(hosts) as workers:
        for size in SIZES:
            await check_exchanges(fake, workers, size)
        await workers.all_is_free()


async def check_exchanges(fake: FakeAccelerator, workers: Company, size: int) -> None:
    """Pieces of different sizes, on one device of each member."""
    count = len(workers)

    def piece(sender: int, receiver: int) -> torch.Tensor:
        return torch.full((size + sender,), 10.0 * sender + receiver)

    def given(sender: int, receiver: int) -> Any:
        return {"x": fake.late(piece(sender, receiver), index=sender % 2), "from": sender}

    def check(receiver: int, parts: list[Any]) -> None:
        for sender, part in enumerate(parts):
            assert part["from"] == sender
            # What one gives to oneself stays where it is.
            assert same(fake, part["x"], piece(sender, receiver), f"fake:{sender % 2}" if sender == receiver else "fake:0")

    rows = await workers.all(lambda rank: workers[rank].gather(given(rank, 0), 0))
    assert rows[1:] == [None] * (count - 1)
    check(0, rows[0])
    found = await workers.all(lambda rank: workers[rank].all_to_all([given(rank, other) for other in range(count)]))
    for receiver, parts in enumerate(found):
        check(receiver, parts)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["record", "copy"])  # when it is called, and when the copies are begun
async def test_a_device_that_fails_tells_the_others(fake: FakeAccelerator, call: str) -> None:
    async with company(["", "", ""]) as workers:
        for number in range(3):
            await check_failure(fake, workers, call, number)
        await workers.all_is_free()


async def check_failure(fake: FakeAccelerator, workers: Company, call: str, number: int) -> None:
    """The tensor of w:0 cannot be had."""
    sent = fake.late(torch.arange(SIZES[1], dtype=torch.float32))
    calls: list[Callable[[int], Any]] = [
        share(workers, 0, sent),
        lambda rank: workers[rank].gather(sent if rank == 0 else rank, 1),
        lambda rank: workers[rank].all_to_all([sent if rank == 0 else rank] * 3),
    ]
    fake.fail_next(call, RuntimeError("the device is gone"), times=9)
    outcomes = await workers.outcomes(calls[number])
    fake._failures.clear()
    assert isinstance(outcomes[1], BaseException)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            assert "the device is gone" in str(outcome), outcome
    await workers.check_works()


@pytest.mark.asyncio
async def test_what_cannot_be_written_in_place(fake: FakeAccelerator) -> None:
    async with company(["", ""]) as workers:
        target = fake.tensor(torch.zeros(4, 4)).t()
        with pytest.raises(UsageError, match="into: 'w' is on fake:0 and not contiguous"):
            workers[1].broadcast(None, 0, into={"w": target})


@pytest.mark.asyncio
async def test_the_producing_stream_is_the_callers(fake: FakeAccelerator) -> None:
    """Another stream is current by the time that the parts leave."""
    values = torch.arange(1000.0)
    sent, streams = [], [fake.new_stream() for _ in range(3)]
    async with company(["", "", ""]) as workers:

        def call(rank: int) -> Any:
            before = fake.current_stream(0)
            fake.set_stream(streams[rank])
            sent.append(fake.late(values + rank, ticks=50))
            work = workers[rank].gather(sent[-1], 0)
            fake.set_stream(before)
            return work

        rows = await workers.all(call)
        for rank in (1, 2):
            assert same(fake, rows[0][rank], values + rank, "fake:0")
        for stream in streams:
            fake.synchronise(stream)
