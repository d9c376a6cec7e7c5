"""Parcels on one host: the memory of the producer p:0 goes through f:0 to c:0 without a copy, and comes back when nobody looks at it.

The workers are real, and all in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from aiorlinf import Worker, init
from aiorlinf.backends.shm.arena import ArenaStats
from aiorlinf.errors import PeerLost, RemoteError, UsageError
from aiorlinf.link.link import Link
from aiorlinf.link.parcel import Parcel
from tests.cases.sameness import assert_same
from tests.system import memory_file_at, memory_file_mappings, no_more_descriptors, soon

MIB = 1 << 20
SIZE = 1 << 18


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory must come back without one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@dataclasses.dataclass
class Row:
    data: torch.Tensor
    name: str = "row"


class Cast:
    """The workers of a test, by their letters."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}

    def __getitem__(self, letter: str) -> Worker:
        return self.workers[letter]

    def link(self, of: str, to: str) -> Link:
        link = self[of]._table.peek(self[to].address)
        assert link is not None
        return link

    def arena(self, of: str) -> ArenaStats:
        stats = self[of].stats().shared_memory
        assert stats is not None
        return stats

    async def parcel(self, obj: Any, source: str = "p", to: str = "f") -> Parcel:
        """What one sends, received by the other and not looked into."""
        receiver = self[to]._exchange
        work = receiver.recv_parcel(self[source].address, 0, 0, 20)
        sent = self[source].send(obj, self[to].address)
        parcel = await work
        await sent
        return parcel

    async def hand_on(self, parcel: Parcel, source: str = "f", to: str = "c") -> Parcel:
        """From one who passes on to another."""
        work = self[to]._exchange.recv_parcel(self[source].address, 0, 0, 20)
        await self[source]._exchange.send_parcel(self[to].address, 0, 0, parcel)
        return await work

    async def hand_over(self, parcel: Parcel, source: str = "f", to: str = "c", *, keep: bool = False) -> Any:
        """To one who uses it."""
        work = self[to].recv(self[source].address, timeout=20)
        await self[source]._exchange.send_parcel(self[to].address, 0, 0, parcel, keep=keep)
        return await work

    async def all_is_free(self) -> None:
        """Nobody holds anything of anybody."""

        def free() -> bool:
            stats = [worker.stats() for worker in self.workers.values()]
            arenas = [each.shared_memory for each in stats]
            return all(arena is not None and arena.used_bytes == 0 for arena in arenas) and not any(
                link.shared_bytes_lent or link.shared_bytes_held for each in stats for link in each.links
            )

        await soon(free)


@contextlib.asynccontextmanager
async def cast_of(letters: str, **collective: Any) -> AsyncIterator[Cast]:
    config = {"cluster": {"collective": {"shared_memory": {"segment_bytes": 32 * MIB}, **collective}}}
    cast = Cast()
    async with contextlib.AsyncExitStack() as stack:
        for letter in letters:
            cast.workers[letter] = await stack.enter_async_context(init(f"{letter}:0", config=config))
        for letter in letters:
            cast[letter]._table.pass_on()
        yield cast


@pytest_asyncio.fixture
async def cast() -> AsyncIterator[Cast]:
    async with cast_of("pfc") as made:
        yield made


def shared(tensor: torch.Tensor) -> bool:
    return memory_file_at(tensor.data_ptr(), tensor.nbytes)


# ---- one copy in all


@pytest.mark.asyncio
async def test_the_consumer_gets_the_producers_memory(cast: Cast) -> None:
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    got = await cast.hand_over(parcel)
    assert shared(got)
    assert (got == 3).all()
    assert cast.arena("f").bytes == 0, "the one in the middle has not copied"
    assert cast.link("f", "c").stats().around_bytes_sent == 4 * SIZE
    assert parcel.closed
    got += 1
    assert (got == 4).all(), "it is writable"
    for of, to in ("pf", "fc"):
        assert cast.link(of, to).stats().shared_bytes_lent == cast.link(to, of).stats().shared_bytes_held == 4 * SIZE
    assert cast.arena("p").used_bytes == 4 * SIZE
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_steady_traffic_makes_one_segment_known_to_all(cast: Cast) -> None:
    for number in range(50):
        got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), float(number))))
        assert (got == number).all()
        del got
    await cast.all_is_free()
    assert (cast.arena("p").segments, cast.arena("f").segments) == (1, 0)
    assert len(memory_file_mappings()) == 3


OBJECTS: dict[str, Any] = {
    "tensor": torch.randn(SIZE),
    "bool": torch.randn(SIZE) > 0,
    "list": [torch.randn(SIZE), torch.zeros(0), torch.tensor(2.0)],
    "twice": [*[torch.ones(SIZE)] * 2],
    "dict": {"x": torch.randn(SIZE), "y": torch.arange(70_000).bfloat16()},
    "parameter": torch.nn.Parameter(torch.randn(SIZE)),
    "dataclass": Row(torch.randn(SIZE)),
    "array": np.arange(SIZE).reshape(64, -1),
    "bytes": bytes(range(256)) * 1024,
    "deep": {"rows": [Row(torch.randn(SIZE)), {"raw": bytearray(MIB)}], "text": "text" * SIZE},
}


@pytest.mark.asyncio
async def test_every_kind_of_object_is_handed_over(cast: Cast) -> None:
    for obj in OBJECTS.values():
        got = await cast.hand_over(await cast.parcel(obj))
        assert_same(got, obj)
        del got
        assert cast.arena("f").bytes == 0
        await cast.all_is_free()


@pytest.mark.asyncio
async def test_a_gift_goes_on_as_it_lies(cast: Cast) -> None:
    gift = cast["p"].empty(SIZE)
    gift.fill_(1)
    other = cast["p"].empty(2 * SIZE)
    other.fill_(2)
    misses = cast.arena("p").misses
    got = await cast.hand_over(await cast.parcel({"gift": gift, "copied": torch.full((SIZE,), 3.0), "other": other}))
    assert [float(got[name][0]) for name in ("gift", "copied", "other")] == [1, 3, 2]
    assert all(map(shared, got.values()))
    assert cast.arena("f").bytes == 0
    assert cast.arena("p").used_bytes == 16 * SIZE
    # Each comes back alone, through the one in the middle.
    del got["other"]
    await soon(lambda: cast.arena("p").used_bytes == 8 * SIZE)
    del got["copied"]
    await soon(lambda: cast.arena("p").used_bytes == 4 * SIZE)
    assert (got["gift"] == 1).all()
    del got, gift, other
    await cast.all_is_free()
    assert cast.arena("p").misses == misses


@pytest.mark.asyncio
async def test_through_a_long_chain() -> None:
    async with cast_of("pfghc") as cast:
        for number in range(5):
            parcel = await cast.parcel({"x": torch.full((SIZE,), float(number)), "n": number})
            for source, to in ("fg", "gh"):
                parcel = await cast.hand_on(parcel, source, to)
            got = await cast.hand_over(parcel, "h", "c")
            assert shared(got["x"])
            assert float(got["x"].sum()) == number * SIZE
            assert [cast.arena(letter).bytes for letter in "fgh"] == [0] * 3
            assert cast.arena("p").used_bytes == 4 * SIZE
            del got
            await cast.all_is_free()


@pytest.mark.asyncio
async def test_back_to_where_it_came_from(cast: Cast) -> None:
    parcel = await cast.hand_on(await cast.parcel(torch.full((SIZE,), 5.0)), "f", "p")
    got = await cast.hand_over(parcel, "p", "f")
    assert (got == 5).all()
    assert cast.arena("p").used_bytes == 4 * SIZE
    assert cast.arena("f").bytes == 0
    got.fill_(6)
    del got, parcel
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_to_oneself(cast: Cast) -> None:
    got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), 5.0)), "f", "f")
    assert (got == 5).all()
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_a_parcel_that_is_thrown_away_gives_its_memory_back(cast: Cast) -> None:
    parcels = [await cast.parcel(torch.ones(SIZE)) for _ in range(3)]
    assert cast.arena("p").used_bytes == 12 * SIZE
    parcels.pop().close()
    await soon(lambda: cast.arena("p").used_bytes == 8 * SIZE)
    parcels.clear()
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_a_parcel_that_is_given_back_is_still_handed_over(cast: Cast) -> None:
    exchange = cast["f"]._exchange
    work = exchange.recv_parcel(cast["p"].address, 0, 0)
    sent = cast["p"].send(torch.full((SIZE,), 7.0), "f:0")
    await sent
    await soon(work.done)
    assert work.cancel()
    parcel = await exchange.recv_parcel(cast["p"].address, 0, 0)
    got = await cast.hand_over(parcel)
    assert shared(got)
    assert (got == 7).all()
    assert cast.arena("f").bytes == 0
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_decoded_where_it_is(cast: Cast) -> None:
    parcel = await cast.parcel(torch.full((SIZE,), 7.0))
    got = cast["f"]._exchange.decode_parcel(parcel)
    assert shared(got)
    del got
    await cast.all_is_free()


# ---- keeping


@pytest.mark.asyncio
async def test_who_keeps_a_parcel_gives_copies(cast: Cast) -> None:
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    for _ in range(2):
        got = await cast.hand_over(parcel, keep=True)
        assert shared(got)
        assert (got == 3).all()
        got.fill_(9)
    assert cast.arena("f").misses == 1
    got = await cast.hand_over(parcel)
    assert (got == 3).all()
    assert cast.arena("f").used_bytes == 0 or cast.arena("f").misses == 1
    del got
    await cast.all_is_free()


# ---- segments come and go


@pytest.mark.asyncio
async def test_a_segment_that_the_producer_drops_is_dropped_by_all(cast: Cast) -> None:
    got = await cast.hand_over(await cast.parcel(torch.ones(SIZE)))
    del got
    await cast.all_is_free()
    assert len(memory_file_mappings()) == 3
    memory = cast["p"]._table.memory
    assert memory is not None
    memory.arena.trim()
    await soon(lambda: memory_file_mappings() == [])
    assert cast.link("f", "c").shared_out._names == {}  # type: ignore[union-attr]
    got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), 2.0)))
    assert (got == 2).all()
    assert shared(got)
    assert cast.arena("f").bytes == 0


@pytest.mark.asyncio
async def test_without_room_for_descriptors_the_one_in_the_middle_copies(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.link.loan._SHARE_OF_DESCRIPTORS", 1 << 30)
    got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), 3.0)))
    assert (got == 3).all()
    assert shared(got)
    assert cast.arena("f").used_bytes == 4 * SIZE
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_who_does_not_pass_on_keeps_no_descriptors() -> None:
    async with init("a:0") as a, init("b:0") as b:
        sent = a.send(torch.ones(SIZE), "b:0")
        got = await b.recv("a:0")
        await sent
        memory = b._table.memory
        assert memory is not None
        assert memory.keeper._kept == 0
        del got


@pytest.mark.asyncio
async def test_a_consumer_without_descriptors_gets_it_over_the_stream(cast: Cast) -> None:
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    got = await cast.hand_over(await cast.parcel(torch.ones(10)))  # their link is up
    work = cast["c"].recv("f:0", timeout=20)
    with no_more_descriptors():
        sent = cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
        got = await work
        await sent
    assert (got == 3).all()
    assert not shared(got)
    assert parcel.closed
    await cast.all_is_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["stream", "gloo"])
async def test_another_way_reads_from_the_producers_memory(backend: Any) -> None:
    async with init("p:0") as p, init("f:0", backend=backend) as f, init("c:0") as c:
        cast = Cast()
        cast.workers = {"p": p, "f": f, "c": c}
        f._table.pass_on()
        for obj in OBJECTS.values():
            parcel = await cast.parcel(obj)
            assert cast.arena("p").used_bytes > 0
            got = await cast.hand_over(parcel)
            assert_same(got, obj)
            del got
            await cast.all_is_free()
        assert cast.arena("f").misses == 0


@pytest.mark.asyncio
async def test_what_was_compressed_is_compressed_again() -> None:
    compression = {"codec": "lz4", "min_bytes": 1024}
    async with cast_of("pfc", backend="stream", tensor_compression=compression) as cast:
        obj = {"even": torch.zeros(SIZE, dtype=torch.int64), "odd": torch.randn(SIZE)}
        assert_same(await cast.hand_over(await cast.parcel(obj)), obj)
        for of, to in ("pf", "fc"):
            stats = cast.link(of, to).stats().compression
            assert stats is not None
            assert (stats["tensors"], stats["bytes_before"]) == (1, 8 * SIZE)
            assert stats["bytes_after"] < SIZE


# ---- failures


@pytest.mark.asyncio
async def test_a_refused_parcel_can_be_handed_to_another(cast: Cast) -> None:
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    out = torch.zeros(SIZE)
    work = cast["c"].recv_tensor(out, "f:0", timeout=20)
    with pytest.raises(UsageError, match="recv_tensor"):
        await cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
    with pytest.raises(UsageError):
        await work
    assert not parcel.closed
    assert not parcel.uncertain
    await soon(lambda: cast.link("f", "c").stats().shared_bytes_lent == 0)
    got = await cast.hand_over(parcel)
    assert (got == 3).all()
    assert cast.arena("f").bytes == 0
    del got
    await cast.all_is_free()


class Odd:
    """It can be made here, and not there."""

    broken = False

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __setstate__(self, state: Any) -> None:
        if Odd.broken:
            raise ValueError("not here")
        self.__dict__.update(state)


@pytest.mark.asyncio
async def test_a_parcel_that_a_consumer_cannot_rebuild_can_be_handed_to_another(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = await cast.parcel(Odd(torch.full((SIZE,), 3.0)))
    with monkeypatch.context() as patch:
        patch.setattr(Odd, "broken", True)
        # Without a receive there it would be done when it is there.
        work = cast["c"].recv("f:0", timeout=20)
        with pytest.raises(RemoteError, match="not here"):
            await cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
        with pytest.raises(Exception, match="not here"):
            await work
    assert not parcel.uncertain
    del work
    gc.collect()  # the errors refer to the frames that had the memory
    got = await cast.hand_over(parcel)
    assert (got.data == 3).all()
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_the_producer_leaves_while_others_hold_its_memory(cast: Cast) -> None:
    first = await cast.parcel(torch.full((SIZE,), 1.0))
    second = await cast.parcel(torch.full((SIZE,), 2.0))
    got = await cast.hand_over(first)
    await cast["p"].close()
    await soon(lambda: cast["f"]._table.peek(cast["p"].address) is None)
    later = await cast.hand_over(second)
    assert (got == 1).all()
    assert (later == 2).all()
    assert shared(later)
    assert cast.arena("f").bytes == 0
    got += later
    del got, later
    del cast.workers["p"]
    await cast.all_is_free()
    await soon(lambda: memory_file_mappings() == [])


@pytest.mark.asyncio
async def test_the_one_in_the_middle_leaves(cast: Cast) -> None:
    got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), 1.0)))
    queued = await cast.parcel(torch.full((SIZE,), 2.0))
    await cast["f"].close()
    del cast.workers["f"]
    await soon(lambda: cast.arena("p").used_bytes == 0)
    assert not queued.closed
    # The segment is retired: nobody writes to what the consumer has.
    async with init("d:0") as d:
        for number in range(10):
            sent = cast["p"].send(torch.full((SIZE,), float(number)), "d:0")
            assert (await d.recv("p:0", timeout=20) == number).all()
            await sent
    assert (got == 1).all()
    del got, queued
    await soon(lambda: len(memory_file_mappings()) == 1)


@pytest.mark.asyncio
async def test_the_consumer_leaves_without_a_word_and_may_still_look(cast: Cast) -> None:
    got = await cast.hand_over(await cast.parcel(torch.full((SIZE,), 1.0)))
    await cast["c"].close()
    del cast.workers["c"]
    await cast.all_is_free()
    assert cast.arena("p").segments == 0, "it was told through the one in the middle that this memory must be left alone"
    for number in range(5):
        (await cast.parcel(torch.full((SIZE,), float(number)))).close()
    assert (got == 1).all()
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_a_consumer_at_the_end_of_a_chain_leaves() -> None:
    async with cast_of("pfgc") as cast:
        parcel = await cast.hand_on(await cast.parcel(torch.full((SIZE,), 1.0)), "f", "g")
        got = await cast.hand_over(parcel, "g", "c")
        await cast["c"].close()
        del cast.workers["c"]
        await cast.all_is_free()
        assert cast.arena("p").segments == 0
        assert (got == 1).all()
        del got, parcel


@pytest.mark.asyncio
async def test_a_link_that_is_lost_before_the_answer_leaves_the_parcel_whole_but_uncertain(cast: Cast) -> None:
    await cast.hand_over(await cast.parcel(torch.ones(10)))
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    work = cast["c"].recv("f:0", timeout=20)
    sent = cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
    assert cast.link("f", "c").shared_out.lent_bytes == 4 * SIZE  # type: ignore[union-attr]
    cast.link("f", "c").end(lambda: PeerLost("cut"))
    with pytest.raises(PeerLost):
        await sent
    assert parcel.uncertain
    with contextlib.suppress(PeerLost):
        await work
    async with init("d:0") as d:
        cast.workers["d"] = d
        got = await cast.hand_over(parcel, "f", "d")
        assert (got == 3).all()
        assert shared(got)
        assert cast.arena("f").used_bytes == 4 * SIZE, "who was lost may still look at the producer's memory"
        await soon(lambda: cast.arena("p").segments == 0)
        del got, work, cast.workers["d"]
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_a_cancelled_send_leaves_the_parcel_whole(cast: Cast) -> None:
    await cast.hand_over(await cast.parcel(torch.ones(10)))
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    sent = cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
    assert sent.cancel()
    assert parcel.uncertain
    assert not parcel.closed
    await soon(lambda: cast.link("f", "c").stats().shared_bytes_lent == 0)
    got = await cast.hand_over(parcel)
    assert (got == 3).all()
    assert cast.arena("f").bytes == 0, "it has come back, so it could be handed over after all"
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_what_was_cancelled_and_is_not_back_yet_is_copied(cast: Cast) -> None:
    await cast.hand_over(await cast.parcel(torch.ones(10)))
    parcel = await cast.parcel(torch.full((SIZE,), 3.0))
    sent = cast["f"]._exchange.send_parcel(cast["c"].address, 0, 0, parcel)
    assert sent.cancel()
    got = await cast.hand_over(parcel)
    assert (got == 3).all()
    assert cast.arena("f").used_bytes == 4 * SIZE
    del got
    await cast.all_is_free()


@pytest.mark.asyncio
async def test_many_at_once_under_load(cast: Cast) -> None:
    count = 200

    async def produce() -> None:
        for number in range(count):
            await cast["p"].send([number, torch.full((30_000 + number * 100,), float(number))], "f:0")

    async def relay() -> None:
        exchange = cast["f"]._exchange
        passed = []
        for _ in range(count):
            parcel = await exchange.recv_parcel(cast["p"].address, 0, 0, 20)
            passed.append(exchange.send_parcel(cast["c"].address, 0, 0, parcel))
        await asyncio.gather(*passed)

    async def consume() -> None:
        kept = []
        for number in range(count):
            index, tensor = await cast["c"].recv("f:0", timeout=20)
            assert index == number
            kept.append((index, tensor))
            if len(kept) > 7:
                index, tensor = kept.pop(number % 7)
                assert (tensor == index).all()
        assert all((tensor == index).all() for index, tensor in kept)

    await asyncio.gather(produce(), relay(), consume())
    await cast.all_is_free()
    assert cast.arena("f").bytes == 0
