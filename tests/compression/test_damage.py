"""Damage on the way: an error of the one message, on both sides, and nothing grows."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aiorlinf.errors import AiorlinfError, RemoteError, WireError
from tests.codec.material import MIB, dense, resident
from tests.compression.conftest import Pair, compressing, link_of, pool_of, same
from tests.hypothesis_profiles import examples


class Flipper:
    """Between the pump and its connection: flips one bit of the payload of each message that it is told to."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self.flips: int | None = None  # which bit
        self.of: int | None = None  # of which message; None: the first whose payload comes
        self._seen = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def arm(self, bit: int, of: int | None = None) -> None:
        self.flips, self.of, self._seen = bit, of, 0

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None:
        if self.of not in (None, message_id):
            self._conn.send_chunk(message_id, pieces, size)
            return
        self.of = message_id
        if self.flips is not None and self.flips < (self._seen + size) * 8:
            data = bytearray(b"".join(pieces))
            place = self.flips - self._seen * 8
            data[place // 8] ^= 1 << place % 8
            pieces = [memoryview(data)]
            self.flips = None
        self._seen += size
        self._conn.send_chunk(message_id, pieces, size)


def flipper_of(pair: Pair) -> Flipper:
    """From now on damages what `a` sends."""
    pump = link_of(pair.a).sender.pump
    flipper: Any = Flipper(pump._conn)
    pump._conn = flipper
    made: Flipper = flipper
    return made


async def refused(pair: Pair, obj: Any, *, posted: bool) -> tuple[AiorlinfError, AiorlinfError]:
    """Send it; the errors of both sides."""
    receiving = pair.ba.recv(timeout=20) if posted else None
    with pytest.raises(RemoteError) as sender:
        await pair.ab.send(obj, timeout=20)
    with pytest.raises(WireError) as receiver:
        await (receiving or pair.ba.recv(timeout=20))
    return sender.value, receiver.value


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_frames_with_one_flipped_bit(codec: str) -> None:
    """A thousand in all, over both codecs and both loops."""
    rng = random.Random(1)
    count = examples(250)
    async with compressing(codec) as pair:
        frames = dense(28_224)
        await pair.trip(frames)
        flipper = flipper_of(pair)
        size = pair.sent()["bytes_after"]
        before = 0
        for index in range(count):
            flipper.arm(rng.randrange(size * 8))
            sender, receiver = await refused(pair, frames, posted=bool(index % 3))
            assert "the payload arrived damaged: " in str(sender)
            assert "with a:0, tag 0" in str(receiver)
            if index % 10 == 0:
                assert same(await pair.trip(frames), frames)
            if index == count // 3:
                del sender, receiver
                gc.collect()
                before = resident()
        gc.collect()
        assert resident() - before < 8 * MIB
        assert same(await pair.trip(frames), frames)
        for side in (pair.a, pair.b):
            link = link_of(side)
            assert (link.sender.pending, link.receiver.opened) == ({}, {})
            assert pool_of(side).stats().leased_bytes == 0


@pytest.mark.asyncio
async def test_damage_to_one_leaf_of_many_and_to_one_chunk_of_many() -> None:
    rng = random.Random(2)
    obj = {"a": dense(3 * MIB), "b": torch.zeros(2 * MIB, dtype=torch.uint8), "c": dense(20_000)}
    async with compressing("lz4", collective={"chunk_bytes": 100_000}) as pair:
        await pair.trip(obj)
        size = pair.sent()["bytes_after"]
        flipper = flipper_of(pair)
        for _ in range(20):
            flipper.arm(rng.randrange(size * 8))
            await refused(pair, obj, posted=True)
            assert same(await pair.trip(obj), obj)


@pytest.mark.asyncio
async def test_others_on_the_same_link_do_not_notice() -> None:
    async with compressing("zstd") as pair:
        await pair.trip("hello")
        flipper = flipper_of(pair)
        data = dense(200_000)
        flipper.arm(8 * 500, of=link_of(pair.a).sender._next_id)
        damaged = pair.ab.send(data, tag=1)
        good = [pair.ab.send(data, tag=tag) for tag in (2, 3)]
        for tag in (3, 2):
            assert same(await pair.ba.recv(tag=tag, timeout=20), data)
        with pytest.raises(WireError):
            await pair.ba.recv(tag=1, timeout=20)
        with pytest.raises(RemoteError):
            await damaged
        for work in good:
            await work


@pytest.mark.asyncio
async def test_a_damaged_message_that_its_sender_cancels_or_whose_receive_is_cancelled() -> None:
    async with compressing("lz4") as pair:
        await pair.trip("hello")
        flipper = flipper_of(pair)
        flipper.arm(8 * 100)
        sending = pair.ab.send(dense(200_000))
        receiving = pair.ba.recv()
        receiving.cancel()
        with pytest.raises(WireError):
            await pair.ba.recv(timeout=20)
        with pytest.raises(RemoteError):
            await sending
        flipper.arm(8 * 100)
        assert pair.ab.send(dense(200_000)).cancel()
        await pair.trip("after", tag=1)
        flipper.flips = None
        assert same(await pair.trip(dense(100_000)), dense(100_000))
