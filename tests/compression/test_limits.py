"""What a peer can make us allocate: never what it merely claims."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiorlinf.link.receiver
from aiorlinf import Worker
from aiorlinf.codec.header import LeafHeader, pack_tried
from aiorlinf.errors import PeerLost, UsageError, WireError
from aiorlinf.wire.flat import Kind
from aiorlinf.wire.frames import OPEN_PREFIX, Flag, FrameType, Start, Via, frame, stream_key
from aiorlinf.wire.manifest import HEAD
from tests.codec.material import MIB, dense, resident
from tests.compression.conftest import compressing, link_of, pool_of, same

TB = 10**12


def claim(worker: Worker, nbytes: int, *, tag: int = 0, ident: int = 10**6) -> None:
    """Announce a message of one tensor of this size, and send the beginning of it, all by hand."""
    entry = b"\0\0\1\5" + nbytes.to_bytes(8, "little") + b"uint8" + nbytes.to_bytes(8, "little")
    manifest = HEAD.pack(Kind.TENSOR, 0, 1, 0, len(entry)) + entry
    conn = link_of(worker)._conn
    assert conn is not None
    conn.send(frame(FrameType.OPEN, stream_key(0, tag), OPEN_PREFIX.pack(ident, nbytes) + manifest, Flag.WANT_REPLY))
    conn.send(frame(FrameType.START, ident, Start(Via.CODED, place=pack_tried([True])).encode()))
    head = memoryview(LeafHeader(1, nbytes, None, MIB).encode())
    conn.send_chunk(ident, [head], len(head))
    conn.send(frame(FrameType.END, ident, b"", Flag.WITHDRAWN))


@pytest.mark.asyncio
@pytest.mark.parametrize("posted", [False, True])
async def test_a_claim_of_a_terabyte_is_refused_before_allocation(posted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiorlinf.link.receiver, "installed_memory", lambda: 10**11)

    def allocate(*args: Any, **keywords: Any) -> torch.Tensor:
        raise AssertionError(f"{args} was allocated")

    async with compressing("lz4") as pair:
        await pair.trip("hello")
        receiving = pair.ba.recv(timeout=20) if posted else None
        before = resident()
        with monkeypatch.context() as patch:
            patch.setattr(aiorlinf.link.incoming, "fresh_bytes", allocate)
            for ident in range(10**6, 10**6 + 100):
                claim(pair.a, TB, ident=ident)
            if receiving is not None:
                with pytest.raises(UsageError, match=f"a message of {TB} bytes is larger than all memory that the receiver has"):
                    await receiving
            await pair.trip("still here", tag=1)
        assert resident() - before < 8 * MIB
        assert pair.b._table.links()[0].receiver.opened == {}
        assert same(await pair.trip(dense(100_000)), dense(100_000))


@pytest.mark.asyncio
async def test_a_claim_over_the_configured_limit_is_refused() -> None:
    async with compressing("zstd", collective={"max_message_bytes": 10 * MIB}) as pair:
        await pair.trip("hello")
        receiving = pair.ba.recv(timeout=20)
        claim(pair.a, 11 * MIB)
        with pytest.raises(UsageError, match=r"over the receiver's max_message_bytes of 10485760"):
            await receiving
        assert same(await pair.trip(dense(100_000)), dense(100_000))


@pytest.mark.asyncio
async def test_no_memory_for_a_message_is_an_error_of_that_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int, pool: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    async with compressing("lz4") as pair:
        await pair.trip("hello")
        for posted in (True, False):
            receiving = pair.ba.recv(timeout=20) if posted else None
            with monkeypatch.context() as patch:
                patch.setattr(aiorlinf.link.incoming, "fresh_bytes", allocate)
                with pytest.raises(UsageError, match="no memory for a message of 100000 bytes"):
                    await pair.ab.send(dense(100_000), timeout=20)
            if receiving is not None:
                with pytest.raises(UsageError, match="no memory for a message of 100000 bytes"):
                    await receiving
        assert same(await pair.trip(dense(100_000)), dense(100_000))


@pytest.mark.asyncio
async def test_the_size_of_a_leaf_must_be_the_one_announced() -> None:
    """What is within the limits and lies about it: an error of that message, and nothing of the claimed size is allocated."""
    async with compressing("lz4") as pair:
        await pair.trip("hello")
        conn = link_of(pair.a)._conn
        assert conn is not None
        receiving = pair.ba.recv(timeout=20)
        ident, size = 10**6, 100_000
        entry = b"\0\0\1\5" + size.to_bytes(8, "little") + b"uint8" + size.to_bytes(8, "little")
        manifest = HEAD.pack(Kind.TENSOR, 0, 1, 0, len(entry)) + entry
        conn.send(frame(FrameType.OPEN, stream_key(0, 0), OPEN_PREFIX.pack(ident, size) + manifest, Flag.WANT_REPLY))
        conn.send(frame(FrameType.START, ident, Start(Via.CODED, place=pack_tried([True])).encode()))
        head = memoryview(LeafHeader(1, TB, None, MIB).encode())
        conn.send_chunk(ident, [head], len(head))
        conn.send(frame(FrameType.END, ident))
        with pytest.raises(WireError, match=f"a compressed tensor claims {TB} bytes, but 100000 were announced"):
            await receiving
        assert pool_of(pair.b).stats().leased_bytes <= size + 4096
        assert same(await pair.trip(dense(100_000)), dense(100_000))


@pytest.mark.asyncio
@pytest.mark.parametrize(("place", "said"), [(b"", "0 bytes say which of 1 leaves"), (b"\2", "more than 1 leaves")])
async def test_a_start_that_makes_no_sense_ends_the_link(place: bytes, said: str, complaints: list[str]) -> None:
    async with compressing("lz4") as pair:
        await pair.trip("hello")
        conn = link_of(pair.a)._conn
        assert conn is not None
        receiving = pair.ba.recv(timeout=20)
        entry = b"\0\0\1\5" + (10).to_bytes(8, "little") + b"uint8" + (10).to_bytes(8, "little")
        manifest = HEAD.pack(Kind.TENSOR, 0, 1, 0, len(entry)) + entry
        conn.send(frame(FrameType.OPEN, stream_key(0, 0), OPEN_PREFIX.pack(10**6, 10) + manifest, Flag.WANT_REPLY))
        conn.send(frame(FrameType.START, 10**6, Start(Via.CODED, place=place).encode()))
        with pytest.raises(WireError, match=said):
            await receiving
        with pytest.raises(PeerLost):
            await pair.ab.recv(timeout=20)
        assert same(await pair.trip(dense(100_000)), dense(100_000))
        complaints.clear()


@pytest.mark.asyncio
async def test_a_peer_that_compresses_for_one_who_does_not() -> None:
    async with compressing("lz4") as pair:
        await pair.trip("hello")
        receiver = link_of(pair.b).receiver
        receiver.coding = None
        receiving = pair.ba.recv(timeout=20)
        sending = pair.ab.send(dense(100_000), timeout=20)
        with pytest.raises(WireError, match="this side does not compress"):
            await receiving
        with pytest.raises(PeerLost):
            await sending
        assert await asyncio.wait_for(pair.trip("again"), 20) == "again"
