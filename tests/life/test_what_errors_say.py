"""Whatever goes wrong between two workers, the error names both of them, the call and the tag."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from aiorlinf import AsyncWork
from aiorlinf.errors import (
    AiorlinfError,
    BackendUnavailable,
    DeadlineExceeded,
    Mismatch,
    PeerLeft,
    PeerLost,
    RemoteError,
    RendezvousError,
    UnsupportedObject,
)
from aiorlinf.testing.cluster import LocalCluster, local_cluster

__all__: list[str] = []

ONE, OTHER = "w:0", "w:1"
LARGE = torch.ones(100_000)


class Explosive:
    """Can be sent, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


Works = list[Awaitable[Any]]


async def errors_of(works: Works) -> list[BaseException]:
    """What each of them failed with."""
    async with asyncio.timeout(20):
        outcomes: list[Any] = list(await asyncio.gather(*works, return_exceptions=True))
    assert all(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
    return outcomes


def pending(cluster: LocalCluster, timeout: float | None = None) -> Works:
    """One of each kind, that the other side does nothing about."""
    one = cluster[ONE]
    return [
        one.recv(OTHER, tag=7, timeout=timeout),
        one.recv_tensor(torch.zeros(5), OTHER, tag=7, timeout=timeout),
        one.send(LARGE.repeat(1000), OTHER, tag=7, timeout=timeout),
        one.send_tensor(LARGE, OTHER, tag=7, timeout=timeout),
    ]


async def too_late(cluster: LocalCluster) -> list[BaseException]:
    return await errors_of(pending(cluster, 0.05))


async def it_leaves(cluster: LocalCluster) -> list[BaseException]:
    works = pending(cluster)
    await asyncio.sleep(0.02)
    await cluster.leave(OTHER)
    return [*await errors_of(works), *await errors_of(pending(cluster))]


async def it_is_killed(cluster: LocalCluster) -> list[BaseException]:
    works = pending(cluster)
    await asyncio.sleep(0.02)
    await cluster.kill(OTHER)
    return [*await errors_of(works), *await errors_of(pending(cluster))]


async def something_else_comes(cluster: LocalCluster) -> list[BaseException]:
    one, other = cluster[ONE], cluster[OTHER]
    return await errors_of([
        one.send_tensor(LARGE, OTHER, tag=7),
        other.recv_tensor(torch.zeros(3), ONE, tag=7),
        one.send(LARGE, OTHER, tag=7),
        other.recv_tensor(LARGE.clone(), ONE, tag=7),
    ])  # fmt: skip


async def it_cannot_be_rebuilt(cluster: LocalCluster) -> list[BaseException]:
    return await errors_of([cluster[ONE].send([Explosive(), LARGE], OTHER, tag=7), cluster[OTHER].recv(ONE, tag=7)])


async def it_is_written_to(cluster: LocalCluster) -> list[BaseException]:
    tensor = LARGE.clone()
    sending = cluster[ONE].send_tensor(tensor, OTHER, tag=7)
    tensor.add_(1)
    _of_his_own_tensor, received = await errors_of([sending, cluster[OTHER].recv_tensor(LARGE.clone(), ONE, tag=7)])
    return [received]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("scenario", "kinds"),
    [
        (too_late, DeadlineExceeded),
        (it_leaves, PeerLeft),
        (it_is_killed, PeerLost),
        (something_else_comes, Mismatch),
        (it_cannot_be_rebuilt, (UnsupportedObject, RemoteError)),
        (it_is_written_to, RemoteError),
    ],
    ids=lambda value: value.__name__ if callable(value) and not isinstance(value, type) else "",
)
@pytest.mark.parametrize("backend", ["stream", "shm", "gloo"])
@pytest.mark.asyncio
async def test_both_workers_the_call_and_the_tag(
    backend: Any, scenario: Callable[[LocalCluster], Awaitable[list[BaseException]]], kinds: Any
) -> None:
    async with local_cluster("w=2", backend=backend) as cluster:
        sent = cluster[ONE].send("hello", OTHER)
        assert await cluster[OTHER].recv(ONE, timeout=20) == "hello"
        await sent
        for error in await scenario(cluster):
            assert isinstance(error, kinds), repr(error)
            assert isinstance(error, AiorlinfError)
            assert error.operation in ("send", "recv", "send_tensor", "recv_tensor"), error
            for word in (ONE, OTHER, str(error.operation), "tag 7"):
                assert word in str(error), f"{word} is not in: {error}"


@pytest.mark.asyncio
async def test_who_never_came_and_who_waited() -> None:
    config = {"cluster": {"network": {"rendezvous_timeout_s": 0.2}}}
    async with local_cluster("w=1", config) as cluster:
        for error in await errors_of(pending(cluster)):
            assert isinstance(error, RendezvousError)
            for word in (ONE, OTHER, "tag 7"):
                assert word in str(error)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["broadcast", "gather", "all_to_all"])
@pytest.mark.parametrize("how", ["too late", "killed", "not sendable"])
@pytest.mark.asyncio
async def test_a_collective_names_who_failed_and_who_is_told(kind: str, how: str) -> None:
    async with local_cluster("w=3") as cluster:
        members = ["w:0", "w:1", "w:2"]
        bad = 0 if kind == "broadcast" else 1

        def call(rank: int, obj: Any = 1, timeout: float | None = 20) -> AsyncWork[Any]:
            worker = cluster[f"w:{rank}"]
            if kind == "broadcast":
                return worker.broadcast(obj if rank == 0 else None, members=members, timeout=timeout)
            if kind == "gather":
                return worker.gather(obj, members=members, timeout=timeout)
            return worker.all_to_all([obj] * 3, members=members, timeout=timeout)

        await asyncio.gather(*(call(rank) for rank in range(3)))
        teller = 2 if kind == "broadcast" else 0
        if how == "not sendable":
            work = call(teller)
            with pytest.raises(AiorlinfError):
                await call(bad, torch.zeros(4, 4).t())
            others = [call(rank) for rank in range(3) if rank not in (bad, teller)]
        else:
            work = call(teller, timeout=0.05 if how == "too late" else 20)
            others = [call(rank) for rank in range(3) if rank not in (bad, teller)]
            if how == "killed":
                await cluster.kill(f"w:{bad}")
        with pytest.raises(AiorlinfError) as caught:
            await work
        for other in others:  # of a broadcast each waits for its root alone
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for word in (kind, f"w:{bad}", f"w:{teller}"):
            assert word in str(caught.value), str(caught.value)


@pytest.mark.asyncio
async def test_a_way_that_is_required_and_cannot_be_had() -> None:
    config: dict[str, Any] = {"cluster": {"collective": {"backend": "shm", "fallback": False, "shared_memory": {"enabled": False}}}}
    async with local_cluster("w=2", config) as cluster:
        sent, got = await errors_of([cluster[ONE].send_tensor(LARGE, OTHER, tag=7), cluster[OTHER].recv_tensor(LARGE.clone(), ONE, tag=7)])
        assert isinstance(sent, BackendUnavailable)
        assert isinstance(got, (BackendUnavailable, RemoteError))
        for error in (sent, got):
            for word in (ONE, OTHER, "shm"):
                assert word in str(error), str(error)
