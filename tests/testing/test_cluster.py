"""A job in the process of the test: everything is real but the distance."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aiorlinf.errors import ClosedError, ConfigError, PeerLeft, PeerLost, RendezvousError, UsageError
from aiorlinf.testing.cluster import LocalCluster, local_cluster
from aiorlinf.testing.proxy import Plan
from tests.system import soon

__all__: list[str] = []

ONCE = {"cluster": {"network": {"reconnect_timeout_s": 0}}}
QUICK = {"cluster": {"network": {"heartbeat_timeout_s": 2.0, "rendezvous_timeout_s": 10.0}}}


async def trip(cluster: LocalCluster, one: str, other: str, value: object = "hello") -> object:
    sent = cluster[one].send(value, other)
    got = await cluster[other].recv(one, timeout=20)
    await sent
    return got


@pytest.mark.asyncio
async def test_workers_come_talk_and_go() -> None:
    async with local_cluster("rollout=2,trainer=1") as cluster:
        assert [str(worker.address) for worker in cluster] == ["rollout:0", "rollout:1", "trainer:0"]
        assert await trip(cluster, "rollout:0", "trainer:0") == "hello"
        pending = cluster["trainer:0"].recv("rollout:0")
        await cluster.leave("rollout:0")
        with pytest.raises(PeerLeft):
            await pending
        assert len(cluster) == 2
        for use in (cluster.leave, cluster.kill):
            with pytest.raises(KeyError, match=r"no worker rollout:0 .*there are: rollout:1, trainer:0"):
                await use("rollout:0")
        with pytest.raises(KeyError, match="there are: rollout:1, trainer:0"):
            cluster["rollout:0"]
        again = await cluster.join("rollout:0")
        assert again.incarnation == 2
        assert await trip(cluster, "rollout:0", "rollout:1") == "hello"


@pytest.mark.asyncio
async def test_one_that_is_killed_is_lost_to_the_others() -> None:
    async with local_cluster(["a:0", "b:0"], QUICK) as cluster:
        assert await trip(cluster, "a:0", "b:0") == "hello"
        victim = cluster["b:0"]
        pending = [cluster["a:0"].recv("b:0", tag=tag) for tag in range(5)]
        own = victim.recv("a:0")
        await cluster.kill("b:0")
        for work in pending:
            with pytest.raises(PeerLost):
                await work
        with pytest.raises(ClosedError, match="the test has killed this worker"):
            await own
        waiting = cluster["a:0"].wait_for("b:0", 20)
        await cluster.join("b:0")
        assert (await waiting).incarnation == 2
        assert await trip(cluster, "a:0", "b:0") == "hello"


@pytest.mark.asyncio
async def test_a_worker_on_a_loop_of_its_own_can_be_killed_too() -> None:
    async with local_cluster(["a:0"], QUICK) as cluster:
        await cluster.join("b:0", loop="thread")
        assert await trip(cluster, "a:0", "b:0") == "hello"
        pending = cluster["a:0"].recv("b:0")
        await cluster.kill("b:0")
        with pytest.raises(PeerLost):
            await pending


@pytest.mark.asyncio
async def test_the_manager_is_killed_and_comes_back() -> None:
    async with local_cluster("w=2", QUICK) as cluster:
        assert await trip(cluster, "w:0", "w:1") == "hello"
        await cluster.kill_manager()
        await cluster.kill_manager()
        assert not cluster.manager.running
        await soon(lambda: cluster["w:0"].manager_away)
        assert await trip(cluster, "w:0", "w:1", 7) == 7
        await cluster.start_manager()
        with pytest.raises(UsageError, match="runs already"):
            await cluster.start_manager()
        await soon(lambda: not cluster["w:0"].manager_away)
        assert [str(peer) for peer in await cluster["w:0"].peers()] == ["w:1#1"]


@pytest.mark.asyncio
async def test_two_jobs_at_once_know_nothing_of_each_other() -> None:
    async with local_cluster("w=1", {"cluster": {"collective": {"backend": "stream"}}}) as one, local_cluster("w=1") as other:
        assert one["w:0"].config != other["w:0"].config
        assert one["w:0"].job == other["w:0"].job
        assert await one["w:0"].peers() == ()
        assert await other["w:0"].peers() == ()


@pytest.mark.asyncio
async def test_a_channel_is_held_here() -> None:
    async with local_cluster("w=2") as cluster:
        await cluster.hold_channels("traj")
        put = await cluster["w:0"].create_channel("traj", maxsize=4)
        get = await cluster["w:1"].connect_channel("traj")
        await put.put(torch.arange(5))
        assert (await get.get()).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_a_channel_worker_in_a_process_of_its_own_ends_with_the_cluster() -> None:
    async with local_cluster("w=1") as cluster:
        channel = await cluster["w:0"].create_channel("traj")
        await channel.put(1)
        assert await channel.get() == 1


@pytest.mark.asyncio
async def test_what_cannot_be_is_said_at_the_call() -> None:
    for wrong in ("rollout", {"w": 0}, ["w:0", "w:0"], ["w"]):
        with pytest.raises(UsageError):
            local_cluster(wrong)
    with pytest.raises(ConfigError):
        local_cluster("w=1", {"cluster": {"nothing": 1}})
    async with local_cluster("w=2", closed=True, config=QUICK) as cluster:
        with pytest.raises(UsageError, match="one worker, not two"):
            cluster.between("w:0", "w:0")
        cluster.between("w:0", "w:1")
        with pytest.raises(UsageError, match="already"):
            cluster.between("w:1", "w:0")
        with pytest.raises(UsageError, match="x:0 is not a worker of this job"):
            await cluster["w:0"].send(1, "x:0")


@pytest.mark.asyncio
async def test_a_start_that_fails_leaves_nothing() -> None:
    taken = local_cluster(["w:0"], QUICK)
    async with taken:
        with pytest.raises(RendezvousError, match="registered already"):
            await taken.join("w:0")


# ---- a proxy between them


@pytest.mark.asyncio
async def test_everything_goes_through_the_proxy() -> None:
    async with local_cluster("w=2", backend="stream") as cluster:
        proxy = cluster.between("w:0", "w:1")
        tensor = torch.arange(300_000)
        got = await trip(cluster, "w:0", "w:1", tensor)
        assert torch.equal(got, tensor)  # type: ignore[arg-type]  # a tensor
        await soon(lambda: proxy.connections == 1)  # both may have connected at once; then one of the two was given up
        assert proxy.carried > tensor.nbytes


@pytest.mark.asyncio
async def test_a_link_that_is_cut_goes_on() -> None:
    async with local_cluster("w=2", backend="stream") as cluster:
        proxy = cluster.between("w:0", "w:1", Plan(cut_after=500_000), Plan())
        tensor = torch.arange(300_000)
        got = await trip(cluster, "w:0", "w:1", tensor)  # it is cut in the middle of that
        assert torch.equal(got, tensor)  # type: ignore[arg-type]  # a tensor
        assert proxy.connections == 0, "where the other one is, both know by now without the manager"


@pytest.mark.asyncio
async def test_a_link_that_is_cut_and_may_not_go_on_is_lost_and_made_anew() -> None:
    async with local_cluster("w=2", ONCE, backend="stream") as cluster:
        proxy = cluster.between("w:0", "w:1")
        assert await trip(cluster, "w:0", "w:1") == "hello"
        await soon(lambda: proxy.connections == 1)
        accepted = proxy.accepted
        pending = cluster["w:0"].recv("w:1")
        assert proxy.cut() == 1
        with pytest.raises(PeerLost):
            await pending
        assert await trip(cluster, "w:1", "w:0") == "hello"
        assert proxy.accepted > accepted


@pytest.mark.asyncio
async def test_a_link_that_is_cut_in_the_middle_of_a_message() -> None:
    async with local_cluster("w=2", ONCE, backend="stream") as cluster:
        cluster.between("w:0", "w:1", Plan(cut_after=500_000), Plan())
        work = cluster["w:0"].send(torch.zeros(1 << 20), "w:1")
        receive = cluster["w:1"].recv("w:0")
        for each in (work, receive):
            with pytest.raises(PeerLost):
                await each
        assert await trip(cluster, "w:0", "w:1") == "hello"


@pytest.mark.asyncio
async def test_what_is_held_is_slow_and_not_lost() -> None:
    async with local_cluster("w=2", QUICK, backend="stream") as cluster:
        proxy = cluster.between("w:0", "w:1")
        assert await trip(cluster, "w:0", "w:1") == "hello"
        proxy.hold()
        work = asyncio.ensure_future(trip(cluster, "w:0", "w:1", "later"))
        await asyncio.sleep(2.5)  # longer than silence may be: it is the worker that must not be silent, not the link
        assert not work.done()
        proxy.go_on()
        assert await work == "later"


@pytest.mark.asyncio
async def test_a_peer_that_cannot_be_reached_is_said_to_be_so() -> None:
    config = {"cluster": {"network": {"rendezvous_timeout_s": 1.0}}}
    async with local_cluster("w=2", config) as cluster:
        cluster.between("w:0", "w:1", Plan(refuse=True))
        with pytest.raises(RendezvousError, match="could not connect"):
            await cluster["w:0"].send(1, "w:1")
