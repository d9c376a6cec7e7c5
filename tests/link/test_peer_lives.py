"""What is remembered of workers that are gone: little, for it is never forgotten, and addresses may be new ones for ever."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import Any

import pytest

from aiorlinf import Worker, init
from aiorlinf.address import WorkerAddress
from aiorlinf.errors import PeerError, PeerLeft, PeerLost, WireError
from aiorlinf.link.peer_lives import PeerLives
from aiorlinf.wire.frames import frame
from tests.manager.support import TOKEN, manager

__all__: list[str] = []

SMALL_BYTES = 512


def kept_bytes(lives: PeerLives) -> int:
    """By all that hangs on what is kept of ended lives; it is not looked further once that is too much."""
    found: dict[int, Any] = {}
    left: list[Any] = list(lives.ended.values())
    total = 0
    while left and total < SMALL_BYTES:
        obj = left.pop()
        if id(obj) not in found and not isinstance(obj, type):
            found[id(obj)] = obj
            total += sys.getsizeof(obj)
            left += gc.get_referents(obj)
    return total


def say_nonsense(worker: Worker, peer: str) -> None:
    """A frame that there is not; the peer ends the link over it."""
    link = worker._table.peek(WorkerAddress(peer))
    assert link is not None
    assert link._conn is not None
    link._conn.send(frame(99, 0))


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["it leaves", "its stream makes no sense"])
async def test_of_a_link_that_has_ended_nothing_but_a_few_words_is_kept(end: str) -> None:
    async with manager() as service, init("a:0", manager=service.address, token=TOKEN) as a:
        b = await init("b:0", manager=service.address, token=TOKEN)
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        gone = weakref.ref(a._table.peek(WorkerAddress("b:0")))
        waiting = a.recv("b:0")
        if end == "it leaves":
            await b.close()
        else:
            say_nonsense(b, "a:0")
        with pytest.raises((PeerError, WireError)) as caught:
            await asyncio.wait_for(waiting.async_wait(), 20)
        del waiting, caught
        await b.close()
        assert WorkerAddress("b:0") in a._table.lives.ended
        gc.collect()
        assert gone() is None
        assert kept_bytes(a._table.lives) < SMALL_BYTES
        with pytest.raises((PeerLeft, PeerLost), match=r"b:0#1 .*has not come back"):  # and yet it is known who it was
            await a.send(1, "b:0")
        async with init("b:0", manager=service.address, token=TOKEN) as again:
            await asyncio.gather(a.send(2, "b:0"), again.recv("a:0"))
            assert a._table.lives.ended == {}
