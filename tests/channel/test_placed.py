"""Large items that stay in shared memory: one copy in all, and what happens when a memory file is not there or somebody looks at it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiorlinf
from aiorlinf.backends.shm.arena import Arena
from aiorlinf.errors import ChannelClosed
from aiorlinf.link import lending, packing
from aiorlinf.link.shared import SharedOut
from aiorlinf.link.shared_in import SharedIn
from tests.cases.sameness import all_dtypes, assert_same, sample
from tests.channel.places import Place, place

if TYPE_CHECKING:
    from aiorlinf.wire.leaves import Leaf

__all__: list[str] = []

pytestmark = pytest.mark.asyncio

SIZE = 1 << 16  # float32: 256 KiB


def tensor(number: int) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


async def warm(put: aiorlinf.Channel, get: aiorlinf.Channel) -> None:
    """The memory files are there, and everybody has them."""
    for _ in range(3):
        await put.put(tensor(-1))
        await get.get()
    gc.collect()


def copies_of_host(here: Place) -> int:
    assert here.host is not None
    stats = here.host.exchange.table.memory.arena.stats()  # type: ignore[union-attr]  # there is one
    return stats.hits + stats.misses


async def given_back(worker: aiorlinf.Worker) -> None:
    """Nobody holds memory of this worker any more."""
    memory = worker._table.memory
    assert memory is not None
    while memory.arena.stats().used_bytes:
        gc.collect()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["get", "batch", "lease", "prefetch", "cancelled"])
async def test_the_channel_worker_copies_nothing(how: str) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        before = copies_of_host(here)
        for number in range(4):
            await put.put([tensor(number), "small"])
        got: list[Any] = []
        if how == "get":
            got = [await get.get() for _ in range(4)]
        elif how == "batch":
            got = await get.get_batch(4)
        elif how == "prefetch":
            async with get.prefetch(3) as ahead:
                got = [await anext(ahead) for _ in range(4)]
        elif how == "cancelled":
            work = get.get()
            while not work.done():
                await asyncio.sleep(0)
            work.cancel()
            got = [await get.get() for _ in range(4)]
        else:
            for _ in range(4):
                async with get.lease() as item:
                    got.append([item[0].clone(), item[1]])
                    item[0].zero_()
                del item
        assert [float(each[0].sum()) / SIZE for each in got] == [0.0, 1.0, 2.0, 3.0]
        got[0][0].add_(1)  # it is ours
        assert how == "cancelled" or copies_of_host(here) == before
        got.clear()
        await given_back(here.workers[0])


async def test_a_memory_file_that_the_channel_worker_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted", maxsize=3) as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        hold = SharedIn.hold
        dice = iter([False, True, False, True, True, False])
        monkeypatch.setattr(SharedIn, "hold", lambda self, *args: hold(self, *args) if next(dice, True) else None)
        works = [put.put(tensor(number)) for number in range(6)]
        assert [float((await get.get())[0]) for _ in range(6)] == [float(number) for number in range(6)]
        for work in works:
            await work
        await given_back(here.workers[0])


@pytest.mark.parametrize("how", ["get", "batch", "lease"])
async def test_a_memory_file_that_a_consumer_has_not(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        for number in range(4):
            await put.put(tensor(number))

        def lost(self: SharedIn, sizes: Any, body: memoryview, then: Any, **options: Any) -> None:
            self.refuse(body, sizes)
            then(None)

        monkeypatch.setattr(SharedIn, "stores", lambda self, *args: None)
        monkeypatch.setattr(SharedIn, "place", lost)
        got: list[float] = []
        if how == "batch":
            got = [float(each[0]) for each in await get.get_batch(4)]
        while len(got) < 4:
            if how == "lease":
                async with get.lease() as item:
                    got.append(float(item[0]))
            else:
                got.append(float((await get.get())[0]))
        assert got == [0.0, 1.0, 2.0, 3.0]
        monkeypatch.undo()
        await put.close()
        with pytest.raises(ChannelClosed):
            await get.get()
        await given_back(here.workers[0])


async def test_a_cancelled_get_whose_file_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        work = get.get()

        def lost(self: SharedIn, sizes: Any, body: memoryview, then: Any, **options: Any) -> None:
            self.refuse(body, sizes)
            then(None)
            work.cancel()

        monkeypatch.setattr(SharedIn, "stores", lambda self, *args: None)
        monkeypatch.setattr(SharedIn, "place", lost)
        await put.put(tensor(5))
        while not work.done():
            await asyncio.sleep(0)
        monkeypatch.undo()
        assert float((await get.get())[0]) == 5.0
        assert await get.empty()
        await given_back(here.workers[0])


async def test_what_one_still_looks_at_is_copied_for_the_next() -> None:
    async with place("hosted") as here:
        put, one, two = await here.handle(), await here.handle(), await here.handle()
        await warm(put, one)
        await warm(put, two)
        await put.put(tensor(1))
        lease = one.lease(seconds=0.02)
        item = await lease.__aenter__()
        again = await two.get(timeout=10)
        again.fill_(7)
        item[:10].fill_(3)
        assert (float(item[0]), float(item[-1]), float(again[0])) == (3.0, 1.0, 7.0)
        await lease.__aexit__(None, None, None)
        del item, again
        await given_back(here.workers[0])


async def test_a_tensor_that_is_written_to_while_it_is_copied_is_not_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread does so, say. What has come of it is torn."""
    pack = packing.pack
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        torn = tensor(1)

        def meanwhile(address: int, leaves: Sequence[Leaf]) -> None:
            pack(address, leaves)
            if leaves[0].tensor is torn:
                torn.add_(1)

        monkeypatch.setattr(lending, "pack", meanwhile)
        before = put.put(tensor(0))
        with pytest.raises(aiorlinf.errors.UsageError, match="written to while"):
            await put.put({"torn": torn})
        await before
        await put.put(tensor(2))
        assert [float((await get.get())[0]) for _ in range(2)] == [0.0, 2.0]
        await given_back(here.workers[0])


@pytest.mark.parametrize("how", ["add", "data", "set", "resize"])
async def test_a_tensor_that_changes_before_the_put_of_another_thread_begins(how: str) -> None:
    """What was put is what it was at the call, or the put fails."""
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        item = tensor(1)
        works: list[aiorlinf.AsyncWork[None]] = []

        def other() -> None:
            works.append(put.put(item))
            if how == "add":
                item.add_(1)
            elif how == "data":
                item.data = torch.zeros(3)
            elif how == "set":
                item.set_(torch.zeros(3))  # type: ignore[call-overload]  # a form that the stubs miss
            else:
                item.resize_(2 * SIZE)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()  # the loop stands still
        try:
            await works[0]
        except aiorlinf.errors.UsageError:
            assert how != "data"
        else:
            assert torch.equal(await get.get(), tensor(1))
            assert how == "data"
        await put.put(tensor(2))
        assert torch.equal(await get.get(), tensor(2))
        await given_back(here.workers[0])


async def test_a_tensor_that_gets_other_memory_while_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel worker did not find it, and gets what was put, not what the tensor shows now."""
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        monkeypatch.setattr(SharedIn, "hold", lambda self, *args: None)
        item = tensor(1)
        work = put.put(item)
        item.data = torch.zeros(3)
        assert torch.equal(await get.get(), tensor(1))
        await work


@pytest.mark.parametrize(
    "item",
    [
        torch.arange(SIZE, dtype=torch.float64),
        torch.arange(SIZE).to(torch.bfloat16),
        torch.arange(SIZE).to(torch.complex64).conj(),
        torch.arange(SIZE * 2) % 3 == 0,
        torch.arange(SIZE * 4 + 1).to(torch.uint8),
        torch.arange(SIZE).reshape(4, -1, 2),
        torch.nn.Parameter(torch.arange(SIZE).float()),
        torch.arange(SIZE).float().requires_grad_(),
        torch.arange(SIZE)[SIZE // 2 :],
        torch.zeros(0, 7),
        torch.tensor(3.5),
    ],
    ids=lambda item: f"{type(item).__name__} {item.dtype} {tuple(item.shape)}",
)
async def test_every_kind_of_tensor_arrives_as_it_was(item: torch.Tensor) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        for each in (item, [item, item + 1], {"one": item}):
            await put.put(each)
            got = await get.get()
            one = got[0] if isinstance(each, list) else got["one"] if isinstance(each, dict) else got
            assert torch.equal(one, item)
            assert (type(one), one.dtype, one.shape, one.requires_grad) == (type(item), item.dtype, item.shape, item.requires_grad)


@pytest.mark.parametrize("beside", [1, SIZE], ids=["small", "large"])
async def test_every_dtype_and_tensors_without_elements(beside: int) -> None:
    shapes = [(), (3,), (2, 3, 4), (0,), (0, 3), (3, 0)]
    item = {str(dtype): [sample(dtype, shape) for shape in shapes] for dtype in all_dtypes()}
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        for each in ({**item, "beside": torch.ones(beside)}, [torch.empty(0), torch.ones(beside)], torch.empty(3, 0)):
            await put.put(each)
            assert_same(await get.get(), each)


@pytest.mark.parametrize("size", [0, 1, 5000])
async def test_a_long_description_with_much_little_or_no_payload(size: int) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        for item in ({"k" * (1 << 20): torch.ones(size)}, {str(number): torch.ones(size and 1) for number in range(50_000)}):
            await put.put(item, timeout=10)
            got = await get.get(timeout=10)
            assert list(got) == list(item)
            assert torch.equal(next(iter(got.values())), next(iter(item.values())))


async def test_a_tensor_made_in_inference_mode_is_put() -> None:
    with torch.inference_mode():
        item = torch.arange(SIZE)
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await put.put(item)
        assert torch.equal(await get.get(), item)


@pytest.mark.parametrize("trouble", ["full", "not passed"])
async def test_without_shared_memory_at_the_moment_items_go_as_messages(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)

        def not_passed(self: SharedOut, segment: Any) -> int:
            raise OSError("no room for another open file")

        if trouble == "full":
            monkeypatch.setattr(Arena, "take", lambda self, size, **options: None)
            monkeypatch.setattr(Arena, "grow", lambda self, size, then: False)
        else:
            monkeypatch.setattr(SharedOut, "_pass", not_passed)
        works = [put.put(tensor(number)) for number in range(5)]
        assert [float((await get.get())[-1]) for _ in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
        for work in works:
            await work
        monkeypatch.undo()
        await put.put(tensor(5))
        assert float((await get.get())[-1]) == 5.0
        await given_back(here.workers[0])


@pytest.mark.parametrize("how", ["get", "lease"])
async def test_what_the_channel_worker_cannot_lend_on_goes_as_a_message(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        await warm(put, get)
        for number in range(3):
            await put.put(tensor(number))

        def not_passed(self: SharedOut, segment: Any) -> int:
            raise OSError("no room for another open file")

        monkeypatch.setattr(SharedOut, "_pass", not_passed)
        for number in range(3):
            if how == "lease":
                async with get.lease() as item:
                    assert torch.equal(item, tensor(number))
                del item
            else:
                assert torch.equal(await get.get(), tensor(number))
        monkeypatch.undo()
        await put.put(tensor(3))
        assert torch.equal(await get.get(), tensor(3))
        await given_back(here.workers[0])


async def test_batches_of_a_loop_end_with_the_stream() -> None:
    for kind in ("local", "hosted"):
        async with place(kind) as here:
            put, get = await here.handle(), await here.handle()
            for number in range(10):
                await put.put(number)
            await put.close()
            assert [batch async for batch in get.batches(4, ahead=2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            with pytest.raises(aiorlinf.errors.UsageError):
                get.batches(4, ahead=0)


async def test_a_prefetch_that_is_left_gives_back_in_order() -> None:
    async with place("hosted") as here:
        put, get, other = await here.handle(), await here.handle(), await here.handle()
        for number in range(12):
            await put.put(tensor(number) if number % 3 == 0 else number)
        async with get.prefetch(6) as ahead:
            assert [float(torch.as_tensor(await anext(ahead)).reshape(-1)[0]) for _ in range(2)] == [0.0, 1.0]
            while not ahead._stream.ready:  # type: ignore[union-attr]  # there is one
                await asyncio.sleep(0)
        await put.close()
        rest = [item async for item in other]
        assert [float(torch.as_tensor(item).reshape(-1)[0]) for item in rest] == [float(number) for number in range(2, 12)]


async def test_a_waiting_prefetch_can_be_cancelled_and_go_on() -> None:
    async with place("hosted") as here:
        put, get = await here.handle(), await here.handle()
        async with get.prefetch(3) as ahead:
            for number in range(3):
                waiting = asyncio.ensure_future(anext(ahead))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                await put.put(number)
                assert await anext(ahead) == number
            with pytest.raises(aiorlinf.errors.DeadlineExceeded):
                async with asyncio.timeout(5):
                    work = get.get(timeout=0.01)
                    await work
            await put.close()
            with pytest.raises(StopAsyncIteration):
                await anext(ahead)
