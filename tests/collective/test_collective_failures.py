"""When a member fails, everybody who waits hears of it, with its cause, and the next collective works."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import (
    ClosedError,
    DeadlineExceeded,
    Mismatch,
    NonContiguousTensor,
    PeerError,
    PeerLeft,
    PeerLost,
    RemoteError,
    UnsupportedObject,
    UsageError,
)
from tests import peers
from tests.collective.company import Company, company
from tests.system import soon


@pytest_asyncio.fixture(params=[["", "", ""], ["a", "b", "b"]], ids=["one host", "two hosts"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Company]:
    async with company(request.param) as made:
        yield made


STRIDED = torch.zeros(4, 4).t()


def calls(workers: Company, kind: str) -> Any:
    """What member `rank` calls, with this object as its part."""
    everybody = range(len(workers))

    def call(rank: int, obj: Any = None, **options: Any) -> Any:
        if kind == "broadcast":
            return workers[rank].broadcast(obj, 0, **options)
        if kind == "gather":
            return workers[rank].gather(obj, 0, **options)
        return workers[rank].all_to_all([obj for _ in everybody], **options)

    return call


KINDS = ["broadcast", "gather", "all_to_all"]


def check_remote(error: Any, member: str, kind: str) -> None:
    assert isinstance(error, RemoteError), repr(error)
    assert error.remote == member
    assert error.remote_type == kind


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_object_that_cannot_be_sent(workers: Company, kind: str) -> None:
    call = calls(workers, kind)
    bad = 0 if kind == "broadcast" else 1
    got = await workers.outcomes(lambda rank: call(rank, STRIDED if rank == bad else 5))
    for rank, error in enumerate(got):
        if rank == bad:
            assert isinstance(error, NonContiguousTensor)
        else:
            check_remote(error, f"w:{bad}", "NonContiguousTensor")
            assert "is not contiguous" in str(error)
    await workers.check_works()


class Stubborn(Exception):
    """Itself an error that no other process could rebuild: its constructor wants what pickle does not give."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


class Unwilling:
    """Raises as it is taken apart."""

    def __reduce__(self) -> Any:
        raise Stubborn(7, "no fuel")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_object_that_raises_as_it_is_taken_apart(workers: Company, kind: str) -> None:
    call = calls(workers, kind)
    bad = 0 if kind == "broadcast" else 1
    got = await workers.outcomes(lambda rank: call(rank, [1, Unwilling()] if rank == bad else 5))
    for rank, error in enumerate(got):
        assert "no fuel (7)" in str(error)
        if rank == bad:
            assert isinstance(error, UnsupportedObject)
        else:
            check_remote(error, f"w:{bad}", "UnsupportedObject")
    await workers.check_works()


class Touchy:
    """Can be pickled, but not everywhere be unpickled."""

    def __init__(self, pid: int = 0) -> None:
        self.armed = True

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise LookupError("not here")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100_000])
async def test_an_object_that_cannot_be_rebuilt(workers: Company, kind: str, size: int) -> None:
    call = calls(workers, kind)
    bad = 0 if kind == "broadcast" else 1
    got = await workers.outcomes(lambda rank: call(rank, [Touchy(), torch.zeros(size)] if rank == bad else 5))
    if kind == "all_to_all" and isinstance(got[bad], list):
        del got[bad]  # it had everything before the others could say
    assert all(isinstance(error, (UnsupportedObject, RemoteError)) for error in got), got
    assert all("LookupError: not here" in str(error) for error in got)
    await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", [0, 1])
async def test_a_member_cancels(workers: Company, kind: str, who: int) -> None:
    call = calls(workers, kind)
    # One has not called yet, so nobody can be done: but for those of a broadcast who have the object. The late one may get all there is
    # before it hears of the end.
    late = 2
    works = {rank: call(rank, rank) for rank in (0, 1) if not (kind == "broadcast" and who == 1 and rank == 0)}
    await asyncio.sleep(0)
    assert works[who].cancel()
    for rank in range(3):
        if rank not in works:
            works[rank] = call(rank, rank)
    got = await asyncio.wait_for(asyncio.gather(*(works[rank] for rank in range(3)), return_exceptions=True), 20)
    assert isinstance(got[who], asyncio.CancelledError)
    for rank in {0, 1, late} - {who}:
        if not (rank == late and kind != "gather" and got[rank] in (0, [0, 1, 2])):
            check_remote(got[rank], f"w:{who}", "CancelledError")
            assert f"w:{who} cancelled its part" in str(got[rank])
    await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_member_has_no_time(workers: Company, kind: str) -> None:
    call = calls(workers, kind)
    works = {rank: call(rank, rank, timeout=0.05 if rank == 0 else None) for rank in (0, 1)}
    with pytest.raises(DeadlineExceeded, match=r"nothing has come yet of .*w:2") as caught:
        await works[0]
    assert caught.value.operation == kind
    works[2] = call(2, 2, timeout=20)
    for rank in (1, 2):
        # Who has the object is done, and the late one may find all that it waits for.
        got: Any = (await asyncio.gather(works[rank], return_exceptions=True))[0]
        if (kind, rank, repr(got)) not in {("broadcast", 1, "0"), ("broadcast", 2, "0"), ("all_to_all", 2, "[0, 1, 2]")}:
            check_remote(got, "w:0", "DeadlineExceeded")
            assert "w:0 failed with DeadlineExceeded: not over within" in str(got)
    await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_error_of_a_limit_says_what_the_missing_member_waits_for(kind: str) -> None:
    """A new life that is past this call, say."""
    async with company(["", "", ""]) as workers:
        await workers.check_works()
        await workers.workers[2].close()
        async with init("w:2", config=workers.config) as again:
            workers.workers[2] = again
            await workers.check_works()
            elsewhere = again.recv("w:1", tag=5)
            call = calls(workers, kind)
            works = [call(rank, rank, timeout=1.5 if rank == 0 else 20) for rank in (0, 1)]
            with pytest.raises(DeadlineExceeded) as caught:
                await works[0]
            assert "nothing has come yet of w:2; w:2#2: it waits for recv from w:1 tag 5" in str(caught.value)
            await asyncio.gather(works[1], call(2, 2, timeout=20), return_exceptions=True)
            elsewhere.cancel()
            await workers.check_works()


@pytest.mark.asyncio
async def test_members_call_different_things(workers: Company) -> None:
    works = [workers[0].broadcast(1, 0), workers[1].gather(1, 0), workers[2].broadcast(None, 0)]
    got = await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 20)
    assert any(isinstance(error, Mismatch) for error in got[:2]), got
    assert all(isinstance(error, (Mismatch, RemoteError)) for error in got[:2]), got
    assert got[2] == 1 or isinstance(got[2], RemoteError)
    await workers.check_works()


@pytest.mark.asyncio
async def test_all_to_all_wants_one_for_each(workers: Company) -> None:
    wrong: Any = {1: [1, 2], 2: "abc"}
    got = await workers.outcomes(lambda rank: workers[rank].all_to_all([1, 2, 3] if rank == 0 else wrong[rank]))
    assert isinstance(got[0], RemoteError)
    assert [str(error.message) for error in got[1:]] == ["all_to_all got 2 objects for 3 members", "all_to_all got 3 objects for 3 members"]
    assert all(isinstance(error, UsageError) for error in got[1:])
    await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
async def test_errors_as_results(workers: Company, kind: str) -> None:
    call = calls(workers, kind)
    got = await workers.outcomes(lambda rank: call(rank, STRIDED if rank == 1 else f"of {rank}", return_exceptions=True))
    assert isinstance(got[1], NonContiguousTensor)
    for rank in (0, 2):
        if kind == "gather" and rank == 2:
            assert got[rank] is None
            continue
        assert got[rank][0] == "of 0"
        assert got[rank][2] == "of 2"
        check_remote(got[rank][1], "w:1", "NonContiguousTensor")
    await workers.check_works()


@pytest.mark.asyncio
async def test_what_the_root_cannot_rebuild_its_sender_hears_of(workers: Company) -> None:
    got = await workers.outcomes(lambda rank: workers[rank].gather(Touchy() if rank == 1 else rank, 0, return_exceptions=True))
    assert got[0][0] == 0
    assert isinstance(got[0][1], UnsupportedObject)
    assert got[0][2] == 2
    check_remote(got[1], "w:0", "UnsupportedObject")
    assert got[2] is None
    await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", [0, 2])
async def test_a_member_leaves(workers: Company, kind: str, who: int) -> None:
    await workers.check_works()
    call = calls(workers, kind)
    others = {0, 1, 2} - {who}
    works = {rank: call(rank, rank) for rank in others}
    await workers.workers[who].close()
    got = await asyncio.wait_for(asyncio.gather(*works.values(), return_exceptions=True), 20)
    for rank, error in zip(works, got, strict=True):
        if kind == "broadcast" and who == 2 and rank == 1:
            assert error == 0, "it has the object"
        else:
            assert isinstance(error, PeerLeft)
            assert error.remote == f"w:{who}"
    with pytest.raises(ClosedError):
        call(who, 1)
    await check_next_life(workers, who)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["not sendable", "cancelled at once"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_member_leaves_after_the_only_call_so_far_has_failed_before_it_began(kind: str, how: str) -> None:
    """That call was counted; with a next life of whom it was counted with it begins anew."""
    async with company(["a", "b"]) as workers:
        call = calls(workers, kind)
        caller, who = (0, 1) if kind == "broadcast" else (1, 0)
        if how == "not sendable":
            with pytest.raises(NonContiguousTensor):
                call(caller, STRIDED)
        else:
            await asyncio.wait_for(asyncio.to_thread(lambda: call(caller, 5).cancel()), 20)
            await asyncio.wrap_future(_turn(workers[caller]._circle.exchange.home))
        one, other = workers.workers[caller], workers.workers[who]
        await asyncio.wait_for(asyncio.gather(one.send(1, other.address), other.recv(one.address)), 20)  # there is a link
        await other.close()
        await check_next_life(workers, who)


def _turn(home: Any) -> Any:
    """Done when the home loop has come to what was handed over to it before."""
    done: Any = concurrent.futures.Future()
    home.call(done.set_result, None)
    return done


async def check_next_life(workers: Company, who: int) -> None:
    """A new life of the one that is gone is in step with the others at once."""
    async with init(f"w:{who}", config=workers.config) as again:
        workers.workers[who] = again
        await workers.check_works()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_closing_ends_what_is_under_way(kind: str) -> None:
    async with company(["", ""]) as workers:
        work = calls(workers, kind)(0, 1)
        await workers.workers[0].close()
        with pytest.raises(ClosedError):
            await work


@pytest.mark.asyncio
async def test_a_tensor_that_is_written_to_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with company(["", ""]) as workers:
        tensor = torch.zeros(1 << 20)
        works = [workers[rank].broadcast(tensor, 0) for rank in range(2)]
        submit = workers.workers[0].home.submit

        def writing(fn: Any, *args: Any) -> Any:
            tensor.add_(1)
            return submit(fn, *args)

        monkeypatch.setattr(workers.workers[0].home, "submit", writing)
        with pytest.raises(UsageError, match="was written to while it was being broadcast"):
            await works[0]
        with pytest.raises(RemoteError, match="written to"):
            await works[1]
        monkeypatch.undo()
        await workers.check_works()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_a_tensor_that_is_written_to_right_after_the_call(kind: str) -> None:
    """What arrives is what it was, or it is an error for all; new values never arrive as if they were those of the call."""
    async with company(["", ""]) as workers:
        giver = 1 if kind == "gather" else 0
        for first in range(2):  # with and without a link
            tensor = torch.zeros(1 << 17)
            works = [calls(workers, kind)(rank, tensor if rank == giver else None) for rank in range(2)]
            tensor.add_(1)
            outcomes = await asyncio.gather(*works, return_exceptions=True)
            assert isinstance(outcomes[giver], UsageError), (first, outcomes)
            assert "written to" in str(outcomes[giver])
            assert isinstance(outcomes[1 - giver], RemoteError)
        await workers.check_works()


# ---- processes that are killed


MEMBERS = [f"w:{rank}" for rank in range(4)]


async def _take_part(comm: Worker, kind: str, size: int) -> Any:
    """First one that works, then one in which somebody is killed; how long the error took from the kill on, and what it says of whom."""
    assert await comm.broadcast(None, members=MEMBERS, timeout=20) == "begin"
    begin = asyncio.get_running_loop().time()
    try:
        if kind == "broadcast":
            await comm.broadcast(None, members=MEMBERS)
        elif kind == "gather":
            await comm.gather(torch.zeros(size), members=MEMBERS)
        else:
            await comm.all_to_all([torch.zeros(size)] * len(MEMBERS), members=MEMBERS)
    except PeerError as error:
        told: Any = (type(error).__name__, error.remote)
    else:
        told = "value"
    survivors = [member for member in MEMBERS if member != "w:2"]
    assert await comm.broadcast(None, members=survivors, timeout=20) == "go on"
    return told, asyncio.get_running_loop().time() - begin


async def _be_killed(comm: Worker) -> None:
    assert await comm.broadcast(None, members=MEMBERS, timeout=20) == "begin"
    await comm.send("here", "w:0")
    await asyncio.sleep(60)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_member_is_killed_in_the_middle(kind: str) -> None:
    size = 1 << 20
    async with (
        init("w:0") as comm,
        peers.worker(comm, "w:1", _take_part, kind, size) as first,
        peers.worker(comm, "w:2", _be_killed) as victim,
        peers.worker(comm, "w:3", _take_part, kind, size) as last,
    ):
        await comm.broadcast("begin", members=MEMBERS, timeout=20)
        assert await comm.recv("w:2", timeout=20) == "here"
        call: Any = {
            "broadcast": lambda: comm.broadcast(torch.zeros(size), members=MEMBERS),
            "gather": lambda: comm.gather(torch.zeros(size), members=MEMBERS),
            "all_to_all": lambda: comm.all_to_all([torch.zeros(size)] * 4, members=MEMBERS),
        }[kind]
        work = call()
        operation = comm.collective.members(MEMBERS)._circle._operations
        await soon(lambda: [str(each.work.detail) for each in operation.values() if each.work] == ["waits for w:2"] * 3)
        os.kill(victim.pid, signal.SIGKILL)
        killed = asyncio.get_running_loop().time()
        with pytest.raises(PeerLost) as caught:
            await work.async_wait(20)
        assert caught.value.remote == "w:2"
        assert asyncio.get_running_loop().time() - killed < 3
        survivors = [member for member in MEMBERS if member != "w:2"]
        await comm.broadcast("go on", members=survivors, timeout=20)
        for peer in (first, last):
            told, _ = await peer.result()
            assert told == ("value" if kind == "broadcast" else ("PeerLost", "w:2"))
