"""Broadcasts to members that share a device which is none of the root's: it is copied there once, and then inside the device."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.collective import device_loans
from aiorlinf.errors import AiorlinfError, Mismatch
from aiorlinf.link.device_events import sweep
from aiorlinf.testing.fake import FakeAccelerator
from tests.collective.company import Company, company
from tests.collective.test_device_loans import sharing
from tests.device.test_staging import same
from tests.system import soon

__all__: list[str] = []

VALUES = torch.arange(100_000, dtype=torch.int32)
LIMIT_S = 20.0
ONE_DEVICE = ["fake:0", "fake:1", "fake:1", "fake:1"]


class Weighed(FakeAccelerator):
    """It counts bytes.

    Attributes:
        moved: from where to where, "cpu" or a device.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.moved: Counter[tuple[str, str]] = Counter()

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        super().copy(out, source, stream)
        self.moved[str(source.device), str(out.device)] += source.nbytes


@pytest.fixture
def fake() -> Iterator[Weighed]:
    fake = Weighed(2, seed=5, ticks=(1, 9))
    fake.islands = True
    with fake:
        yield fake


async def nothing_left(workers: Company, fake: FakeAccelerator) -> None:
    """As in `test_device_loans`; the loans of all of them."""

    def free() -> bool:
        fake.step()
        sweep()
        gc.collect()
        tables = [worker._table for worker in workers.workers]
        links = [table.peek(WorkerAddress(address)) for table in tables for address in workers.addresses]
        lent = [link.sender.devices._loans for link in links if link is not None and link.sender.devices is not None]
        return not any(lent) and all(fake.memory(index)[0] == fake.memory(index)[1] for index in range(2))

    await soon(free)
    await workers.all_is_free()


def object_of(fake: FakeAccelerator, number: int) -> dict[str, Any]:
    weight = fake.late(VALUES + number, ticks=40)
    return {"w": weight, "tied": weight, "v": fake.late(VALUES[:50] * number, ticks=40), "none": fake.tensor(VALUES[:0]), "lr": VALUES[:3]}


def check(fake: FakeAccelerator, got: dict[str, Any], number: int, device: str) -> None:
    assert same(fake, got["w"], VALUES + number, device)
    assert same(fake, got["v"], VALUES[:50] * number, device)
    assert same(fake, got["none"], VALUES[:0], device)
    assert same(fake, got["lr"], VALUES[:3], "cpu")


ONCE = VALUES.nbytes + VALUES[:50].nbytes


@pytest.mark.asyncio
@pytest.mark.parametrize("beside", [1 << 20, 1])
async def test_once_through_host_memory(fake: Weighed, monkeypatch: pytest.MonkeyPatch, beside: int) -> None:
    monkeypatch.setattr(device_loans, "BESIDE_MAX_BYTES", beside)
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        for number in range(3):
            sent = object_of(fake, number)
            fake.moved.clear()
            got = await workers.all(sharing(workers, sent))
            assert fake.moved == {("fake:0", "cpu"): ONCE, ("cpu", "fake:1"): ONCE, ("fake:1", "fake:1"): 2 * ONCE}
            for each in got[1:]:
                assert each["w"] is each["tied"]
                check(fake, each, number, "fake:1")
            fake.write(got[1]["w"], torch.zeros_like(VALUES))  # each has a copy of its own
            assert same(fake, got[2]["w"], VALUES + number, "fake:1")
            del got, each, sent
            await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_once_from_the_roots_device(fake: Weighed) -> None:
    """Where that can be read, it is read once."""
    fake.islands = False
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        for number in range(2):
            sent = object_of(fake, number)
            fake.moved.clear()
            got = await workers.all(sharing(workers, sent))
            assert fake.moved == {("fake:0", "fake:1"): ONCE, ("fake:1", "fake:1"): 2 * ONCE}
            for each in got[1:]:
                check(fake, each, number, "fake:1")
            del got, each, sent
            await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_once_to_each_device_of_another_host(fake: Weighed) -> None:
    devices = ["fake:0", "fake:0", "fake:0", "fake:1", "fake:0", "fake:1", "fake:0"]
    async with company(["a", "a", "b", "b", "b", "b", "b"], devices=devices) as workers:
        for number in range(2):
            sent = object_of(fake, number)
            fake.moved.clear()
            got = await workers.all(sharing(workers, sent))
            for each, device in zip(got[1:], devices[1:], strict=True):
                check(fake, each, number, device)
            to_one, to_other = fake.moved["cpu", "fake:0"], fake.moved["cpu", "fake:1"]
            assert (to_one, to_other) == (ONCE, ONCE)
            assert fake.moved["fake:0", "fake:0"] == 3 * ONCE  # w:1 from the root, w:4 and w:6 from w:2
            assert fake.moved["fake:1", "fake:1"] == ONCE
            del got, each, sent
            await nothing_left(workers, fake)


def zeros_for(fake: FakeAccelerator, sent: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a member has on its device, and is still at work on."""
    made = {name: fake.late(torch.zeros(sent[name].shape, dtype=torch.int32), index=1, ticks=60) for name in ("w", "tied", "v")}
    return {**made, "none": fake.tensor(VALUES[:0], 1), "lr": torch.zeros_like(VALUES[:3])}


@pytest.mark.asyncio
async def test_who_is_alone_on_a_host_is_not_asked_for_its_devices(fake: Weighed) -> None:
    """To look at them starts them."""
    async with company(["a", "b", "c", "c"]) as workers:
        sent = object_of(fake, 1)
        got = await workers.all(sharing(workers, sent))
        for each in got[1:]:
            check(fake, each, 1, "fake:0")
        links = [workers.workers[0]._table.peek(WorkerAddress(address)) for address in workers.addresses[1:]]
        facts = [link.sender.devices._peer for link in links if link is not None and link.sender.devices is not None]
        assert [each is not None for each in facts] == [False, True, True]
        del got, each, sent
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("islands", [True, False])
async def test_into_the_tensors_that_are_there(fake: Weighed, islands: bool) -> None:
    """The keeper lends them as they are; each is written to behind what its own stream was given before."""
    fake.islands = islands
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        for number in range(2):
            sent = object_of(fake, number)
            targets = {rank: zeros_for(fake, sent) for rank in (1, 2, 3)}
            fake.moved.clear()
            got = await workers.all(sharing(workers, sent, targets))
            twice = ONCE + VALUES.nbytes  # tied here, and two tensors there
            way = {("fake:0", "cpu"): ONCE, ("cpu", "fake:1"): twice} if islands else {("fake:0", "fake:1"): twice}
            assert fake.moved == {**way, ("fake:1", "fake:1"): 2 * twice}
            for rank, each in targets.items():
                assert got[rank] is each
                check(fake, each, number, "fake:1")
                assert same(fake, each["tied"], VALUES + number, "fake:1")
            del got, each, sent, targets
            await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["type", "cpu", "other device"])
async def test_a_keeper_that_cannot_lend_it(fake: Weighed, what: str) -> None:
    """It has it otherwise, or elsewhere; the others have it through host memory."""
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        sent = {"w": fake.late(VALUES, ticks=30)}
        zeros = torch.zeros_like(VALUES)
        target = {"type": lambda: fake.late(zeros.float(), index=1), "cpu": lambda: zeros, "other device": lambda: fake.late(zeros)}[what]()
        fake.moved.clear()
        got = await workers.all(sharing(workers, sent, {1: {"w": target}}))
        assert fake.moved["cpu", "fake:1"] >= 2 * VALUES.nbytes or what == "other device"
        assert same(fake, target, VALUES.to(target.dtype), str(target.device))
        for each in got[2:]:
            assert same(fake, each["w"], VALUES, "fake:1")
        del got, each, sent, target
        await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_what_does_not_fit(fake: Weighed) -> None:
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        target = {"other": fake.tensor(VALUES, 1)}
        outcomes = await workers.outcomes(sharing(workers, {"w": fake.late(VALUES)}, {1: target}))
        assert isinstance(outcomes[1], Mismatch)
        assert all(isinstance(outcome, AiorlinfError) for outcome in outcomes)
        del outcomes, target
        await workers.check_works()
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["export", "open", "copy"])
@pytest.mark.parametrize("beside", [1 << 20, 1])
async def test_a_device_that_fails_on_the_way(
    fake: Weighed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str, beside: int
) -> None:
    """Everybody has it all the same; who cannot read another one's memory is not asked to again."""
    monkeypatch.setattr(device_loans, "BESIDE_MAX_BYTES", beside)
    async with company([""] * 4, devices=ONE_DEVICE) as workers:
        with caplog.at_level(logging.WARNING, "aiorlinf"):
            for number in range(3):
                sent = object_of(fake, number)
                if not number:
                    fail_between_members(fake, monkeypatch, call)
                got = await workers.all(sharing(workers, sent))
                for each in got[1:]:
                    check(fake, each, number, "fake:1")
                del got, each, sent
                await nothing_left(workers, fake)
        lines = [record.getMessage() for record in caplog.records if "cannot copy from the memory" in record.getMessage()]
        assert len(lines) == {"export": 0, "open": 1, "copy": 1}[call]


def fail_between_members(fake: Weighed, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The first of these calls fails that is for one member's memory and another's; those of the root work."""
    real = getattr(fake, call)
    failed = False

    def failing(*args: Any) -> Any:
        nonlocal failed
        between: dict[str, Callable[..., bool]] = {
            "export": lambda tensor: tensor.get_device() == 1,
            "open": lambda shared, index: index == 1,
            "copy": lambda out, source, stream: out.device == source.device == torch.device("fake", 1),
        }
        if between[call](*args) and not failed:
            failed = True
            raise RuntimeError(f"{call} fails because the test says so")
        return real(*args)

    monkeypatch.setattr(fake, call, failing)


@pytest.mark.asyncio
async def test_the_keeper_has_it_when_the_others_are_through(fake: Weighed) -> None:
    """Or its user would write to what they still read."""
    async with company([""] * 3, devices=ONE_DEVICE[:3]) as workers:
        call = sharing(workers, {"w": fake.late(VALUES, ticks=20)})
        works = [call(0), call(1)]
        for _ in range(50):
            await asyncio.sleep(0.001)
            fake.step()
        assert not works[1].done()
        works.append(call(2))
        got = [await asyncio.wait_for(work, LIMIT_S) for work in works]
        fake.write(got[1]["w"], torch.zeros_like(VALUES))
        assert same(fake, got[2]["w"], VALUES, "fake:1")
        del got, works, call
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_cancelled_at_every_moment(fake: Weighed, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with company([""] * 3, devices=ONE_DEVICE[:3]) as workers:
        for turns in range(0, 40, 5):
            monkeypatch.setattr(device_loans, "BESIDE_MAX_BYTES", 100 if turns % 2 else 1 << 20)
            sent = [fake.late(VALUES, ticks=20), VALUES[:100]]
            works = [sharing(workers, sent)(rank) for rank in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            works[who].cancel()
            for work in works:
                with contextlib.suppress(AiorlinfError, asyncio.CancelledError):
                    await asyncio.wait_for(work, LIMIT_S)
            works.clear()
            del work, sent
            await workers.check_works()
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_a_member_that_leaves_in_the_middle(fake: Weighed, who: int) -> None:
    """The keeper too: nobody waits for ever, and no memory is kept."""
    fake.limbo = True
    for turns in range(0, 45, 9):
        async with company([""] * 3, devices=ONE_DEVICE[:3]) as workers:
            await workers.check_works()
            works = [sharing(workers, [fake.late(VALUES, ticks=20)])(rank) for rank in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await workers.workers[who].close()
            for work in works:
                with contextlib.suppress(AiorlinfError, asyncio.CancelledError):
                    await asyncio.wait_for(work, LIMIT_S)
            works.clear()
            del work

    def free() -> bool:
        fake.step()
        sweep()
        gc.collect()
        return all(fake.memory(index)[0] == fake.memory(index)[1] for index in range(2))

    await soon(free)
