"""Making pairs of process groups over a link: real Gloo, both ends in this process, frames carried by the test."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from aiorlinf.backends.gloo import GlooPair
from aiorlinf.errors import AiorlinfError, BackendUnavailable, ClosedError, WireError
from aiorlinf.rendezvous.pairs import FAILED, OFFER, OUT, READY, SET, Pairs
from aiorlinf.rendezvous.store import PairStore
from aiorlinf.testing.procfs import open_descriptors
from aiorlinf.wire.frames import HEADER, FrameType
from aiorlinf.work.home import LoopHome
from tests.hypothesis_profiles import examples

__all__: list[str] = []


def gloo(store: PairStore, rank: int, timeout: float) -> GlooPair:
    return GlooPair(store, rank, "127.0.0.1", timeout)


class Ends:
    """Two ends of a link. `delay` holds frames up, in seconds; those for which `drop(flags)` holds are lost."""

    def __init__(self, home: LoopHome, timeout: float, make_a: Any = gloo, make_b: Any = gloo) -> None:
        self.loop = home.loop
        self.delay: Callable[[], float] = lambda: 0.0
        self.drop: Callable[[int], bool] = lambda flags: False
        self.frames: list[tuple[str, int, int]] = []
        self.a = Pairs(home, lambda data: self._carry("b", data), make_a, threshold=1, timeout=timeout, local="a:0", remote="b:0")
        self.b = Pairs(home, lambda data: self._carry("a", data), make_b, threshold=1, timeout=timeout, local="b:0", remote="a:0")
        self._last = 0.0

    def _carry(self, to: str, data: bytes) -> None:
        _, kind, flags, _, key = HEADER.unpack_from(data)
        assert kind == FrameType.PAIR
        self.frames.append((to, key, flags))
        if self.drop(flags):
            return
        end = self.a if to == "a" else self.b
        # Frames of a link keep their order.
        self._last = max(self._last, self.loop.time() + self.delay())
        self.loop.call_at(self._last, end.on_pair, key, flags, memoryview(data)[HEADER.size :])

    async def prepare(self, end: Pairs) -> AiorlinfError | None:
        """Make the outgoing pair of this end; why it cannot be had, or None."""
        done: asyncio.Future[AiorlinfError | None] = self.loop.create_future()
        end.prepare(done.set_result)
        return await done

    async def made(self, end: Pairs) -> int:
        assert await self.prepare(end) is None
        generation = end.ready()
        assert generation is not None
        return generation

    async def move(self, sender: Pairs, receiver: Pairs, generation: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Send these through the pair; what arrives."""
        out = [torch.zeros_like(tensor) for tensor in tensors]
        done: list[asyncio.Future[BaseException | None]] = [self.loop.create_future(), self.loop.create_future()]
        sender.send(generation, list(tensors), done[0].set_result)
        assert receiver.receive(generation, list(out), done[1].set_result)
        assert await asyncio.wait_for(asyncio.gather(*done), 20) == [None, None]
        return out


@contextlib.asynccontextmanager
async def ends(timeout: float = 10.0, **makers: Any) -> AsyncIterator[Ends]:
    """Both are closed at the end, and no thread of theirs goes on."""
    home = LoopHome(asyncio.get_running_loop(), name="test")
    made = Ends(home, timeout, **makers)
    try:
        yield made
    finally:
        made.a.close()
        made.b.close()
        await no_threads()
        await home.close()


async def no_threads() -> None:
    """Those of attempts and of groups that are being destroyed have ended."""
    end = time.monotonic() + 20
    while any(thread.name.startswith(("aiorlinf-pair", "aiorlinf-retire")) for thread in threading.enumerate()):
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def data(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(seed, seed + size, dtype=torch.int64).to(torch.uint8)


@pytest.mark.asyncio
async def test_a_pair_is_made_on_first_use_and_moves_bytes() -> None:
    async with ends() as both:
        assert both.a.ready() is None
        generation = await both.made(both.a)
        assert generation == 1
        sent = [data(1), data(70_000, 3), data(5_000_000, 7)]
        received = await both.move(both.a, both.b, generation, *sent)
        assert all(torch.equal(*pair) for pair in zip(sent, received, strict=True))
        assert both.b.ready() is None, "each direction has a pair of its own"


@pytest.mark.asyncio
async def test_both_directions_at_once() -> None:
    async with ends() as both:
        generations = await asyncio.gather(both.made(both.a), both.made(both.b))
        results = await asyncio.gather(
            *[both.move(both.a, both.b, generations[0], data(100_000, turn)) for turn in range(5)],
            *[both.move(both.b, both.a, generations[1], data(100_000, 50 + turn)) for turn in range(5)],
        )
        assert [int(result[0][0]) for result in results] == [*range(5), *range(50, 55)]


@pytest.mark.asyncio
async def test_transfers_keep_their_order() -> None:
    async with ends() as both:
        generation = await both.made(both.a)
        out = [torch.zeros(1000, dtype=torch.uint8) for _ in range(20)]
        done: list[asyncio.Future[BaseException | None]] = [both.loop.create_future() for _ in range(40)]
        for number in range(20):
            both.a.send(generation, [torch.full((1000,), number, dtype=torch.uint8)], done[number].set_result)
        for number in range(20):
            both.b.receive(generation, [out[number]], done[20 + number].set_result)
        assert await asyncio.wait_for(asyncio.gather(*done), 20) == [None] * 40
        assert [int(tensor[0]) for tensor in out] == list(range(20))
        assert all(bool((tensor == tensor[0]).all()) for tensor in out)


@pytest.mark.asyncio
async def test_all_who_ask_while_it_is_made_get_the_same_pair() -> None:
    async with ends() as both:
        assert await asyncio.gather(*[both.prepare(both.a) for _ in range(5)]) == [None] * 5
        assert both.a.ready() == 1
        assert [frame for frame in both.frames if frame[2] & OFFER] == [("b", 1, OFFER | OUT)]


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", ["everything", "offers", "addresses", "readiness"])
async def test_a_peer_that_does_not_answer_costs_the_time_limit_and_nothing_else(lost: str) -> None:
    before = open_descriptors()
    async with ends(timeout=0.3) as both:
        flag = {"everything": 0xFF, "offers": OFFER, "addresses": SET, "readiness": READY}[lost]
        both.drop = lambda flags: bool(flags & flag)
        begin = time.monotonic()
        waiting = both.loop.create_task(both.prepare(both.a))
        if lost == "readiness":
            # Both members exist; only the last word is missing, which a link does not lose: it ends instead.
            await asyncio.sleep(0.1)
            both.a.close()
            assert isinstance(await waiting, ClosedError)
        else:
            error = await waiting
            assert isinstance(error, BackendUnavailable)
            assert "a:0 waited for b:0" in error.candidates["gloo"]
            assert time.monotonic() - begin >= 0.25
        await no_threads()
        both.b.close()
        await no_threads()
    await asyncio.sleep(0.05)
    assert {what for what in open_descriptors().values() if "socket" in what} <= {what for what in before.values() if "socket" in what}


@pytest.mark.asyncio
async def test_after_a_failure_the_next_attempt_has_the_next_generation() -> None:
    async with ends(timeout=0.3) as both:
        both.drop = lambda flags: True
        assert await both.prepare(both.a) is not None
        both.drop = lambda flags: False
        both.a._timeout = both.b._timeout = 10.0
        generation = await both.made(both.a)
        assert generation == 2
        assert torch.equal((await both.move(both.a, both.b, generation, data(1000)))[0], data(1000))


@pytest.mark.asyncio
async def test_a_peer_that_cannot_make_its_member_says_why() -> None:
    def unable(store: PairStore, rank: int, timeout: float) -> GlooPair:
        raise RuntimeError("no such interface\nand a long C++ stack")

    async with ends(make_b=unable) as both:
        error = await both.prepare(both.a)
        assert isinstance(error, BackendUnavailable)
        assert error.candidates == {"gloo": "a:0 waited for b:0: b:0: no such interface"}
        assert both.a.ready() is None
    async with ends(make_a=unable) as both:
        error = await both.prepare(both.a)
        assert isinstance(error, BackendUnavailable)
        assert "no such interface" in error.candidates["gloo"]
        assert "C++" not in str(error)


@pytest.mark.asyncio
async def test_a_late_peer() -> None:
    """Each attempt has a limit that the peer meets or not; in the end nothing is left but the pairs that were made."""
    attempts = examples(10)
    chance = random.Random(7)
    outcomes = []
    async with ends(timeout=0.15) as both:
        both.delay = lambda: chance.uniform(0.0, 0.08)
        for _ in range(attempts):
            error = await both.prepare(both.a)
            outcomes.append(error is None)
            generation = both.a.ready()
            if generation is not None:
                both.delay = lambda: 0.0
                assert torch.equal((await both.move(both.a, both.b, generation, data(100)))[0], data(100))
                both.delay = lambda: chance.uniform(0.0, 0.08)
                both.a.drop_out(generation, "the test wants another")
        both.delay = lambda: 0.0
        both.a._timeout = both.b._timeout = 10.0
        generation = await both.made(both.a)
        assert generation == attempts + 1
        assert torch.equal((await both.move(both.a, both.b, generation, data(100)))[0], data(100))


@pytest.mark.asyncio
@pytest.mark.parametrize("who", ["a", "b"])
async def test_the_end_of_the_link_fails_what_is_under_way(who: str) -> None:
    async with ends() as both:
        generation = await both.made(both.a)
        sent: asyncio.Future[BaseException | None] = both.loop.create_future()
        received: asyncio.Future[BaseException | None] = both.loop.create_future()
        if who == "b":
            both.a.send(generation, [data(5_000_000)], sent.set_result)
            both.b.close()
            assert isinstance(await asyncio.wait_for(sent, 20), BaseException)
            assert both.a.ready() is None, "the next use makes a new one"
        else:
            assert both.b.receive(generation, [torch.zeros(100, dtype=torch.uint8)], received.set_result)
            both.a.close()
            assert isinstance(await asyncio.wait_for(received, 20), BaseException)
            assert not both.b.receive(generation, [torch.zeros(100, dtype=torch.uint8)], lambda error: None)


@pytest.mark.asyncio
async def test_a_generation_that_is_gone_is_not_used() -> None:
    async with ends() as both:
        generation = await both.made(both.a)
        assert not both.b.receive(generation + 1, [], lambda error: None)
        both.a.drop_out(generation - 1, "an older one")
        assert both.a.ready() == generation
        both.a.drop_out(generation, "broken")
        assert both.a.ready() is None
        told: list[BaseException | None] = []
        both.a.send(generation, [data(1)], told.append)
        assert [type(error) for error in told] == [BackendUnavailable]
        assert await both.made(both.a) == generation + 1
        assert not both.b.receive(generation, [], lambda error: None)


@pytest.mark.asyncio
async def test_closing_while_a_pair_is_made_ends_the_waiting_at_once() -> None:
    async with ends(timeout=30.0) as both:
        both.drop = lambda flags: bool(flags & OFFER)
        waiting = both.loop.create_task(both.prepare(both.a))
        await asyncio.sleep(0.02)
        both.a.close()
        assert isinstance(await asyncio.wait_for(waiting, 5), ClosedError)
        await asyncio.wait_for(no_threads(), 5)
        assert isinstance(await both.prepare(both.a), ClosedError)


@pytest.mark.asyncio
@pytest.mark.parametrize("who", ["owner", "receiver"])
@pytest.mark.parametrize("address", ["127.0.0.0", "127.9.9.9"])
async def test_no_thread_outlives_a_link_whose_peer_died_while_they_met(who: str, address: str) -> None:
    """The peer has published where it listens, and is gone: Gloo would wait for its connection."""

    def publish_and_die(store: PairStore, rank: int, timeout: float) -> GlooPair:
        class Echo(PairStore):
            def set(self, key: str, value: Any) -> None:
                own, there = socket.inet_aton("127.0.0.1"), socket.inet_aton(address)
                store.set(key, bytes(value).replace(own, there))
                raise RuntimeError("died")

        with contextlib.suppress(RuntimeError):
            GlooPair(Echo(lambda key, value: None, 1.0, "nobody"), rank, "127.0.0.1", 1.0)
        time.sleep(0.3)  # the link's end is what the other side hears first
        raise RuntimeError("died")

    async with ends(timeout=30.0, **{"make_b" if who == "owner" else "make_a": publish_and_die}) as both:
        asking = both.loop.create_task(both.prepare(both.a))
        await asyncio.sleep(0.15)
        (both.a if who == "owner" else both.b).close()
        await asyncio.wait_for(no_threads(), 10)
        both.a.close()
        assert isinstance(await asking, AiorlinfError)


@pytest.mark.asyncio
async def test_a_home_that_is_gone_meanwhile_is_no_error() -> None:
    go = threading.Event()
    retired: list[int] = []

    class Member:
        def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None: ...

        def retire(self) -> None:
            retired.append(1)

    def slow(store: PairStore, rank: int, timeout: float) -> Member:
        assert go.wait(10)
        return Member()

    def inner() -> None:
        async def main() -> None:
            home = LoopHome(asyncio.get_running_loop(), name="inner")
            both = Ends(home, 10.0, slow, slow)
            both.a.prepare(lambda error: None)
            await asyncio.sleep(0.01)
            await home.close()

        asyncio.run(main())

    await asyncio.to_thread(inner)
    go.set()
    await no_threads()
    assert retired == [1, 1]


# ---- what a peer must not do


def frame_body(*parts: bytes) -> memoryview:
    return memoryview(b"\0".join(parts))


@pytest.mark.asyncio
async def test_words_out_of_turn_are_errors_of_the_protocol() -> None:
    async with ends() as both:
        await both.made(both.a)
        for flags in (OFFER, OFFER | OUT):
            with pytest.raises(WireError, match="is offered after"):
                both.b.on_pair(1, flags, memoryview(b""))
        with pytest.raises(WireError, match="flags"):
            both.b.on_pair(1, OUT, memoryview(b""))
        with pytest.raises(WireError, match="too much is published"):
            both.b.on_pair(1, SET | OUT, frame_body(b"key", bytes(100_000)))
        with pytest.raises(WireError, match="too much is published"):
            for number in range(100):
                both.b.on_pair(1, SET | OUT, frame_body(b"key%d" % number, b"x"))


@pytest.mark.asyncio
async def test_words_of_older_attempts_are_ignored() -> None:
    async with ends() as both:
        generation = await both.made(both.a)
        both.a.drop_out(generation, "the test wants another")
        generation = await both.made(both.a)
        for flags in (SET, READY, FAILED):
            both.a.on_pair(generation - 1, flags, frame_body(b"key", b"value"))
            both.b.on_pair(generation - 1, flags | OUT, frame_body(b"key", b"value"))
        assert both.a.ready() == generation
        assert torch.equal((await both.move(both.a, both.b, generation, data(10)))[0], data(10))
