"""Memory files on their way from one process to another."""

from __future__ import annotations

import array
import asyncio
import functools
import os
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from aiorlinf.backends.shm.descriptors import DescriptorListener, DescriptorReader, DescriptorWriter, abstract_listener, abstract_name
from tests.peers import Pipe, process
from tests.system import no_more_descriptors, soon

NOBODY = 65534


class Host:
    """One listening side: who came, and what each passed."""

    def __init__(self) -> None:
        self.came: list[tuple[str, int]] = []
        self.segments: list[tuple[int, int, int | None]] = []
        self.readers: list[DescriptorReader] = []
        self.ended = 0
        self.shut: list[str] = []
        self.welcome = True
        self.listener = DescriptorListener(asyncio.get_running_loop(), "secret", self._attach, self.shut.append)

    def _attach(self, address: str, incarnation: int, reader: DescriptorReader) -> bool:
        self.came.append((address, incarnation))
        if self.welcome:
            self.readers.append(reader)
            reader.start(lambda *segment: self.segments.append(segment), self._one_ended)
        return self.welcome

    def _one_ended(self) -> None:
        self.ended += 1

    def writer(self, **changes: Any) -> DescriptorWriter:
        return DescriptorWriter(**{"name": self.listener.name, "key": "secret", "address": "a:0", "incarnation": 3, **changes})

    def close(self) -> None:
        self.listener.close()
        for reader in self.readers:
            reader.close()
        for _, _, fd in self.segments:
            if fd is not None:
                os.close(fd)


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Host]:
    """A listening side."""
    made = Host()
    yield made
    made.close()


@pytest_asyncio.fixture
async def fd() -> AsyncIterator[int]:
    """Something to pass."""
    made = os.memfd_create("something")
    os.write(made, b"contents")
    yield made
    os.close(made)


async def closed_by_peer(sock: socket.socket) -> bool:
    """The other side ended this connection."""
    sock.setblocking(False)
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 10) == b""
    except ConnectionResetError:
        return True


def raw(host: Host) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"\0{host.listener.name}")
    return sock


def hello(**changes: Any) -> bytes:
    return orjson.dumps({"key": "secret", "address": "a:0", "incarnation": 3, **changes})


@pytest.mark.asyncio
async def test_a_file_arrives_with_its_number_and_size(host: Host, fd: int) -> None:
    writer = host.writer()
    writer.send(5, 4096, fd)
    writer.send(1 << 40, 1 << 41, fd)
    await soon(lambda: len(host.segments) == 2)
    assert host.came == [("a:0", 3)]
    assert [segment[:2] for segment in host.segments] == [(5, 4096), (1 << 40, 1 << 41)]
    for _, _, got in host.segments:
        assert got is not None
        assert got != fd
        assert os.get_inheritable(got) is False
        assert os.pread(got, 100, 0) == b"contents"
    writer.close()
    await soon(lambda: host.ended == 1)


@pytest.mark.asyncio
async def test_what_was_sent_before_the_end_still_arrives(host: Host, fd: int) -> None:
    writer = host.writer()
    for number in range(20):
        writer.send(number, 1, fd)
    writer.close()
    await soon(lambda: host.ended == 1)
    assert [number for number, _, _ in host.segments] == list(range(20))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "greeting",
    [
        hello(key="another"),
        hello(key=""),
        hello(key=None),
        hello(address="nonsense"),
        hello(address=7),
        hello(incarnation="one"),
        orjson.dumps({"key": "secret"}),
        orjson.dumps(["secret"]),
        b"\xff\xfe",
        b"{" * 2000,
        b"x",
    ],
)
async def test_who_does_not_show_the_key_is_shown_the_door(host: Host, greeting: bytes) -> None:
    sock = raw(host)
    sock.send(greeting)
    assert await closed_by_peer(sock)
    assert host.came == []
    sock.close()


@pytest.mark.asyncio
async def test_who_says_nothing_and_goes_leaves_nothing(host: Host) -> None:
    raw(host).close()
    await asyncio.sleep(0.02)
    assert host.came == []


@pytest.mark.asyncio
async def test_whom_nobody_wants_is_shown_the_door(host: Host) -> None:
    host.welcome = False
    sock = raw(host)
    sock.send(hello())
    assert await closed_by_peer(sock)
    assert host.came == [("a:0", 3)]
    sock.close()


@pytest.mark.asyncio
async def test_silent_connections_do_not_keep_others_out(host: Host, fd: int) -> None:
    silent = [raw(host) for _ in range(300)]
    writer = host.writer()
    writer.send(1, 1, fd)
    await soon(lambda: len(host.segments) == 1)
    assert await closed_by_peer(silent[0]), "the oldest one made room"
    writer.close()
    for sock in silent:
        sock.close()


@pytest.mark.asyncio
async def test_many_at_once_all_come_in(host: Host, fd: int) -> None:
    writers = [host.writer(incarnation=number) for number in range(400)]
    for writer in writers:
        writer.send(1, 1, fd)
    await soon(lambda: len(host.segments) == 400)
    assert sorted(number for _, number in host.came) == list(range(400))
    assert host.shut == []
    for writer in writers:
        writer.close()


def _knock(pipe: Pipe, name: str) -> str:
    assert os.getuid() == NOBODY
    try:
        writer = DescriptorWriter(name, "secret", "a:0", 3)
    except BrokenPipeError:
        return "closed"
    sock = writer._sock
    sock.setblocking(True)
    sock.settimeout(20)
    try:
        return "closed" if sock.recv(1) == b"" else "let in"
    except ConnectionResetError:
        return "closed"


@pytest.mark.asyncio
@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
async def test_another_user_is_refused_although_he_knows_the_key(host: Host) -> None:
    with process(_knock, host.listener.name, prepare=functools.partial(os.setuid, NOBODY)) as stranger:
        assert await stranger.result() == "closed"
    assert host.came == []


@pytest.mark.asyncio
async def test_a_file_for_which_there_is_no_descriptor_left_is_said_to_be_lost(host: Host, fd: int) -> None:
    writer = host.writer()
    writer.send(1, 1, fd)
    await soon(lambda: len(host.segments) == 1)
    with no_more_descriptors():
        writer.send(2, 1, fd)
        await soon(lambda: len(host.segments) == 2)
    writer.send(3, 1, fd)
    await soon(lambda: len(host.segments) == 3)
    assert [(number, got is None) for number, _, got in host.segments] == [(1, False), (2, True), (3, False)]
    writer.close()


@pytest.mark.asyncio
async def test_without_descriptors_nobody_comes_in_until_there_are_some(host: Host, fd: int) -> None:
    writer = host.writer()
    writer.send(1, 1, fd)
    with no_more_descriptors():
        await soon(lambda: len(host.shut) >= 2)
        turns = 0
        while len(host.shut) < 4:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10, "it looks again now and then, not all the time"
    assert "Too many open files" in host.shut[0]
    assert host.came == []
    await soon(lambda: len(host.segments) == 1)
    assert host.came == [("a:0", 3)]
    writer.close()


@pytest.mark.asyncio
async def test_closing_while_nobody_can_come_in(host: Host) -> None:
    writer = host.writer()
    other = Host()
    another = other.writer()
    with no_more_descriptors():
        await soon(lambda: bool(other.shut))
        other.close()
    another.close()
    writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [2, 3])
async def test_more_than_one_descriptor_ends_the_connection_and_none_stays_open(host: Host, fd: int, count: int) -> None:
    sock = raw(host)
    sock.send(hello())
    fds = array.array("i", [fd] * count)
    sock.sendmsg([struct.pack("<QQ", 1, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    await soon(lambda: host.ended == 1)
    assert host.segments == []
    sock.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [b"short", b"long" * 8])
async def test_a_malformed_message_ends_the_connection(host: Host, fd: int, data: bytes) -> None:
    sock = raw(host)
    sock.send(hello())
    sock.sendmsg([data[:15]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    await soon(lambda: host.ended == 1)
    assert host.segments == []
    sock.close()


@pytest.mark.asyncio
async def test_a_reader_that_was_never_started_keeps_what_came(fd: int) -> None:
    kept: list[DescriptorReader] = []

    def attach(address: str, incarnation: int, reader: DescriptorReader) -> bool:
        kept.append(reader)
        return True

    listener = DescriptorListener(asyncio.get_running_loop(), "secret", attach)
    writer = DescriptorWriter(listener.name, "secret", "a:0", 3)
    writer.send(7, 4096, fd)
    await soon(lambda: len(kept) == 1)
    got: list[tuple[int, int, int | None]] = []
    kept[0].start(lambda *segment: got.append(segment), lambda: None)
    await soon(lambda: len(got) == 1)
    assert got[0][:2] == (7, 4096)
    assert got[0][2] is not None
    os.close(got[0][2])
    kept[0].close()
    kept[0].close()
    listener.close()
    writer.close()


@pytest.mark.asyncio
async def test_a_writer_is_told_when_nobody_listens(host: Host, fd: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        host.writer(name=abstract_name("fd"))
    with pytest.raises(OSError, match="too long"):
        host.writer(name="x" * 200)
    writer = host.writer()
    await soon(lambda: len(host.readers) == 1)
    host.readers[0].close()
    with pytest.raises(BrokenPipeError):
        writer.send(1, 1, fd)
    writer.close()
    writer = host.writer()
    with pytest.raises(OSError, match="descriptor"):
        writer.send(1, 1, -1)
    writer.close()


@pytest.mark.asyncio
async def test_a_full_socket_is_told_at_once(host: Host, fd: int) -> None:
    writer = host.writer()
    with pytest.raises(OSError, match=r"temporarily unavailable|references"):
        for number in range(100_000):
            writer.send(number, 1, fd)  # our loop does not turn, so nobody reads
    writer.close()
    await soon(lambda: host.ended == 1)


def test_names_are_fresh_and_gone_with_their_socket() -> None:
    names = {abstract_name("fd") for _ in range(100)}
    assert len(names) == 100
    name = names.pop()
    listener = abstract_listener(name, socket.SOCK_STREAM)
    with pytest.raises(OSError, match="in use"):
        abstract_listener(name, socket.SOCK_STREAM)
    listener.close()
    abstract_listener(name, socket.SOCK_STREAM).close()
