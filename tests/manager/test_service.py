"""The manager under real connections: members, strangers, floods, deaths."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.address import WorkerAddress
from aiorlinf.config import load_config
from aiorlinf.errors import AuthenticationError, ClosedError, LinkError, RendezvousError, UsageError
from aiorlinf.manager import connection as connection_module
from aiorlinf.manager import service as service_module
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.protocol import MessageReader, encode
from aiorlinf.manager.service import ManagerService, max_unproven
from aiorlinf.rendezvous.hosts import bind_listener, parse_endpoint
from aiorlinf.wire.handshake import PROTOCOL_VERSION, ClientHandshake, Done, Fail, Hello, Write
from tests.manager.support import TOKEN, config_with, join, manager, raw_connections, spawn, until

HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TLS = bytes.fromhex("16030100c8010000c40303") + b"\x00" * 40


async def close_all(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in connections:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in connections), return_exceptions=True)


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, machine: ClientHandshake) -> Done | Fail:
    """Drive the machine of a client over a plain connection."""
    out = machine.start()
    while True:
        for item in out:
            if not isinstance(item, Write):
                return item
            writer.write(item.data)
        data = await reader.read(65536)
        out = machine.feed(data) if data else machine.eof()


# -------------------------------------------------------------------------------------------------------------- members


@pytest.mark.asyncio
async def test_two_workers_find_each_other() -> None:
    async with manager(job="j7") as service, join(service, "a:0", port=7001) as a, join(service) as b:
        assert a.client.job == b.client.job == "j7"
        waiting = asyncio.create_task(a.client.lookup("b:0", 10.0))
        await asyncio.sleep(0)
        registration = await b.client.register("b:0", port=7002, devices=["cpu"], labels={"zone": "z"})
        assert registration.identity == ("b:0", 1)
        assert registration.config == service.config
        assert registration.job == "j7"
        assert registration.expected is None
        record = await waiting
        assert (record.address, record.host, record.port, record.devices, record.pid) == ("b:0", "127.0.0.1", 7002, ("cpu",), os.getpid())
        assert record.labels["zone"] == "z"
        assert record.labels["host"] == socket.gethostname()
        assert record.host_id == (await b.client.lookup("a:0")).host_id
        assert [worker.address for worker in await a.client.workers()] == ["a:0", "b:0"]
        assert "2 workers" in repr(service)


@pytest.mark.asyncio
async def test_the_configuration_is_handed_out() -> None:
    config = config_with(advertise_host="trainer.example", close_timeout_s=1.5)
    async with manager(config=config, expected=["a:0"]) as service, join(service) as member:
        assert member.client.config == config, "it is known before registering"
        registration = await member.client.register("a:0", port=1)
        assert registration.config == config
        assert registration.expected == frozenset({WorkerAddress("a:0")})


@pytest.mark.asyncio
async def test_members_share_the_clocks_of_the_emulated_network() -> None:
    groups = [{"members": "a:*", "bandwidth_mbps": 8}]  # a megabyte per second
    config = load_config({"cluster": {"net_emulation": {"bandwidth_groups": groups}}})
    async with manager(config=config) as service, join(service, "a:0") as a, join(service, "a:1") as b:
        first = await a.client.book((0,), 50_000_000, 5.0)
        second = await b.client.book((0,), 50_000_000, 5.0)
        other = await b.client.book((1,), 1000, 5.0)
        assert first.span_s == second.span_s == 50.0
        assert 50.0 <= first.wait_s < 51.0
        assert 90.0 < second.wait_s <= 100.0
        assert other.wait_s < 1.0
        with pytest.raises(UsageError, match="has 2 budgets, not"):
            await a.client.book((2,), 1000, 5.0)


@pytest.mark.asyncio
async def test_an_emulation_of_workers_that_the_job_has_not(caplog: pytest.LogCaptureFixture) -> None:
    pair = {"src": "rolout:*", "dst": "trainer:0", "delay_ms": 20}
    config = load_config({"cluster": {"net_emulation": {"crossdc_pairs": [pair]}}})
    async with manager(config=config, expected=["rollout:0", "trainer:0"]):
        pass
    assert [record.getMessage() for record in caplog.records] == ["cluster.net_emulation names rolout:*, but the job has no such worker"]


@pytest.mark.asyncio
async def test_five_hundred_joins_from_four_processes() -> None:
    program = """
import asyncio, sys
from aiorlinf.manager.client import ManagerClient
from tests.manager.support import TOKEN

async def one(number):
    client = await ManagerClient.connect(sys.argv[1], TOKEN, deadline=50.0)
    try:
        return (await client.register(f"{sys.argv[2]}:{number}", port=1, timeout=50.0)).identity.incarnation
    finally:
        await client.close()

async def main():
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(sum(await asyncio.gather(*(one(number) for number in range(125)))))

asyncio.run(main(), debug=False)
"""
    config = config_with(handshake_timeout_s=30.0)  # four starved processes on a small machine are not strangers
    async with manager(config=config) as service:
        environment = {**os.environ, "PYTHONASYNCIODEBUG": ""}
        children = [spawn(program, service.address, group, env=environment) for group in ("a", "b", "c", "d")]
        try:
            for child in children:
                assert child.stdout is not None
                assert (await asyncio.to_thread(child.stdout.readline)).strip() == "ready"
            results = await asyncio.gather(*(asyncio.to_thread(child.communicate, "go\n") for child in children))
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert [(out.strip(), err) for out, err in results] == [("125", "")] * 4
        assert len(service._directory.lives) == 500


@pytest.mark.asyncio
async def test_an_address_that_is_alive_is_refused_at_once_and_its_holder_named() -> None:
    async with manager() as service, join(service, "a:0", port=7001), join(service) as second:
        with pytest.raises(RendezvousError) as caught:
            await second.client.register("a:0", port=7002)
        assert f"by process {os.getpid()} at 127.0.0.1:7001" in str(caught.value)
        assert "which is alive" in str(caught.value)
        assert (await second.client.register("a:1", port=7002)).identity.incarnation == 1


HOLDER = """
import asyncio, sys
from aiorlinf.manager.client import ManagerClient
from tests.manager.support import TOKEN

async def main():
    client = await ManagerClient.connect(sys.argv[1], TOKEN)
    print((await client.register("a:0", port=1)).identity, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await client.close()

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_killed_worker_is_news_and_its_address_is_free_again() -> None:
    async with manager() as service, join(service, "b:0") as watcher:
        child = spawn(HOLDER, service.address)
        try:
            record = await watcher.client.lookup("a:0", 30.0)
            assert record.pid == child.pid
            child.send_signal(signal.SIGKILL)
            await until(lambda: len(watcher.events) == 2)
        finally:
            child.kill()
            child.communicate()
        assert watcher.news == [("joined", "a:0", 1, None), ("gone", "a:0", 1, "lost")]
        async with join(service, "a:0") as successor:
            assert successor.client.registration is not None
            assert successor.client.registration.identity == ("a:0", 2)
        await until(lambda: len(watcher.events) == 4)
        assert watcher.news[2:] == [("joined", "a:0", 2, None), ("gone", "a:0", 2, "left")]


@pytest.mark.asyncio
async def test_a_frozen_holder_makes_room_when_its_silence_is_taken_for_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PROBE_TIMEOUT_S", 0.2)
    async with manager(config=config_with(heartbeat_timeout_s=1.0)) as service, join(service) as watcher:
        await watcher.client.subscribe()
        child = spawn(HOLDER, service.address)
        try:
            assert child.stdout is not None
            assert (await asyncio.to_thread(child.stdout.readline)).strip() == "a:0#1"
            child.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            async with join(service) as second:
                assert (await second.client.register("a:0", port=2)).identity == ("a:0", 2)
                assert 0.5 < time.monotonic() - begin < 2.0
            assert watcher.news[:3] == [("joined", "a:0", 1, None), ("gone", "a:0", 1, "lost"), ("joined", "a:0", 2, None)]
            assert watcher.events[1]["silent"] is True
        finally:
            child.kill()
            child.communicate()


@pytest.mark.asyncio
async def test_a_holder_that_dies_during_the_probe_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PROBE_TIMEOUT_S", 30.0)
    async with manager() as service:
        child = spawn(HOLDER, service.address)
        try:
            assert child.stdout is not None
            await asyncio.to_thread(child.stdout.readline)
            child.send_signal(signal.SIGSTOP)
            async with join(service) as second:
                registering = asyncio.create_task(second.client.register("a:0", port=2, timeout=30.0))
                await until(lambda: len(service._tasks) == 1)
                child.kill()
                assert (await registering).identity == ("a:0", 2)
        finally:
            child.kill()
            child.communicate()


# ------------------------------------------------------------------------------------------------------------ strangers


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("said", "looks"),
    [(HTTP, "HTTP client"), (TLS, "TLS"), (b"\xff" * 100_000, "begins with"), (struct.pack("!I", 2**32 - 1) * 10, "begins with")],
)
async def test_strangers_are_cut_and_named_in_the_log(said: bytes, looks: str, caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as service, join(service, "a:0") as member:
        with caplog.at_level(logging.WARNING, "aiorlinf.manager"):
            connections = await raw_connections(service, 1)
            reader, writer = connections[0]
            writer.write(said)
            try:
                assert await reader.read() == b"", "a stranger is told nothing"
            except ConnectionResetError:
                pass  # bytes it sent were not read any more
            await until(lambda: service.refused == 1)
        await close_all(connections)
        assert looks in caplog.text
        assert (await member.client.lookup("a:0")).port == 7000


@pytest.mark.asyncio
async def test_another_protocol_version_is_told_both_versions() -> None:
    async with manager() as service:
        connections = await raw_connections(service, 1)
        machine = ClientHandshake(TOKEN, Hello(role="manager", job=None), protocol_version=PROTOCOL_VERSION + 1)
        end = await shake_hands(*connections[0], machine)
        assert isinstance(end, Fail)
        assert f"version {PROTOCOL_VERSION} " in str(end.error)
        assert f"version {PROTOCOL_VERSION + 1} " in str(end.error)
        await close_all(connections)


@pytest.mark.asyncio
async def test_fifty_silent_connections_do_not_delay_a_real_one() -> None:
    async with manager(config=config_with(handshake_timeout_s=60.0)) as service:
        connections = await raw_connections(service, 50)
        await until(lambda: service.unproven == 50)
        async with join(service, "a:0"):
            assert service.unproven == 50, "it did not wait for any of them"
        await close_all(connections)
        await until(lambda: service.unproven == 0)


@pytest.mark.asyncio
async def test_a_flood_of_silent_connections_is_bounded_and_a_real_one_gets_in() -> None:
    async with manager(config=config_with(handshake_timeout_s=60.0)) as service:
        service.max_unproven = 8
        connections = await raw_connections(service, 40)
        await until(lambda: service.refused >= 30)
        assert service.unproven <= 8
        async with join(service, "a:0"):
            pass
        assert connections[0][0].at_eof() or await connections[0][0].read() == b""
        await close_all(connections)


@pytest.mark.asyncio
async def test_those_who_spoke_are_kept_before_the_silent_ones() -> None:
    async with manager(config=config_with(handshake_timeout_s=60.0)) as service:
        service.max_unproven = 2
        speaking = await raw_connections(service, 1)
        speaking[0][1].write(b"AIORLINF")
        await until(lambda: len(service._unproven) == 1)
        silent = await raw_connections(service, 3)
        await until(lambda: service.refused == 2)
        assert len(service._unproven) == 1
        await close_all(speaking + silent)


@pytest.mark.asyncio
async def test_one_byte_at_a_time_does_not_prolong_the_time_limit() -> None:
    async with manager(config=config_with(handshake_timeout_s=0.3)) as service:
        connections = await raw_connections(service, 1)
        reader, writer = connections[0]
        said = 0
        for byte in b"AIORLINF" + bytes(60):
            writer.write(bytes([byte if said < 8 else 1]))
            said += 1
            await asyncio.sleep(0.05)
            if reader.at_eof() or service.refused:
                break
        assert service.refused == 1
        assert said < 60
        await close_all(connections)


def test_the_bound_leaves_room_for_the_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, bound in [(1024, 512), (20, 16), (10**6, 1024), (resource.RLIM_INFINITY, 1024)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_unproven() == bound


@pytest.mark.asyncio
async def test_the_log_is_not_filled_by_strangers(caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as service:
        with caplog.at_level(logging.WARNING, "aiorlinf.manager"):
            connections = await raw_connections(service, 30)
            for _, writer in connections:
                writer.write(HTTP)
            await until(lambda: service.refused == 30)
        assert len(caplog.records) < 15
        await close_all(connections)


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [b"", b"AIORLINF"])
async def test_who_goes_away_without_a_wrong_word_is_not_warned_of(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose join is cancelled, or somebody who only asks whether anybody listens."""
    async with manager() as service:
        with caplog.at_level(logging.WARNING, "aiorlinf.manager"):
            connections = await raw_connections(service, 3)
            for _, writer in connections:
                writer.write(said)
            await close_all(connections)
            await until(lambda: service.refused == 3)
        assert not caplog.records


# ----------------------------------------------------------------------------------------- proven ones that misbehave


async def proven(service: ManagerService) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has proved itself and can now say anything."""
    ((reader, writer),) = await raw_connections(service, 1)
    assert isinstance(await shake_hands(reader, writer, ClientHandshake(TOKEN, Hello(role="manager", job=None))), Done)
    return reader, writer


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", encode({"op": "eval", "id": 1}), struct.pack("!I", 1) + b"{", encode({})])
async def test_a_malformed_message_cuts_its_sender_only(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as service, join(service, "a:0") as member:
        reader, writer = await proven(service)
        with caplog.at_level(logging.WARNING, "aiorlinf.manager"):
            writer.write(said)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readexactly(1)
        await until(lambda: len(service._sessions) == 1)
        assert "cut a worker's connection" in caplog.text
        assert await member.client.workers()
        await close_all([(reader, writer)])


@pytest.mark.asyncio
async def test_messages_in_one_piece_with_the_hello_are_heard() -> None:
    async with manager() as service:
        ((reader, writer),) = await raw_connections(service, 1)
        machine = ClientHandshake(TOKEN, Hello(role="manager", job=None))
        out: list[Any] = machine.start()
        answered = b""
        while not answered:
            for item in out:
                if isinstance(item, Write):
                    is_hello = len(item.data) > 100
                    writer.write(item.data + (encode({"op": "workers", "id": 1}) if is_hello else b""))
            out = machine.feed(await reader.read(65536))
            answered = machine.leftover
            if not answered and any(isinstance(item, Done) for item in out):
                answered = await reader.read(65536)
        assert MessageReader().feed(answered) == [{"id": 1, "ok": {"workers": [], "more": False}}]
        await close_all([(reader, writer)])


@pytest.mark.asyncio
async def test_who_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_MAX_UNSENT_BYTES", 1000)
    labels = {str(number): "x" * 1000 for number in range(60)}
    async with manager() as service, join(service, "a:0", labels=labels) as member:
        reader, writer = await proven(service)
        writer.write(encode({"op": "workers", "id": 1}) * 500)
        await until(lambda: len(service._sessions) == 1)
        assert await member.client.workers()
        await close_all([(reader, writer)])


# ----------------------------------------------------------------------------------------------------------- other jobs


@pytest.mark.asyncio
async def test_two_jobs_on_one_host_with_the_same_worker_names() -> None:
    async with manager(job="one") as one, manager(job="two") as two:
        async with join(one, "a:0", port=1) as first, join(two, "a:0", port=2) as second:
            assert (await first.client.lookup("a:0")).port == 1
            assert (await second.client.lookup("a:0")).port == 2
        with pytest.raises(LinkError) as caught:
            await ManagerClient.connect(two.address, TOKEN, "one", deadline=10.0)
        assert "job one" in str(caught.value)
        assert "job two" in str(caught.value)
        assert two.address in str(caught.value)


@pytest.mark.asyncio
async def test_another_token_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as service:
        with caplog.at_level(logging.WARNING, "aiorlinf.manager"), pytest.raises(AuthenticationError, match="AIORLINF_TOKEN"):
            await ManagerClient.connect(service.address, b"another token", deadline=10.0)
        await until(lambda: service.refused == 1)
        assert "did not prove that it knows the job token" in caplog.text


# --------------------------------------------------------------------------------------------------- starting, stopping


@pytest.mark.asyncio
async def test_a_taken_port_and_a_range() -> None:
    with ExitStack() as stack:
        port = stack.enter_context(bind_listener("127.0.0.1")).getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}: the port is taken"):
            async with manager(port=port):
                pass
        with pytest.raises(RendezvousError, match=f"ports {port} to {port}|127.0.0.1:{port}: the port is taken"):
            async with manager(config=config_with(port_range=(port, port))):
                pass
    async with manager(config=config_with(port_range=(port, port))) as service, join(service, "a:0"):
        assert service.address == f"127.0.0.1:{port}"


@pytest.mark.asyncio
async def test_the_port_is_free_again_after_close() -> None:
    async with manager() as service, join(service, "a:0"):
        host, port = parse_endpoint(service.address)
    async with manager(port=port) as service, join(service, "a:0"):
        assert service.address == f"{host}:{port}"


@pytest.mark.asyncio
async def test_starting_twice_and_after_close() -> None:
    service = ManagerService(config=config_with(), token=TOKEN)
    assert "not started" in repr(service)
    await service.start()
    with pytest.raises(UsageError, match="running already"):
        await service.start()
    await service.close()
    await service.close()
    assert "closed" in repr(service)
    with pytest.raises(ClosedError):
        await service.start()
    with pytest.raises(AuthenticationError):
        ManagerService(config=config_with(), token=b"")
    with pytest.raises(UsageError, match="at most 65536"):
        ManagerService(config=config_with(advertise_host="x" * 70_000), token=TOKEN)


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_silent_connections() -> None:
    service = ManagerService(config=config_with(handshake_timeout_s=60.0), token=TOKEN)
    await service.start("localhost")
    connections = await raw_connections(service, 3)
    await until(lambda: service.unproven == 3)
    await service.close()
    await close_all(connections)


@pytest.mark.asyncio
async def test_ipv6(tmp_path: Path) -> None:
    try:
        bind_listener("::1").close()
    except RendezvousError:
        pytest.skip("this host has no IPv6 loopback")
    async with manager(host="::1") as service, join(service, "a:0") as member:
        assert service.address.startswith("[::1]:")
        assert (await member.client.lookup("a:0")).host == "::1"
