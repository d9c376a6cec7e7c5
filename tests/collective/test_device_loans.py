"""Broadcasts from an accelerator to members that read its memory themselves: one copy each, and none through host memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.collective import device_loans
from aiorlinf.errors import AiorlinfError, Mismatch, RemoteError, UsageError
from aiorlinf.link.device_events import sweep
from aiorlinf.testing.fake import FakeAccelerator
from tests.collective.company import Company, company
from tests.device.test_staging import same
from tests.system import soon

__all__: list[str] = []

VALUES = torch.arange(100_000, dtype=torch.int32)


class Watched(FakeAccelerator):
    """It counts what the library asks of it.

    Attributes:
        host: pieces of host memory.
        new: pieces of its own.
    """

    host = 0
    new = 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.host += 1
        return super().pinned(nbytes)

    def empty(self, nbytes: int, index: int, stream: Any) -> torch.Tensor:
        self.new += 1
        return super().empty(nbytes, index, stream)

    def forget(self) -> None:
        """Count from here."""
        self.host = self.new = self.copies = 0


@pytest.fixture(params=[0, 1])
def fake(request: pytest.FixtureRequest) -> Iterator[Watched]:
    fake = Watched(2, seed=request.param, ticks=(1, 9))
    with fake:
        yield fake


def sharing(workers: Company, obj: Any, into: dict[int, Any] | None = None) -> Callable[[int], Any]:
    """What each rank calls for a broadcast of w:0."""
    return lambda rank: workers[rank].broadcast(obj if rank == 0 else None, 0, into=(into or {}).get(rank))


async def nothing_left(workers: Company, fake: FakeAccelerator) -> None:
    """All memory of the device is free again, and the loans have been given back."""

    def free() -> bool:
        fake.step()
        sweep()
        gc.collect()
        links = [workers.workers[0]._table.peek(WorkerAddress(address)) for address in workers.addresses[1:]]
        lent = [link.sender.devices._loans for link in links if link is not None and link.sender.devices is not None]
        return not any(lent) and fake.memory(0)[0] == fake.memory(0)[1] and fake.memory(1)[0] == fake.memory(1)[1]

    await soon(free)
    gc.collect()  # what was cancelled may be held by its traceback, in a cycle
    await workers.all_is_free()


@pytest.mark.asyncio
async def test_one_copy_for_each_and_nothing_in_host_memory(fake: Watched) -> None:
    async with company(["", "", ""]) as workers:
        for number in range(3):
            weight = fake.late(VALUES + number, ticks=40)
            sent = {"w": weight, "tied": weight, "part": weight[10:20], "none": fake.tensor(VALUES[:0]), "step": number, "lr": VALUES[:3]}
            fake.forget()
            got = await workers.all(sharing(workers, sent))
            assert (fake.copies, fake.host) == (2 * 2, 0)  # two tensors with bytes, two members
            assert got[0] is sent
            for each in got[1:]:
                assert each["w"] is each["tied"]
                assert same(fake, each["w"], VALUES + number, "fake:0")
                assert same(fake, each["part"], VALUES[10:20] + number, "fake:0")
                assert same(fake, each["none"], VALUES[:0], "fake:0")
                assert same(fake, each["lr"], VALUES[:3], "cpu")
                assert each["step"] == number
            fake.write(weight, torch.zeros_like(VALUES))
            fake.write(got[1]["w"], torch.ones_like(VALUES))
            assert same(fake, got[2]["w"], VALUES + number, "fake:0"), "each has a copy of its own"
            del sent, weight, got, each
            await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_straight_into_the_tensors_that_are_there(fake: Watched) -> None:
    """Each behind what its own stream was given before, without fresh memory."""
    async with company(["", "", ""]) as workers:
        await check_straight_into(fake, workers)
        await nothing_left(workers, fake)


async def check_straight_into(fake: Watched, workers: Company) -> None:
    weight = fake.late(VALUES, ticks=40)
    sent = {"w": weight, "tied": weight, "lr": VALUES[:3].clone(), "bias": VALUES[:5].clone()}
    usual, other = fake.current_stream(0), fake.new_stream()

    def target() -> dict[str, torch.Tensor]:
        made = {name: fake.late(torch.zeros_like(VALUES), ticks=60) for name in ("w", "tied")}
        return {**made, "lr": torch.zeros_like(VALUES[:3]), "bias": fake.late(torch.zeros_like(VALUES[:5]), ticks=60)}

    fake.set_stream(other)  # whose work has to be over before the targets are written to
    targets = {rank: target() for rank in (1, 2)}
    fake.set_stream(usual)
    versions = [tensor._version for tensor in targets[1].values()]

    def call(rank: int) -> Any:
        fake.set_stream(other if rank else usual)
        work = sharing(workers, sent, targets)(rank)
        fake.set_stream(usual)
        return work

    fake.forget()
    got = await workers.all(call)
    assert fake.new == 0
    assert got[1] is targets[1]
    for each in targets.values():
        for name, values in (("w", VALUES), ("tied", VALUES), ("lr", VALUES[:3]), ("bias", VALUES[:5])):
            assert same(fake, each[name], values, str(each[name].device))
    assert all(tensor._version > version for tensor, version in zip(targets[1].values(), versions, strict=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cpu", "two devices"])
async def test_into_tensors_elsewhere(fake: Watched, how: str) -> None:
    """They get it through host memory, the other member does not."""
    async with company(["", "", ""]) as workers:
        sent = {"w": fake.late(VALUES, ticks=20), "v": fake.late(VALUES + 1, ticks=20)}
        other = {"w": torch.zeros_like(VALUES), "v": fake.tensor(torch.zeros_like(VALUES))}
        if how == "two devices":
            other["w"] = fake.late(torch.zeros_like(VALUES), index=1)
        got = await workers.all(sharing(workers, sent, {1: other}))
        assert same(fake, other["w"], VALUES.to(other["w"].dtype), str(other["w"].device))
        assert same(fake, other["v"], VALUES + 1, "fake:0")
        assert same(fake, got[2]["w"], VALUES, "fake:0")
        fake.forget()
        await workers.all(sharing(workers, sent))  # nothing was given up by that
        assert fake.host == 0
        del got, sent, other
        await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_into_tensors_of_another_type(fake: Watched) -> None:
    """They are converted on the way, on the device."""
    async with company(["", ""]) as workers:
        weight = fake.late((VALUES / 8).view(1000, 100), ticks=40)
        sent = {"w": weight, "v": weight[3], "n": fake.late(VALUES, ticks=40)}
        target = {
            "w": fake.late(torch.zeros(1000, 100, dtype=torch.bfloat16), ticks=60),
            "v": fake.late(torch.zeros(100, dtype=torch.float64), ticks=60),
            "n": fake.late(torch.zeros(VALUES.shape, dtype=torch.int64), ticks=60),
        }
        fake.forget()
        await workers.all(sharing(workers, sent, {1: target}))
        assert (fake.copies, fake.host, fake.new) == (3, 0, 0)
        assert same(fake, target["w"], (VALUES / 8).view(1000, 100).bfloat16(), "fake:0")
        assert same(fake, target["v"], (VALUES[300:400] / 8).double(), "fake:0")
        assert same(fake, target["n"], VALUES.long(), "fake:0")
        del sent, weight, target
        await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_what_does_not_fit(fake: Watched) -> None:
    async with company(["", ""]) as workers:
        target = {"v": fake.tensor(torch.zeros_like(VALUES))}
        outcomes = await workers.outcomes(sharing(workers, {"w": fake.late(VALUES)}, {1: target}))
        assert isinstance(outcomes[1], Mismatch)
        assert isinstance(outcomes[0], RemoteError)
        assert same(fake, target["v"], torch.zeros_like(VALUES), "fake:0")
        del target, outcomes
        await workers.check_works()
        await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_who_is_elsewhere_gets_it_otherwise(fake: Watched) -> None:
    """Another host, and a device that cannot read the root's."""
    fake.islands = True
    async with company(["a", "a", "b", "b", "a"], devices=["fake:0", "fake:0", "fake:0", "fake:1", "fake:1"]) as workers:
        for number in range(2):
            sent = {"w": fake.late(VALUES + number, ticks=30)}
            fake.forget()
            got = await workers.all(sharing(workers, sent))
            for each, device in zip(got[1:], ("fake:0", "fake:0", "fake:1", "fake:1"), strict=True):
                assert same(fake, each["w"], VALUES + number, device)
            assert fake.host
            del got, sent, each
            await nothing_left(workers, fake)


@pytest.mark.asyncio
async def test_another_device_that_reads_the_roots(fake: Watched) -> None:
    async with company(["", "", ""], devices=["fake:0", "fake:1", "fake:0"]) as workers:
        sent = [fake.late(VALUES, ticks=30), fake.late(VALUES + 1, index=1, ticks=30)]
        fake.forget()
        got = await workers.all(sharing(workers, sent))
        assert fake.host == 0
        for each, device in zip(got[1:], ("fake:1", "fake:0"), strict=True):
            assert same(fake, each[0], VALUES, device)
            assert same(fake, each[1], VALUES + 1, device)
        del got, sent, each
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("room", ["", "none"])
async def test_much_in_cpu_memory_goes_through_it_and_the_rest_does_not(fake: Watched, room: str) -> None:
    """By one copy for all, if there is room in the memory that they share; in pieces otherwise."""
    much = torch.arange(300_000, dtype=torch.int64)
    assert much.nbytes > device_loans.BESIDE_MAX_BYTES
    memory: dict[str, Any] = {"shared_memory": {"segment_bytes": 1 << 20, "max_bytes": 2 << 20}} if room else {}
    async with company(["", "", ""], **memory) as workers:
        for number in range(3):
            sent = {"w": fake.late(VALUES + number, ticks=30), "few": VALUES[:3], "much": much + number, "n": number}
            fake.forget()
            got = await workers.all(sharing(workers, sent))
            assert (fake.copies, fake.host) == (2, 0)
            for each in got[1:]:
                assert same(fake, each["w"], VALUES + number, "fake:0")
                assert same(fake, each["few"], VALUES[:3], "cpu")
                assert same(fake, each["much"], much + number, "cpu")
                assert each["n"] == number
                each["much"].zero_()  # it is his own
            del got, sent, each
            await nothing_left(workers, fake)
        target = {"w": fake.late(torch.zeros_like(VALUES), ticks=60), "much": torch.zeros_like(much)}
        sent = {"w": fake.late(VALUES, ticks=30), "much": much}
        fake.forget()
        await workers.all(sharing(workers, sent, {1: target}))
        assert (fake.copies, fake.host) == (2, 0)
        assert same(fake, target["w"], VALUES, "fake:0")
        assert same(fake, target["much"], much, "cpu")
        del target, sent
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["export", "open", "copy", "empty"])
async def test_much_in_cpu_memory_and_a_device_that_fails(fake: Watched, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What was on its way for those who read the device is let go of."""
    monkeypatch.setattr(device_loans, "BESIDE_MAX_BYTES", 100)
    async with company(["", "", ""]) as workers:
        fake.fail_next(call)
        for number in range(2):
            sent = [fake.late(VALUES + number, ticks=20), VALUES[:100] + number]
            got = await workers.all(sharing(workers, sent))
            for each in got[1:]:
                assert same(fake, each[0], VALUES + number, "fake:0")
                assert same(fake, each[1], VALUES[:100] + number, "cpu")
            del got, sent, each
            await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["stream", "shm"])
async def test_a_way_that_was_asked_for(fake: Watched, backend: str) -> None:
    async with company(["", ""], backend=backend) as workers:
        fake.forget()
        got = await workers.all(sharing(workers, [fake.late(VALUES)]))
        assert same(fake, got[1][0], VALUES, "fake:0")
        assert fake.host


@pytest.mark.asyncio
async def test_only_what_has_changed(fake: Watched) -> None:
    async with company(["", ""]) as workers:
        state = {"w": fake.late(VALUES), "v": fake.late(VALUES + 1)}
        into = {name: fake.tensor(torch.zeros_like(VALUES)) for name in state}
        for changed, copies in (("", 2), ("v", 1), ("w", 1)):
            if changed:
                state[changed].add_(5)
            fake.forget()

            def call(rank: int) -> Any:
                if rank:
                    return workers[rank].broadcast(None, 0, into=into)
                return workers[rank].broadcast(state, 0, changed_only=True)

            await workers.all(call)
            assert (fake.copies, fake.host) == (copies, 0)
            assert all(torch.equal(fake.read(into[name]), fake.read(state[name])) for name in state)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["export", "open", "copy", "empty"])
async def test_a_device_that_fails_on_the_way(fake: Watched, caplog: pytest.LogCaptureFixture, call: str) -> None:
    """Everybody has it all the same, and so later; it is told once for each link that is given up."""
    async with company(["", "", ""]) as workers:
        with caplog.at_level(logging.WARNING, "aiorlinf"):
            for number in range(3):
                sent = [fake.late(VALUES + number, ticks=20)]
                if not number:
                    fake.fail_next(call)
                got = await workers.all(sharing(workers, sent))
                for each in got[1:]:
                    assert same(fake, each[0], VALUES + number, "fake:0")
                del got, sent, each
                await nothing_left(workers, fake)
        lines = [record.getMessage() for record in caplog.records if "another way than cuda_ipc" in record.getMessage()]
        assert len(lines) == {"export": 2, "open": 1, "copy": 1, "empty": 0}[call]


@pytest.mark.asyncio
async def test_written_to_meanwhile(fake: Watched) -> None:
    """Nobody gets what is neither the old nor the new."""
    async with company(["", "", ""]) as workers:
        outcomes = await workers.outcomes(writing_to_it(fake, workers))
        assert isinstance(outcomes[0], UsageError)
        assert all(isinstance(outcome, RemoteError) and "was written to" in str(outcome) for outcome in outcomes[1:])
        del outcomes
        fake.faults.clear()  # it was no good program
        await workers.check_works()
        await nothing_left(workers, fake)


def writing_to_it(fake: Watched, workers: Company) -> Callable[[int], Any]:
    sent = fake.late(VALUES, ticks=30)

    def call(rank: int) -> Any:
        work = sharing(workers, [sent])(rank)
        if rank == 2:
            sent.add_(1)
        return work

    return call


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1])
async def test_cancelled_at_every_moment(fake: Watched, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with company(["", "", ""]) as workers:
        for turns in range(0, 24, 2):
            monkeypatch.setattr(device_loans, "BESIDE_MAX_BYTES", 100 if turns % 4 else 1 << 20)
            works = [sharing(workers, [fake.late(VALUES, ticks=20), VALUES[:100]])(rank) for rank in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            works[who].cancel()
            for work in works:
                with contextlib.suppress(AiorlinfError, asyncio.CancelledError):
                    await work
            works.clear()
            del work
            await workers.check_works()
        await nothing_left(workers, fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1])
async def test_a_member_that_leaves_in_the_middle(fake: Watched, who: int) -> None:
    fake.limbo = True
    for turns in range(0, 24, 4):
        async with company(["", "", ""]) as workers:
            await workers.check_works()
            works = [sharing(workers, [fake.late(VALUES, ticks=20)])(rank) for rank in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await workers.workers[who].close()
            for work in works:
                with contextlib.suppress(AiorlinfError, asyncio.CancelledError):
                    await work
            works.clear()
            del work

    def free() -> bool:
        fake.step()
        sweep()
        gc.collect()
        return fake.memory(0)[0] == fake.memory(0)[1]

    await soon(free)


@pytest.mark.asyncio
async def test_what_was_received_lives_as_long_as_it_is_used(fake: Watched) -> None:
    async with company(["", ""]) as workers:
        got = await workers.all(sharing(workers, [fake.late(VALUES)]))
        received = got[1][0]
        fake.launch("a use of it", fake.current_stream(0), lambda: None, reads=[received], ticks=1000)
        del got, received  # the device is not through with it, and nobody may get its memory before that
        gc.collect()


@pytest.mark.asyncio
async def test_targets_that_are_dropped_while_they_are_filled(fake: Watched) -> None:
    async with company(["", ""]) as workers:
        for turns in range(0, 30, 3):
            target = [fake.late(torch.zeros_like(VALUES), ticks=20)]
            sent = [fake.late(VALUES, ticks=20)]
            works = [sharing(workers, sent, {1: target})(rank) for rank in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            works[1].cancel()
            del target
            for work in works:
                with contextlib.suppress(AiorlinfError, asyncio.CancelledError):
                    await work
            works.clear()
            del work, sent
        await nothing_left(workers, fake)
