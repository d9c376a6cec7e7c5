"""Whole workers on one loop, over an emulated network. Times are compared with generous bounds only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import aiorlinf.link.emulation as module
from aiorlinf import Worker, init, load_config
from aiorlinf.address import WorkerAddress
from aiorlinf.errors import BackendUnavailable, PeerLost
from aiorlinf.link.connection import Connection
from aiorlinf.link.emulated import EmulatedConnection
from aiorlinf.link.link import Link
from tests.manager.support import TOKEN, manager

FAR = {"src": "a:*", "dst": "b:*", "delay_ms": 100}
NARROW = {"members": "a:*", "bandwidth_mbps": 16}  # two megabytes per second
MEGABYTE = 1_000_000


@contextlib.asynccontextmanager
async def workers(*addresses: str, collective: Any = None, network: Any = None, **emulation: Any) -> AsyncIterator[list[Worker]]:
    """Workers of one job on this loop."""
    config = load_config({"cluster": {"net_emulation": emulation or None, "collective": collective, "network": network}})
    async with manager(config=config) as service, contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(init(address, manager=service.address, token=TOKEN)) for address in addresses]


async def meet(one: Worker, other: Worker) -> None:
    """Connect, and make both sides know that general receives take what is sent with tag 0."""
    for _ in range(2):
        await asyncio.gather(one.send(0, other.address), other.recv(one.address), other.send(0, one.address), one.recv(other.address))


def link_of(worker: Worker, peer: str) -> Link:
    link = worker._table.peek(WorkerAddress(peer))
    assert link is not None
    return link


@pytest.mark.asyncio
async def test_what_is_not_emulated_has_its_connection_for_itself(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        await meet(a, b)
        assert type(link_of(a, "b:0")._conn) is type(link_of(b, "a:0")._conn) is Connection
    async with workers("a:0", "b:0", "c:0", crossdc_pairs=[FAR]) as (a, b, c):
        await meet(a, b)
        await meet(a, c)
        assert type(link_of(a, "b:0")._conn) is type(link_of(b, "a:0")._conn) is EmulatedConnection
        assert type(link_of(a, "c:0")._conn) is type(link_of(c, "a:0")._conn) is Connection


@pytest.mark.asyncio
async def test_a_delay_holds_both_ways_for_large_and_small_in_order(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", crossdc_pairs=[FAR]) as (a, b):
        await meet(a, b)
        begun = time.monotonic()
        for payload in (1, torch.full((300_000,), 2.0), 3, torch.arange(5)):
            a.send(payload, "b:0")
        got = [await b.recv("a:0", timeout=20) for _ in range(4)]
        there = time.monotonic() - begun
        assert (got[0], got[2], got[3].tolist()) == (1, 3, [0, 1, 2, 3, 4])
        assert (got[1] == 2).all()
        await b.send("back", "a:0")
        await a.recv("b:0", timeout=20)
        assert there >= 0.1
        assert time.monotonic() - begun >= 0.2
        (stats,) = a.stats().links
        assert (stats.backend, stats.around_bytes_sent) == ("stream", 0)
        assert "the network between the two is emulated (100 ms)" in stats.reason


@pytest.mark.asyncio
async def test_one_way_only(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", crossdc_pairs=[FAR], symmetric=False) as (a, b):
        await meet(a, b)
        assert type(link_of(b, "a:0")._conn) is Connection
        await asyncio.gather(b.send(torch.zeros(300_000), "a:0"), a.recv("b:0", timeout=20))
        await asyncio.gather(a.send(torch.zeros(300_000), "b:0"), b.recv("a:0", timeout=20))
        (there,), (back,) = a.stats().links, b.stats().links
        assert (there.backend, back.backend) == ("stream", "shm")
        assert back.around_bytes_sent == 1_200_000


@pytest.mark.asyncio
async def test_members_share_a_bandwidth_and_others_have_none(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "a:1", "b:0", bandwidth_groups=[NARROW], symmetric=False) as (a, other, b):
        await meet(a, b)
        await meet(other, b)
        await meet(a, other)
        payload = torch.ones(MEGABYTE, dtype=torch.uint8)
        begun = time.monotonic()
        works = [a.send(payload, "b:0"), other.send(payload, "b:0"), b.recv("a:0", timeout=20), b.recv("a:1", timeout=20)]
        await asyncio.gather(*works)
        assert time.monotonic() - begun >= 0.95  # two megabytes
        assert [link.backend for link in a.stats().links if link.remote == "a:1"] == ["shm"]
        assert type(link_of(b, "a:0")._conn) is Connection


@pytest.mark.asyncio
async def test_what_members_receive_has_a_bandwidth_of_its_own(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", bandwidth_groups=[NARROW]) as (a, b):
        await meet(a, b)
        payload = torch.ones(MEGABYTE, dtype=torch.uint8)
        begun = time.monotonic()
        await asyncio.gather(b.send(payload, "a:0"), a.recv("b:0", timeout=20), a.send(payload, "b:0"), b.recv("a:0", timeout=20))
        assert time.monotonic() - begun >= 0.45
        assert "emulated (16 Mbit/s)" in b.stats().links[0].reason


@pytest.mark.asyncio
async def test_send_tensor_and_the_inbox_come_over_it_too(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", crossdc_pairs=[FAR], bandwidth_groups=[NARROW]) as (a, b):
        tensor = torch.arange(100_000.0)
        begun = time.monotonic()
        sent = a.send_tensor(tensor, "b:0", tag=3)
        out = await b.recv_tensor(torch.zeros(100_000), "a:0", tag=3, timeout=20)
        assert time.monotonic() - begun >= 0.1 + 400_000 / 2e6
        assert torch.equal(out, tensor)
        await sent
        inbox = b.inbox(tag=4)
        a.send("hello", "b:0", tag=4)
        assert await inbox.recv(timeout=20) == ("a:0", "hello")


@pytest.mark.asyncio
async def test_bytes_are_charged_as_they_were_compressed(problems: list[dict[str, Any]]) -> None:
    compression = {"tensor_compression": {"codec": "zstd"}}
    async with workers("a:0", "b:0", bandwidth_groups=[NARROW], collective=compression) as (a, b):
        await meet(a, b)
        payload = torch.arange(60).repeat(100_000)  # 48 MB, which would take 24 s
        begun = time.monotonic()
        sent = a.send(payload, "b:0")
        assert torch.equal(await b.recv("a:0", timeout=20), payload)
        await sent
        took = time.monotonic() - begun
        (link,) = a.stats().links
        assert link.compression is not None
        assert link.compression["bytes_before"] == payload.nbytes
        assert link.compression["bytes_after"] / 2e6 <= took
        random = torch.randint(0, 256, (MEGABYTE,), dtype=torch.uint8)
        begun = time.monotonic()
        await asyncio.gather(a.send(random, "b:0"), b.recv("a:0", timeout=20))
        assert time.monotonic() - begun >= 0.45


@pytest.mark.asyncio
async def test_a_backend_that_must_be_used_cannot_be(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", crossdc_pairs=[FAR], collective={"backend": "shm", "fallback": False}) as (a, b):
        with pytest.raises(BackendUnavailable, match="emulated"):
            await a.send(1, "b:0")
        del b


@pytest.mark.asyncio
async def test_closing_waits_for_what_is_under_way(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", crossdc_pairs=[FAR]) as (a, b):
        await meet(a, b)
        received = b.recv("a:0", timeout=20)
        begun = time.monotonic()
        await a.send("last words", "b:0")
        await a.close()
        assert await received == "last words"
        assert time.monotonic() - begun >= 0.1


@pytest.mark.asyncio
async def test_closing_sends_what_it_cannot_wait_for_at_once(problems: list[dict[str, Any]]) -> None:
    far = {**FAR, "delay_ms": 60_000}
    async with workers("a:0", "b:0", crossdc_pairs=[far], symmetric=False, network={"close_timeout_s": 0.1}) as (a, b):
        connected = b.send(1, "a:0")  # its answer takes a minute
        await a.recv("b:0", timeout=20)
        payloads: list[Any] = ["small", torch.full((200_000,), 1.0), torch.full((200_000,), 2.0)]
        works = [a.send(payload, "b:0") for payload in payloads]
        received = [b.recv("a:0", timeout=20) for _ in payloads]
        begun = time.monotonic()
        await a.close()
        assert time.monotonic() - begun < 20
        got = [await work for work in received]
        assert got[0] == "small"
        assert torch.equal(got[1], payloads[1])
        assert torch.equal(got[2], payloads[2])
        await connected  # even that was sent along
        assert all(work.done() for work in works)


@pytest.mark.asyncio
async def test_a_worker_that_ends_fails_what_waits_for_the_bandwidth(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0", bandwidth_groups=[{**NARROW, "bandwidth_mbps": 1}]) as (a, b):
        await meet(a, b)
        sent = a.send(torch.ones(MEGABYTE, dtype=torch.uint8), "b:0")
        received = b.recv("a:0")
        await asyncio.sleep(0.1)
        emulated = link_of(a, "b:0")._conn
        assert isinstance(emulated, EmulatedConnection)
        assert emulated.busy
        connection: Any = emulated._connection
        connection.transport.abort()
        for work in (sent, received):
            with pytest.raises(PeerLost):
                await work
        assert emulated.closed
        assert a._table._emulation is not None
        assert a._table._emulation._open == set()


@pytest.mark.asyncio
async def test_without_the_manager_each_keeps_the_clocks_itself(problems: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"cluster": {"net_emulation": {"bandwidth_groups": [NARROW]}}})
    async with contextlib.AsyncExitStack() as stack:
        async with manager(config=config) as service:
            a, b = [await stack.enter_async_context(init(address, manager=service.address, token=TOKEN)) for address in ("a:0", "b:0")]
            await meet(a, b)
        caplog.set_level(logging.WARNING, "aiorlinf.link")
        begun = time.monotonic()
        await asyncio.gather(a.send(torch.ones(MEGABYTE, dtype=torch.uint8), "b:0"), b.recv("a:0", timeout=20))
        assert time.monotonic() - begun >= 0.45
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "aiorlinf.link"]
        assert warning.startswith("a:0 keeps the clocks of emulated bandwidths itself until the manager answers: ")


@pytest.mark.asyncio
async def test_a_manager_that_does_not_answer_holds_nothing_up_for_ever(
    problems: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    async with workers("a:0", "b:0", bandwidth_groups=[NARROW]) as (a, b):
        await meet(a, b)
        assert a._manager is not None
        client = a._manager._keeper._client
        assert client is not None
        monkeypatch.setattr(client._connection, "send", lambda message: None)
        await asyncio.gather(a.send("through", "b:0"), b.recv("a:0", timeout=20))
        monkeypatch.undo()
