"""Works that come from torch.distributed and from other libraries' futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome
from aiorlinf.work.kinds import AsyncChannelWork, AsyncCollWork
from tests.work.helpers import LoopThread, turns


class Broken(Exception):
    """What goes wrong in these tests."""


class Pair:
    """Both ends of a Gloo pair in one process."""

    def __init__(self, path: Path) -> None:
        ends: list[ProcessGroupGloo | None] = [None, None]

        def make(rank: int) -> None:
            store = dist.FileStore(str(path), 2)  # type: ignore[attr-defined]  # missing in torch's stubs
            ends[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends[0] is not None
        assert ends[1] is not None
        self.left: ProcessGroupGloo | None = ends[0]
        self.right: ProcessGroupGloo | None = ends[1]

    def send(self, tensor: torch.Tensor) -> Any:
        assert self.left is not None
        return self.left.broadcast(tensor, 0)  # type: ignore[attr-defined]  # missing in torch's stubs

    def receive(self, tensor: torch.Tensor) -> Any:
        assert self.right is not None
        return self.right.broadcast(tensor, 0)  # type: ignore[attr-defined]  # as above


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "store")
    yield pair
    pair.left = pair.right = None
    gc.collect()


@pytest.mark.asyncio
async def test_a_gloo_transfer_completes_by_itself(home: LoopHome, pair: Pair) -> None:
    out = torch.zeros(1000)
    recv = AsyncCollWork(home, "recv", [pair.receive(out)], value_fn=lambda: out, keep=out)
    ran: list[float] = []
    recv.then(lambda tensor: ran.append(float(tensor.sum())))
    await asyncio.sleep(0.005)
    assert not recv.done()
    source = torch.ones(1000)
    send: AsyncCollWork[None] = AsyncCollWork(home, "send", [pair.send(source)], keep=source)
    await send
    assert (await recv).data_ptr() == out.data_ptr()
    assert ran == [1000.0]
    assert recv._keep is None


@pytest.mark.asyncio
async def test_several_transfers_as_one(home: LoopHome, pair: Pair) -> None:
    outs = [torch.zeros(16) for _ in range(5)]
    drained: list[int] = []
    recv = AsyncCollWork(home, "recv", [pair.receive(out) for out in outs], value_fn=lambda: outs, on_drained=lambda: drained.append(1))
    for number in range(5):
        assert not recv.done()
        send: AsyncCollWork[None] = AsyncCollWork(home, "send", [pair.send(torch.full((16,), float(number)))])
        await send
    assert [float(out[0]) for out in await recv] == [0, 1, 2, 3, 4]
    assert drained == [1]


@pytest.mark.asyncio
async def test_discarded_transfers_keep_their_tensors_and_arrive(home: LoopHome, pair: Pair) -> None:
    for number in range(20):
        source = torch.full((4096,), float(number))
        AsyncCollWork(home, "send", [pair.send(source)], keep=source)
        del source
    gc.collect()
    for number in range(20):
        out = torch.zeros(4096)
        await AsyncCollWork(home, "recv", [pair.receive(out)])
        assert torch.equal(out, torch.full((4096,), float(number)))


@pytest.mark.asyncio
async def test_a_peer_that_goes_away_fails_the_transfer(home: LoopHome, pair: Pair) -> None:
    out = torch.zeros(16)
    drained: list[int] = []
    recv: AsyncCollWork[None] = AsyncCollWork(
        home,
        "recv",
        [pair.receive(out)],
        map_error=lambda error: Broken(f"was {type(error).__name__}"),
        on_drained=lambda: drained.append(1),
    )
    await asyncio.sleep(0.005)
    pair.left = None
    gc.collect()
    with pytest.raises(Broken, match="was "):
        await recv.async_wait(30)
    assert drained == [1]
    with pytest.raises(RuntimeError):
        await AsyncCollWork(home, "recv", [pair.receive(out)]).async_wait(30)


@pytest.mark.asyncio
async def test_a_cancelled_transfer_is_held_until_torch_lets_go(home: LoopHome, pair: Pair) -> None:
    out = torch.zeros(16)
    drained: list[int] = []
    aborted: list[AsyncWork[None]] = []

    class Buffer:
        pass

    buffer = Buffer()
    reference = weakref.ref(buffer)
    recv: AsyncCollWork[None] = AsyncCollWork(
        home, "recv", [pair.receive(out)], keep=buffer, on_drained=lambda: drained.append(1), abort=aborted.append
    )
    del buffer
    assert recv.cancel()
    assert recv.cancelled()
    assert len(aborted) == 1
    aborted.clear()
    del recv
    gc.collect()
    assert reference() is not None
    assert drained == []
    await AsyncCollWork(home, "send", [pair.send(torch.ones(16))])
    while not drained:
        await asyncio.sleep(0.001)
    await turns()
    gc.collect()
    assert reference() is None
    assert float(out.sum()) == 16


@pytest.mark.asyncio
async def test_torch_futures_and_nothing(home: LoopHome) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    work = AsyncCollWork(home, "op", [future], value_fn=lambda: "value")
    assert not work.done()
    threading.Thread(target=future.set_result, args=(1,)).start()
    assert await work == "value"
    assert await AsyncCollWork(home, "op", [future], value_fn=lambda: "again") == "again"
    assert await AsyncCollWork(home, "op", [], value_fn=lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await AsyncCollWork(home, "op", [], value_fn=lambda: 1 // 0)
    failing: torch.futures.Future[int] = torch.futures.Future()
    slow: torch.futures.Future[int] = torch.futures.Future()
    work = AsyncCollWork(home, "op", [slow, failing], value_fn=lambda: "value")
    failing.set_exception(Broken("x"))  # type: ignore[arg-type]  # wrong in torch's stubs
    with pytest.raises(Broken):
        await work
    slow.set_result(1)


def test_transfers_are_made_and_waited_for_in_a_thread(home_thread: LoopThread, pair: Pair) -> None:
    out = torch.zeros(16)
    recv = AsyncCollWork(home_thread.home, "recv", [pair.receive(out)], value_fn=lambda: out)
    AsyncCollWork(home_thread.home, "send", [pair.send(torch.ones(16))]).wait(10)
    assert recv.then(lambda tensor: float(tensor.sum())).wait(10) == 16


def test_a_transfer_that_outlives_its_loop_is_harmless(pair: Pair) -> None:
    out = torch.zeros(16)
    loop = asyncio.new_event_loop()
    home = LoopHome(loop)
    recv: AsyncCollWork[None] = AsyncCollWork(home, "recv", [pair.receive(out)])
    loop.close()
    send = pair.send(torch.ones(16))
    send.wait()
    deadline = time.monotonic() + 10
    while not float(out.sum()) and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(ClosedError):
        recv.wait(10)


@pytest.mark.asyncio
async def test_any_awaitable_as_a_work(home: LoopHome) -> None:
    async def coroutine() -> int:
        await asyncio.sleep(0.001)
        return 1

    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    threading.Timer(0.001, future.set_result, (2,)).start()
    works: list[AsyncWork[int]] = [
        AsyncChannelWork(home, "get", coroutine()),
        AsyncChannelWork(home, "get", future),
        AsyncChannelWork(home, "get", AsyncChannelWork(home, "get", coroutine())),
        AsyncChannelWork(home, "get", 4),  # type: ignore[arg-type]
    ]
    assert [await work for work in works] == [1, 2, 1, 4]
    assert await works[0].then(lambda value: value + 1) == 2

    async def bad() -> int:
        raise Broken

    with pytest.raises(Broken):
        await AsyncChannelWork(home, "get", bad())
    aborted: list[AsyncWork[int]] = []
    held: concurrent.futures.Future[int] = concurrent.futures.Future()
    work = AsyncChannelWork(home, "get", held, abort=aborted.append)
    assert work.then(str).cancel()
    assert held.cancelled()
    assert aborted == [work]


def test_a_coroutine_made_in_a_thread_runs_at_home(home_thread: LoopThread) -> None:
    async def where() -> int:
        return threading.get_ident()

    assert AsyncChannelWork(home_thread.home, "get", where()).wait(10) == home_thread.home.thread_id
