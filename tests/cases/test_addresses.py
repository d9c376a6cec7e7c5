"""Ports, addresses and interfaces: section B of the cases; where it takes two hosts, on two network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import LinkStats, Worker, init, load_config, wait_all
from aiorlinf.errors import AiorlinfError, AuthenticationError, ConfigError, PeerLost, RendezvousError
from aiorlinf.manager.service import ManagerService
from tests import peers
from tests.namespaces import Host, two_hosts

TOKEN = "secret of this test"


# ---- two hosts


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces, or a skip."""
    with two_hosts() as pair:
        yield pair


def run_manager(pipe: peers.Pipe, host: str, port: int, collective: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    async def main() -> None:
        config = load_config({"cluster": {"collective": dict(collective), "network": dict(network)}})
        manager = ManagerService(config=config, token=TOKEN.encode())
        await manager.start(host, port)
        pipe.say(manager.address)
        await asyncio.sleep(60)

    asyncio.run(main())


@contextlib.contextmanager
def manager_on(
    host: Host,
    *,
    at: str | None = None,
    port: int = 0,
    hosts: str = "",
    collective: Mapping[str, Any] | None = None,
    **network: Any,
) -> Iterator[str]:
    """A job's manager on this host; its address. The rest is the job's configuration."""
    with peers.process(run_manager, at or host.address, port, collective or {}, network, prepare=host.enter(hosts)) as peer:
        yield peer.wait_hear()


async def converse(comm: Worker, other: str) -> dict[str, Any]:
    """Objects and tensors, small and large, both ways; how they went."""
    for number in range(3):
        works = [comm.send([number, torch.full((100_000,), float(number))], other), comm.send_tensor(torch.ones(5), other, tag=1)]
        got = await comm.recv(other, timeout=20)
        assert got[0] == number
        assert (got[1] == number).all()
        assert (await comm.recv_tensor(torch.zeros(5), other, tag=1, timeout=20)).sum() == 5
        await wait_all(works)
    (stats,) = comm.stats().links
    await comm.send("done", other)  # nobody leaves before the other has looked, too
    await comm.recv(other, timeout=20)
    return described(stats)


def described(stats: LinkStats) -> dict[str, Any]:
    return {"backend": stats.backend, "reason": stats.reason, "address": stats.address, "around": stats.around_bytes_sent}


def outcome_of(pipe: peers.Pipe, loop: Any, function: Any, other: str) -> Any:
    """As `converse`, or the error that ends it."""
    try:
        return peers.run_worker(pipe, loop, None, function, (other,))
    except AiorlinfError as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def two_workers(
    hosts: tuple[Host, Host],
    manager: str,
    *,
    loop: Any = "asyncio",
    etc_hosts: tuple[str, str] = ("", ""),
    managers: tuple[str, str] | None = None,
) -> Iterator[list[peers.Peer]]:
    """`a:0` and `b:0` on the two hosts, in conversation."""
    with contextlib.ExitStack() as stack:
        started = []
        for index, (host, address, other) in enumerate(zip(hosts, ("a:0", "b:0"), ("b:0", "a:0"), strict=True)):
            env = {
                "AIORLINF_ADDRESS": address,
                "AIORLINF_MANAGER": managers[index] if managers else manager,
                "AIORLINF_TOKEN": TOKEN,
            }
            started.append(
                stack.enter_context(peers.process(outcome_of, loop, converse, other, env=env, prepare=host.enter(etc_hosts[index])))
            )
        yield started


def ip_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_host_whose_name_means_loopback(hosts: tuple[Host, Host], loop: Any) -> None:
    """Both names resolve to 127.0.1.1, as distributions set it up; no setting is needed, and Gloo carries what is large."""
    a, b = hosts
    names = tuple(f"127.0.1.1 {host.name}\n" for host in hosts)
    with manager_on(a, hosts=names[0]) as manager, two_workers(hosts, manager, loop=loop, etc_hosts=names) as workers:  # type: ignore[arg-type]
        first, second = (worker.wait_result() for worker in workers)
    assert ip_of(first["address"]) == b.address
    assert ip_of(second["address"]) == a.address
    for stats in (first, second):
        assert stats["backend"] == "gloo"
        assert "different hosts" in stats["reason"]
        assert stats["around"] == 3 * 400_000


def test_an_interface_that_the_peer_cannot_reach(hosts: tuple[Host, Host]) -> None:
    """A bridge of a container engine comes first among the interfaces, and the host's name means its address."""
    a, b = hosts
    for host in hosts:
        host.run("ip link add br0 type veth peer name br1 && ip addr add 172.17.0.1/16 dev br0 && ip link set br0 up && ip link set br1 up")
    names = tuple(f"172.17.0.1 {host.name}\n" for host in hosts)
    with manager_on(b) as manager, two_workers(hosts, manager, etc_hosts=names) as workers:  # type: ignore[arg-type]
        first, second = (worker.wait_result() for worker in workers)
    assert (ip_of(first["address"]), ip_of(second["address"])) == (b.address, a.address)
    # With the bridge excluded by name, in the syntax that Gloo alone does not understand.
    with manager_on(b, interface="^lo,br0,br1") as manager, two_workers(hosts, manager) as workers:
        first, second = (worker.wait_result() for worker in workers)
    assert (first["backend"], second["backend"]) == ("gloo", "gloo")
    with manager_on(b, interface="ib0") as manager, two_workers(hosts, manager) as workers:
        for worker in workers:
            said = worker.wait_result()
            assert said.startswith("ConfigError: cluster.network.interface")
            for name in ("ib0", "br0", "eth0", "lo"):
                assert name in said


def test_only_a_range_of_ports_is_open(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    for host in hosts:
        try:
            host.let_in("20000-20010")
        except RuntimeError as error:
            pytest.skip(f"no packets can be dropped by port here: {error}")
    with manager_on(a, port=20000, port_range=[20001, 20010]) as manager, two_workers(hosts, manager) as workers:
        for worker in workers:
            stats = worker.wait_result()
            assert stats["backend"] == "stream"
            assert "port_range" in stats["reason"]
    # Without the range the rendezvous works and the data port does not: the error names it, soon.
    with manager_on(a, port=20000, connect_timeout_s=0.3, rendezvous_timeout_s=1.0) as manager, two_workers(hosts, manager) as workers:
        told = [worker.wait_result() for worker in workers]
    # Who is second may learn only that the first has given up.
    assert all(text.startswith(("RendezvousError", "PeerLeft")) for text in told), told
    assert any(
        "no answer within 0.3 s" in text and f"{address}:" in text for text, address in zip(told, (b.address, a.address), strict=True)
    ), told


def talk_then_ask(pipe: peers.Pipe, other: str) -> Any:
    """A small message both ways; then, when the test says so, a large one. What became of that, and how it went."""

    async def main() -> Any:
        async with init() as comm:
            await comm.send("small", other)
            assert await comm.recv(other, timeout=20) == "small"
            pipe.say(comm.stats().links[0].address)
            await asyncio.to_thread(pipe.hear)
            sending, receiving = comm.send(torch.ones(100_000), other), comm.recv(other, timeout=20)
            outcomes: list[Any] = list(await asyncio.gather(sending, receiving, return_exceptions=True))
            (stats,) = comm.stats().links
            await comm.send("done", other)
            assert await comm.recv(other, timeout=20) == "done"
            said = [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes if isinstance(outcome, AiorlinfError)]
            return said or int(outcomes[1].sum()), described(stats)

    return asyncio.run(main())


@pytest.mark.parametrize("required", [False, True])
def test_gloo_cannot_connect(hosts: tuple[Host, Host], required: bool) -> None:
    """The link is there, but the ports that Gloo chose are closed: the message arrives over the link, unless that is not wanted."""
    a, b = hosts
    env = {"AIORLINF_TOKEN": TOKEN}
    collective: dict[str, Any] = {"backend": "gloo", "fallback": False} if required else {}
    with contextlib.ExitStack() as stack:
        env["AIORLINF_MANAGER"] = manager = stack.enter_context(manager_on(a, collective=collective, connect_timeout_s=0.5))
        workers = [
            stack.enter_context(peers.process(talk_then_ask, other, env={**env, "AIORLINF_ADDRESS": address}, prepare=host.enter()))
            for host, address, other in ((a, "a:0", "b:0"), (b, "b:0", "a:0"))
        ]
        ports = [worker.wait_hear().rpartition(":")[2] for worker in workers]
        for host in hosts:
            try:
                host.let_in(*ports, manager.rpartition(":")[2])
            except RuntimeError as error:
                pytest.skip(f"no packets can be dropped by port here: {error}")
        for worker in workers:
            worker.say("go on")
        for worker in workers:
            outcome, stats = worker.wait_result()
            assert stats["around"] == 0
            if required:
                sending, receiving = outcome
                assert sending.startswith("BackendUnavailable: send: the pair cannot be made: gloo: ")
                assert receiving.startswith("RemoteError: recv: the sender failed")
                assert "cannot be made" in receiving
                continue
            assert outcome == 100_000
            # It is told once, with the reason, and can be seen.
            assert stats["backend"] == "stream"
            assert stats["reason"].startswith("gloo was chosen, but the pair cannot be made")
            assert worker.said_on_stderr().count("go over their link from now on") == 1


def hold_port(pipe: peers.Pipe, port: int) -> None:
    with socket.create_server(("", port)):
        pipe.say("held")
        pipe.hear()


def test_the_port_is_taken_on_one_host_only(hosts: tuple[Host, Host]) -> None:
    """Who binds is who chooses: no other host can know which ports are free."""
    a, b = hosts
    with peers.process(hold_port, 21000, prepare=a.enter()) as holder:
        assert holder.wait_hear() == "held"
        with manager_on(b, port=20999, port_range=[21000, 21003]) as manager:
            env = {"AIORLINF_TOKEN": TOKEN, "AIORLINF_MANAGER": manager}
            with (
                peers.process(talk_then_ask, "b:0", env={**env, "AIORLINF_ADDRESS": "a:0"}, prepare=a.enter()) as one,
                peers.process(talk_then_ask, "a:0", env={**env, "AIORLINF_ADDRESS": "b:0"}, prepare=b.enter()) as other,
            ):
                one.wait_hear()
                other.wait_hear()
                assert 21001 in a.listening_ports()
                assert {20999, 21000} <= b.listening_ports()
                for peer in (one, other):
                    peer.say("go on")
                for peer in (one, other):
                    peer.wait_result()


def test_a_name_with_an_ipv6_answer_on_hosts_without_ipv6(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    for host in hosts:
        host.run("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
    names = f"fd77::1 the-manager\n{a.address} the-manager\n"
    with manager_on(a, port=20000), two_workers(hosts, "the-manager:20000", etc_hosts=(names, names)) as workers:
        for worker in workers:
            assert worker.wait_result()["backend"] == "gloo"


def test_hosts_that_have_only_ipv6(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    for host in hosts:
        host.run(f"ip addr flush dev eth0 && ip -6 addr add {host.address6}/64 dev eth0 nodad && ip link set eth0 up")
    with manager_on(a, at=a.address6) as manager, two_workers(hosts, manager) as workers:
        assert manager.startswith("[fd77::1]:")
        first, second = (worker.wait_result() for worker in workers)
    assert ip_of(first["address"]) == b.address6
    assert ip_of(second["address"]) == a.address6
    assert first["backend"] == "gloo"


def send_when_told(pipe: peers.Pipe, other: str) -> list[str]:
    """How each attempt goes."""

    async def main() -> list[str]:
        said = []
        async with init() as comm:
            for word in ("joined", "tried"):
                pipe.say(word)
                await asyncio.to_thread(pipe.hear)
                try:
                    await comm.send("x", other, timeout=20)
                except AiorlinfError as error:
                    said.append(f"{type(error).__name__}: {error}")
                else:
                    said.append("sent")
        return said

    return asyncio.run(main())


def get_one(pipe: peers.Pipe) -> Any:
    """From whoever connects; it does not connect itself."""

    async def main() -> Any:
        async with init() as comm, comm.inbox() as inbox:
            pipe.say("joined")
            return await inbox.recv(timeout=20)

    return asyncio.run(main())


def test_no_local_port_left_is_not_the_peers_fault(hosts: tuple[Host, Host]) -> None:
    """Every port that a connection could leave from is taken: that is said, and it is over when there is one again."""
    a, b = hosts
    ports = "/proc/sys/net/ipv4/ip_local_port_range"
    before = a.run(f"cat {ports}").strip()
    with manager_on(a) as manager, contextlib.ExitStack() as stack:
        env = {"AIORLINF_TOKEN": TOKEN, "AIORLINF_MANAGER": manager}
        getter = stack.enter_context(peers.process(get_one, env={**env, "AIORLINF_ADDRESS": "b:0"}, prepare=b.enter()))
        sender = stack.enter_context(peers.process(send_when_told, "b:0", env={**env, "AIORLINF_ADDRESS": "a:0"}, prepare=a.enter()))
        assert getter.wait_hear() == sender.wait_hear() == "joined"
        with peers.process(hold_port, 40000, prepare=a.enter()) as holder:
            assert holder.wait_hear() == "held"
            try:
                a.run(f"echo 40000 40000 > {ports}")
            except RuntimeError as error:
                pytest.skip(f"the ports of a host cannot be bounded here: {error}")
            sender.say("try")
            assert sender.wait_hear() == "tried"
            a.run(f"echo {before} > {ports}")
        sender.say("try again")
        first, second = sender.wait_result()
        assert first.startswith("LinkError: send: b:0 cannot be reached: this host has no such address, or no local port left"), first
        assert second == "sent"
        assert getter.wait_result() == ("a:0", "x")


def test_loopback_is_not_told_to_another_host(hosts: tuple[Host, Host]) -> None:
    """`a` came to the manager over loopback, so its address means nothing to `b`, which is told so and what to set."""
    a, _ = hosts
    with manager_on(a, at="0.0.0.0", rendezvous_timeout_s=2.0) as manager:
        port = manager.rpartition(":")[2]
        with two_workers(hosts, manager, managers=(f"127.0.0.1:{port}", f"{a.address}:{port}")) as workers:
            told = workers[1].wait_result()
    if isinstance(told, dict):  # a reached b first: one connection is enough
        assert ip_of(told["address"]) == a.address
    else:
        assert told.startswith("RendezvousError")
        assert "127.0.0.1 only, which leads nowhere" in told
        assert "advertise_host" in told


def test_a_worker_behind_loopback_is_told_of_by_the_setting(hosts: tuple[Host, Host]) -> None:
    """The one setting that overrides what the live connection says."""
    a, b = hosts
    with manager_on(a, at="0.0.0.0", advertise_host=a.address, bind_host="0.0.0.0") as manager:
        port = manager.rpartition(":")[2]
        assert manager == f"{a.address}:{port}"
        env = {"AIORLINF_TOKEN": TOKEN}
        with (
            peers.process(
                answer, env={**env, "AIORLINF_ADDRESS": "a:0", "AIORLINF_MANAGER": f"127.0.0.1:{port}"}, prepare=a.enter()
            ) as one,
            peers.process(ask, env={**env, "AIORLINF_ADDRESS": "b:0", "AIORLINF_MANAGER": manager}, prepare=b.enter()) as other,
        ):
            assert other.wait_result() == "answer"
            one.wait_result()


def answer(_pipe: peers.Pipe) -> None:
    """Never dials: it waits until somebody has come."""

    async def main() -> None:
        async with init() as comm:
            async for sender, _ in comm.inbox():
                await comm.send("answer", sender)
                break

    asyncio.run(main())


def ask(_pipe: peers.Pipe) -> Any:
    async def main() -> Any:
        async with init() as comm:
            await comm.send("question", "a:0")
            return await comm.recv("a:0", timeout=20)

    return asyncio.run(main())


# ---- one host


@pytest_asyncio.fixture
async def as_two_hosts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Worker, Worker]]:
    """Two workers of this process that think they are on different hosts: TCP between them, and Gloo."""
    workers = []
    for name in ("a:0", "b:0"):
        monkeypatch.setenv("AIORLINF_HOST_ID", f"host of {name}")
        workers.append(await init(name))
    yield workers[0], workers[1]
    for worker in workers:
        await worker.close()


def sockets_of(ports: set[int]) -> list[str]:
    """The states of this host's TCP sockets that have one of these ports."""
    states = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if ports & {int(columns[side].rpartition(":")[2], 16) for side in (1, 2)}:
            states.append(columns[3])
    return states


@pytest.mark.asyncio
async def test_messages_share_one_connection(as_two_hosts: tuple[Worker, Worker]) -> None:
    """Thousands of small messages: no connection for each, nothing left in TIME_WAIT."""
    a, b = as_two_hosts
    sending = a.send(0, "b:0")
    await b.recv("a:0")
    await sending
    (stats,) = a.stats().links
    assert stats.address is not None
    ports = {int(link.address.rpartition(":")[2]) for worker in (a, b) for link in worker.stats().links if link.address}
    before = sockets_of(ports)

    async def drain() -> None:
        for number in range(5000):
            assert await b.recv("a:0") == number

    task = asyncio.create_task(drain())
    for number in range(5000):
        await a.send(number, "b:0")
    await task
    assert sockets_of(ports) == before
    assert a.stats().links[0].backend == "gloo"


async def join_and_greet(comm: Worker, group: str, count: int) -> list[int]:
    """Many workers of one process join at once, and all of them talk to `a:0` at once."""
    others = [init(f"{group}:{number}") for number in range(1, count)]
    workers = [comm, *others]
    sends = [worker.send(str(worker.address), "a:0") for worker in workers]
    greetings = [worker.recv("a:0", timeout=20) for worker in workers]
    await wait_all(sends)
    numbers = await wait_all(greetings)
    for worker in others:
        await worker.close()
    return list(numbers)


@pytest.mark.parametrize("hosts_differ", [False, True])
@pytest.mark.asyncio
async def test_everybody_connects_at_the_same_moment(hosts_differ: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides dial each other: each pair ends with one connection, nothing is lost, nobody complains."""
    count = 20
    addresses = [f"{group}:{number}" for group in ("b", "c") for number in range(count)]
    async with init("a:0") as a:
        sends = [a.send(number, address) for number, address in enumerate(addresses)]
        async with contextlib.AsyncExitStack() as stack:
            others = []
            for group, loop in (("b", "asyncio"), ("c", "uvloop")):
                if hosts_differ:
                    monkeypatch.setenv("AIORLINF_HOST_ID", f"host of {group}")
                env = {**a.env(f"{group}:0"), **({"AIORLINF_HOST_ID": f"host of {group}"} if hosts_differ else {})}
                others.append(stack.enter_context(peers.process(peers.run_worker, loop, None, join_and_greet, (group, count), env=env)))
            greetings = [a.recv(address, timeout=20) for address in addresses]
            assert await wait_all(greetings) == addresses
            await wait_all(sends)
            assert len(a.stats().links) <= len(addresses)
            assert await others[0].result() == list(range(count))
            assert await others[1].result() == list(range(count, 2 * count))
            for other in others:
                assert "refused" not in other.said_on_stderr()
                assert "Traceback" not in other.said_on_stderr()


async def one_life(comm: Worker) -> None:
    """Answers until it is killed, each time with which life this is."""
    while True:
        await comm.send([await comm.recv("a:0"), comm.incarnation], "a:0")


@pytest.mark.parametrize("backend", ["stream", "shm", "gloo"])
@pytest.mark.asyncio
async def test_an_address_that_lives_again(backend: Any) -> None:
    """Killed and started anew, three times: nothing of an earlier life's rendezvous is in the way of the next one."""
    async with init("a:0", backend=backend) as a:
        for life in (1, 2, 3):
            async with peers.worker(a, "b:0", one_life, backend=backend) as peer:
                await joined(a, "b:0", life)
                for number in range(2):
                    sending = a.send(torch.full((100_000,), float(number)), "b:0")
                    got, incarnation = await a.recv("b:0", timeout=20)
                    assert (got == number).all()
                    assert incarnation == life
                    await sending
                pending = a.recv("b:0")
                await asyncio.sleep(0)
                peer.kill()
                with pytest.raises(PeerLost, match=f"b:0#{life}"):
                    await pending.async_wait(20)


async def joined(comm: Worker, address: str, life: int) -> None:
    """Until the manager knows this life of a worker: before that, the earlier one is what a call meets."""
    client = comm._manager
    assert client is not None
    while not any(record.address == address and record.incarnation == life for record in await client.workers()):
        await asyncio.sleep(0.01)


def test_one_group_however_many_ask_for_it_at_once() -> None:
    with init("a:0") as a, init("b:0") as b:
        made = []
        start = threading.Barrier(50)

        def make() -> None:
            start.wait(10)
            made.append(a.collective.create_collective_group(["a:0", "b:0"], "one"))

        threads = [threading.Thread(target=make) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(made) == 50
        assert len(set(map(id, made))) == 1
        sending = made[0].send("x")
        assert b.collective.create_collective_group(["b:0", "a:0"], "one").recv().wait(20) == "x"
        sending.wait(20)


@pytest.mark.asyncio
async def test_fifty_groups_at_once() -> None:
    async with init("a:0") as a, init("b:0") as b:

        async def use(number: int) -> None:
            one, other = (worker.collective.create_collective_group(["a:0", "b:0"], f"group {number}") for worker in (a, b))
            sending = one.send([number, torch.ones(50_000)])
            assert (await other.recv(timeout=20))[0] == number
            await sending

        await asyncio.gather(*(use(number) for number in range(50)))
        assert len(a.stats().links) == 1


@pytest.mark.asyncio
async def test_two_jobs_with_the_same_names(complaints: list[str]) -> None:
    """Neither job's workers get into the other, by its manager's address or by a worker's."""
    one, two = (ManagerService(config=load_config(None), token=token, job=job) for token, job in ((b"one", "job-1"), (b"two", "job-2")))
    await one.start()
    await two.start()
    try:
        async with (
            init("a:0", manager=one.address, token="one") as a1,
            init("b:0", manager=one.address, token="one") as b1,
            init("a:0", manager=two.address, token="two") as a2,
            init("b:0", manager=two.address, token="two") as b2,
        ):
            for a, b, text in ((a1, b1, "of one"), (a2, b2, "of two")):
                sending = a.send(text, "b:0")
                assert await b.recv("a:0", timeout=20) == text
                await sending
            with pytest.raises(AuthenticationError) as caught:
                async with init("c:0", manager=two.address, token="one"):
                    pytest.fail("it has joined the other job")
            assert two.address in str(caught.value)
            assert a1.job == "job-1"
            assert a2.job == "job-2"
            await asyncio.sleep(0.05)
            complaints.clear()
    finally:
        await one.close()
        await two.close()


@pytest.mark.asyncio
async def test_a_port_range_that_is_used_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {"cluster": {"network": {"port_range": [port, port]}}}
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}.*the port is taken"):
            async with init("a:0", config=config):
                pytest.fail("it listens on a port that is taken")


@pytest.mark.asyncio
async def test_an_interface_by_name() -> None:
    config: dict[str, Any] = {"cluster": {"network": {"interface": "lo"}}}
    async with init("a:0", config=config, backend="gloo") as a, init("b:0", config=config, backend="gloo") as b:
        sending = a.send(torch.ones(100_000), "b:0")
        assert (await b.recv("a:0", timeout=20)).sum() == 100_000
        await sending
    for wrong in ("nope0", "^nope0", "^lo,nope0"):
        config["cluster"]["network"]["interface"] = wrong
        with pytest.raises(ConfigError, match=r"nope0.*this host has:.*lo \(127\.0\.0\.1"):
            async with init("a:0", config=config):
                pytest.fail("it has found the interface")


async def without_descriptors(comm: Worker) -> str:
    """Fill what this process may open, then use a peer for the first time."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) - 1, hard))
    try:
        await comm.send(1, "a:0", timeout=10)
    except AiorlinfError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "it was sent"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await comm.send(2, "a:0")
    return said


@pytest.mark.asyncio
async def test_no_descriptors_left_is_not_the_peers_fault() -> None:
    """A lack of our own resources is told as such, and is over when they are there again."""
    # Its inbox: a recv would connect to b by itself, before b has no descriptors left.
    async with init("a:0") as a, a.inbox() as inbox, peers.worker(a, "b:0", without_descriptors) as peer:
        assert await inbox.recv(timeout=20) == ("b:0", 2)
        said = await peer.result()
    assert said.startswith("LinkError")
    assert "this process has no file descriptors left" in said
