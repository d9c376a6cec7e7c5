"""One worker's shared memory: what it tells its peers, who may come in and when."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.backends.shm.descriptors import DescriptorWriter
from aiorlinf.backends.shm.segment import create_segment
from aiorlinf.config import CollectiveConfig, SharedMemoryConfig
from aiorlinf.link import host_memory
from aiorlinf.link.host_memory import HostMemory
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.placement import PLACE, Placement
from aiorlinf.work.home import LoopHome
from tests.system import no_more_descriptors, soon

ME = Identity(WorkerAddress("b:0"), Incarnation(1))
PEER = Identity(WorkerAddress("a:0"), Incarnation(3))
SIZE = 1 << 16


class World:
    """A worker's memory, and the links that there are."""

    def __init__(self, home: LoopHome, **options: Any) -> None:
        self.home = home
        self.links: dict[str, Link] = {}
        self.memory = HostMemory(home, SharedMemoryConfig(**options), self.links.get, lambda: list(self.links.values()))

    def connect(self, who: Identity = PEER) -> DescriptorWriter:
        """As that peer does."""
        hello = self.memory.hello()
        return DescriptorWriter(hello["name"], hello["key"], str(who.address), who.incarnation)

    def link(self, who: Identity = PEER, hello: dict[str, Any] | None = None) -> Link:
        """The link to that peer comes up."""
        link = Link(self.home, ME.address, who.address, CollectiveConfig(), {}, itertools.count(), lambda link: None)
        link.backend, link.reason = "shm", "the usual"
        self.memory.equip(link, hello or self.memory.hello(), ME, who)
        link.identity = who
        link.state = LinkState.UP
        self.links[str(who.address)] = link
        return link

    def close(self) -> None:
        for link in self.links.values():
            assert link.receiver.shared is not None
            assert link.shared_out is not None
            link.receiver.shared.close()
            link.shared_out.close()
        self.memory.close()


@pytest_asyncio.fixture
async def world(home: LoopHome) -> AsyncIterator[World]:
    """A worker without links."""
    made = World(home)
    yield made
    made.close()


def pass_one(writer: DescriptorWriter, number: int) -> None:
    segment = create_segment(1, SIZE)
    segment.view(0, 5)[:] = memoryview(b"hello")
    writer.send(number, SIZE, segment.fd)
    segment.close()


async def comes_in(link: Link, number: int) -> None:
    """A message in that segment can be received."""
    answers: list[Any] = []
    assert link.receiver.shared is not None
    link.receiver.shared.place([5], memoryview(PLACE.pack(number, 0)), answers.append)
    await soon(lambda: bool(answers))
    assert bytes(answers[0][0].numpy()) == b"hello"


@pytest.mark.asyncio
async def test_who_connects_after_his_link_is_up_passes_what_he_has(world: World) -> None:
    link = world.link()
    writer = world.connect()
    pass_one(writer, 7)
    await comes_in(link, 7)
    writer.close()


@pytest.mark.asyncio
async def test_who_connects_before_his_link_is_up_is_kept_for_it(world: World) -> None:
    writers = [world.connect(), world.connect(Identity(PEER.address, Incarnation(4))), world.connect(ME)]
    for number, writer in enumerate(writers):
        pass_one(writer, number + 1)
    await soon(lambda: len(world.memory._early) == 3)
    link = world.link()
    await comes_in(link, 1)
    assert len(world.memory._early) == 2
    link = world.link(Identity(PEER.address, Incarnation(4)))
    await comes_in(link, 2)
    for writer in writers:
        writer.close()


@pytest.mark.asyncio
async def test_a_link_that_never_comes_is_not_waited_for_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "EARLY_SECONDS", 0.05)
    writer = world.connect()
    await soon(lambda: len(world.memory._early) == 1)
    await soon(lambda: not world.memory._early)
    with pytest.raises(OSError, match=r"pipe|reset"):
        pass_one(writer, 1)
    writer.close()


@pytest.mark.asyncio
async def test_those_who_wait_for_a_link_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_EARLY_LIMIT", 3)
    writers = [world.connect() for _ in range(6)]
    await soon(lambda: len(world.memory._early) == 3)
    await asyncio.sleep(0.02)
    assert len(world.memory._early) == 3
    for writer in writers:
        writer.close()


@pytest.mark.asyncio
async def test_another_life_of_the_peer_does_not_get_into_this_ones_link(world: World) -> None:
    link = world.link()
    writer = world.connect(Identity(PEER.address, Incarnation(4)))
    pass_one(writer, 1)
    await soon(lambda: len(world.memory._early) == 1)
    assert link.receiver.shared is not None
    assert link.receiver.shared._segments == {}
    writer.close()


@pytest.mark.asyncio
async def test_without_descriptors_those_who_wait_are_answered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    link = world.link()
    writer = world.connect()
    answers: list[Any] = []
    assert link.receiver.shared is not None
    with no_more_descriptors():
        link.receiver.shared.place([5], memoryview(PLACE.pack(1, 0)), answers.append)
        await soon(lambda: answers == [None])
    assert "Too many open files" in caplog.text
    writer.close()


@pytest.mark.asyncio
async def test_trouble_shows_in_the_link_and_goes_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_WARN_SECONDS", 0.01)
    link = world.link(hello={"name": "nobody-listens-there", "key": "x"})
    assert link.shared_out is not None
    region = world.memory.arena.make_now(100)
    assert region is not None
    assert link.shared_out.lend(Placement(region, {})) is None
    assert (link.backend, link.reason) == ("stream", "a memory file could not be passed: [Errno 111] Connection refused")
    await soon(lambda: "b:0 sends to a:0 without shared memory for a while" in caplog.text)
    link.shared_out._open_writer = world.connect
    link.shared_out._rests_until = 0
    assert link.shared_out.lend(Placement(region, {})) is not None
    assert (link.backend, link.reason) == ("shm", "the usual")
    world.memory.arena.release(region)


@pytest.mark.asyncio
async def test_a_peer_that_dies_is_no_trouble_to_speak_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_WARN_SECONDS", 0.01)
    link = world.link(hello={"name": "nobody-listens-there", "key": "x"})
    assert link.shared_out is not None
    region = world.memory.arena.make_now(100)
    assert region is not None
    with caplog.at_level(logging.WARNING, "aiorlinf"):
        assert link.shared_out.lend(Placement(region, {})) is None
        link.state = LinkState.ENDED
        await asyncio.sleep(0.05)
    assert caplog.text == ""
    world.memory.arena.release(region)


@pytest.mark.asyncio
async def test_what_is_said_of_it(world: World, home: LoopHome) -> None:
    hello = world.memory.hello()
    assert set(hello) == {"name", "key", "uid"}
    assert world.memory.problem_with(hello, True) is None
    assert world.memory.problem_with(hello, False) == "the workers are on different hosts"
    for broken in ({}, {"name": 5, "key": "x"}, {"name": "x"}, {**hello, "key": None}):
        assert world.memory.problem_with(broken, True) == "the peer says: nothing about shared memory"
    assert world.memory.problem_with({**hello, "uid": os.getuid() + 1}, True) == (
        f"the peer runs as another user ({os.getuid() + 1} instead of {os.getuid()})"
    )
    off = World(home, enabled=False)
    reason = "cluster.collective.shared_memory.enabled is off"
    assert off.memory.hello() == {"problem": reason}
    assert off.memory.problem_with(hello, True) == reason
    assert world.memory.problem_with(off.memory.hello(), True) == f"the peer says: {reason}"
    off.close()


@pytest.mark.asyncio
async def test_without_a_socket_for_descriptors_there_is_none(home: LoopHome) -> None:
    with no_more_descriptors():
        world = World(home)
    assert world.memory.problem is not None
    assert "no socket for descriptors can be opened" in world.memory.problem
    assert set(world.memory.hello()) == {"problem"}
    world.close()


@pytest.mark.asyncio
async def test_those_who_wait_are_shown_the_door_at_the_end(home: LoopHome) -> None:
    world = World(home)
    writer = world.connect()
    await soon(lambda: len(world.memory._early) == 1)
    world.close()
    with pytest.raises(OSError, match=r"pipe|reset"):
        pass_one(writer, 1)
    writer.close()
    world.memory.close()
