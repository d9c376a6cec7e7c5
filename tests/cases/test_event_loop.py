"""Event loops, threads and futures: section F of the cases, and the two styles of using a work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import uvloop

from aiorlinf import AsyncWork, CollectiveGroup, Worker, init, wait_all
from aiorlinf.errors import AiorlinfError, Mismatch, WouldBlockLoop
from tests import peers
from tests.cases.conftest import CARRIERS, Pair, carried_by

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.SelectorEventLoop, uvloop.new_event_loop]


@pytest.fixture(params=CARRIERS)
def threaded(request: pytest.FixtureRequest) -> Iterator[tuple[CollectiveGroup, CollectiveGroup]]:
    """The groups of two workers that each run in a thread of their own, as seen by synchronous code."""
    config = carried_by(request.param)
    with init("a:0", config=config) as a, init("b:0", config=config) as b:
        members = ["a:0", "b:0"]
        yield a.collective.create_collective_group(members), b.collective.create_collective_group(members)


def negate(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


# ---- both styles


def test_both_styles_in_synchronous_code(threaded: tuple[CollectiveGroup, CollectiveGroup]) -> None:
    a, b = threaded
    for size in (3, 300_000):
        obj: dict[str, Any] = {"x": torch.ones(size), "size": size}
        work = a.send(obj, async_op=True)
        got = b.recv(async_op=True).wait()
        work.wait()
        assert got["size"] == size
        assert torch.equal(got["x"], obj["x"])

        out = torch.zeros(size)
        work = a.send_tensor(torch.full((size,), 2.0), async_op=True)
        processed = b.recv_tensor(out, async_op=True).then(negate).wait()
        assert out.sum() == 2 * size
        assert processed.sum() == -2 * size
        assert work.wait(20) is None

        receiving = b.recv()
        a.send("text", async_op=False)
        assert receiving.wait(timeout=20) == "text"
        sending = a.send_tensor(out)
        assert b.recv_tensor(torch.empty(size), async_op=False)[0] == 2
        sending.wait()
        asyncio.run(await_there(b.recv(), a.send("a loop of its own")))
    with pytest.raises(TimeoutError):
        b.recv(tag=9).wait(0.05)
    for wrong in (a.send_tensor(torch.ones(2)), b.recv_tensor(torch.ones(3))):
        with pytest.raises(Mismatch):
            wrong.wait(20)


def test_counters_in_synchronous_code() -> None:
    with init("a:0") as a:
        a.send("text", "a:0")
        assert a.recv("a:0").wait(20) == "text"
        (link,) = a.stats().links
        assert (link.messages_sent, link.messages_received) == (1, 1)
    assert a.stats().links == ()


async def await_there(receiving: AsyncWork[Any], sending: AsyncWork[None]) -> None:
    assert await receiving == "a loop of its own"
    await sending


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.asyncio
async def test_both_styles_in_a_coroutine(carrier: str) -> None:
    config = carried_by(carrier)
    async with init("a:0", config=config, loop="thread") as wa, init("b:0", config=config, loop="thread") as wb:
        a, b = (worker.collective.create_collective_group(["a:0", "b:0"]) for worker in (wa, wb))
        for size in (3, 300_000):
            obj: list[Any] = [torch.ones(size), "text"]
            w = a.send(obj, async_op=True)
            got = b.recv(async_op=True).wait()  # blocks this loop, not the workers'
            await w.async_wait()
            assert torch.equal(got[0], obj[0])

            t = torch.zeros(size)
            w = a.send_tensor(torch.full((size,), 2.0), async_op=True)
            processed = b.recv_tensor(t, async_op=True).then(negate).wait()
            assert t.sum() == 2 * size
            assert processed.sum() == -2 * size
            await w

            w = a.send_tensor(t)
            assert (await b.recv_tensor(torch.zeros(size)).then(negate)).sum() == -2 * size
            await w.async_wait(20)
            got, nothing = await asyncio.gather(b.recv(), a.send(7))
            assert (got, nothing) == (7, None)
        with pytest.raises(TimeoutError):
            await b.recv().async_wait(0.05)


# ---- waiting on the loop itself


@pytest.mark.asyncio
async def test_waiting_on_the_own_loop_says_so_at_once(stream_pair: Pair) -> None:
    receiving = stream_pair.ba.recv()
    with pytest.raises(WouldBlockLoop, match="await"):
        receiving.wait()
    with pytest.raises(WouldBlockLoop, match="await"):
        stream_pair.ab.send_tensor(torch.ones(3), tag=1).wait(5)
    assert (await stream_pair.ba.recv_tensor(torch.zeros(3), tag=1)).sum() == 3
    await stream_pair.ab.send("for the one that waits")
    assert await receiving == "for the one that waits"
    assert receiving.wait() == "for the one that waits"  # it is over: nothing to wait for


@pytest.mark.asyncio
async def test_a_blocking_call_on_the_own_loop_begins_nothing(stream_pair: Pair) -> None:
    out = torch.zeros(3)
    for call in (
        lambda: stream_pair.ba.recv(async_op=False),
        lambda: stream_pair.b.recv("a:0", async_op=False),
        lambda: stream_pair.ba.recv_tensor(out, async_op=False),
        lambda: stream_pair.b.recv_tensor(out, "a:0", async_op=False),
        lambda: stream_pair.ba.send("never", async_op=False),
        lambda: stream_pair.b.send("never", "a:0", async_op=False),
        lambda: stream_pair.ba.send_tensor(out, async_op=False),
        lambda: stream_pair.b.send_tensor(out, "a:0", async_op=False),
    ):
        with pytest.raises(WouldBlockLoop, match="await"):
            call()
    assert await stream_pair.trip("a message that none of those has taken") == "a message that none of those has taken"
    await stream_pair.ba.send("the other way")
    assert await stream_pair.ab.recv() == "the other way"


def test_a_with_block_on_a_running_loop_says_so() -> None:
    async def main() -> None:
        async with init("a:0") as comm:
            with pytest.raises(ValueError, match="async with"), comm:
                pass

    asyncio.run(main())


# ---- steps


@pytest.mark.asyncio
async def test_a_step_may_send_on(pair: Pair) -> None:
    """Followed to its end, whatever a step returns: a work, a coroutine, a value."""
    async with init("c:0", config=carried_by(pair.carrier)) as c:
        for size in (3, 300_000):
            chain = pair.b.recv("a:0").then(lambda got: pair.b.send(got, "c:0"))
            arrived = c.recv("b:0").then(later).then(lambda got: got.sum())
            sending = pair.a.send(torch.ones(size), "b:0")
            assert await arrived == 2 * size
            assert await chain is None
            await sending


async def later(tensor: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return tensor * 2


@pytest.mark.asyncio
async def test_blocking_in_a_step_is_detected(stream_pair: Pair) -> None:
    chain = stream_pair.ba.recv().then(lambda _: stream_pair.ba.recv(tag=1).wait())
    after: list[Any] = []
    chain_end = chain.then(after.append)
    await stream_pair.ab.send(1)
    with pytest.raises(WouldBlockLoop):
        await chain_end
    assert after == []
    assert await stream_pair.trip("goes on") == "goes on"


# ---- the loop stays free


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """A list that gets the time every ten milliseconds, if the loop turns."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


@pytest.mark.asyncio
async def test_the_loop_turns_while_large_messages_pass(pair: Pair) -> None:
    """No bound on the time: but something else must run again and again before the messages are there."""
    large = torch.ones(16 << 20, dtype=torch.uint8).view(torch.float32)
    async with ticking() as ticks:
        works = [group.send([large, large[:9]]) for group in (pair.ab, pair.ba) for _ in range(2)]
        received = [group.recv() for group in (pair.ab, pair.ba) for _ in range(2)]
        turns = 0
        while not all(work.done() for work in [*works, *received]):
            await asyncio.sleep(0)
            turns += 1
        assert turns > 4
        for work in received:
            assert torch.equal((await work)[0], large)
        await wait_all(works)
        del works, received
    assert ticks


@pytest.mark.asyncio
async def test_a_large_skeleton_is_rebuilt_off_the_loop(pair: Pair) -> None:
    """A dict of 5000 tensors and much that has to be unpickled: the loop turns meanwhile."""
    message = {"rows": [{"id": number, "name": f"row {number}" * 20} for number in range(20_000)], "t": [torch.ones(1)] * 5000}
    async with ticking():
        sending = pair.ab.send(message)
        receiving = pair.ba.recv()
        turns = 0
        while not receiving.done():
            await asyncio.sleep(0)
            turns += 1
    got = await receiving
    assert got["rows"] == message["rows"]
    assert len(got["t"]) == 5000
    assert turns > 4
    await sending


@pytest.mark.asyncio
async def test_the_default_executor_is_not_ours(pair: Pair) -> None:
    """Filled with calls that do not end, it stops neither the first connection nor two hundred exchanges."""
    loop = asyncio.get_running_loop()
    release = threading.Event()
    asleep = [loop.run_in_executor(None, release.wait) for _ in range(64)]
    try:
        async with init("c:0", config=carried_by(pair.carrier)) as c:
            count = 40 if pair.carrier == "gloo" else 200
            receives = [c.recv("a:0") for _ in range(count)]

            async def one(number: int) -> None:
                await pair.a.send([number, torch.ones(2000)], "c:0")
                assert (await receives[number])[0] == number

            for number in range(count):
                await asyncio.wait_for(one(number), 20)
    finally:
        release.set()
        await asyncio.gather(*asleep)


@pytest.mark.asyncio
async def test_waiting_costs_nothing(pair: Pair) -> None:
    """A hundred receives that wait, on a connection that is up: nobody polls. (One spinning thread would use all of the time.)"""
    await pair.trip([torch.ones(1000)])
    waiting = [pair.ba.recv() for _ in range(100)]
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(0.3)
    used = time.process_time() - before
    for work in waiting:
        work.cancel()
    assert used < 0.15
    assert await pair.trip("and none of them has taken this") == "and none of them has taken this"


# ---- no loop, another loop, another thread


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("where", ["main thread", "other thread"])
def test_made_without_a_loop_and_used_in_one(factory: Any, where: str) -> None:
    """A plain function makes the workers; coroutines on any loop use them, one loop after the other."""

    async def exchange(a: Worker, b: Worker, number: int) -> None:
        sending = a.send([number, torch.ones(50_000)], "b:0")
        assert (await b.recv("a:0"))[0] == number
        await sending

    def program() -> None:
        a, b = init("a:0"), init("b:0")
        try:
            for number in range(3):
                with asyncio.Runner(loop_factory=factory) as runner:
                    runner.run(exchange(a, b, number))
        finally:
            a.close().wait()
            b.close().wait()

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            program()
        except BaseException as error:  # handed to the test's own thread
            failures.append(error)

    if where == "main thread":
        program()
    else:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert failures == []


@pytest.mark.asyncio
async def test_a_worker_of_this_loop_used_from_other_threads_and_loops(pair: Pair) -> None:
    async def exchange(number: int) -> int:
        sending = pair.ab.send([number, torch.ones(1000)], tag=number)
        got = await pair.ba.recv(tag=number)
        await sending.async_wait(20)
        return int(got[0])

    def with_loop(number: int) -> int:
        with asyncio.Runner(loop_factory=LOOPS[number % 2]) as runner:
            return runner.run(exchange(number))

    def without_loop(number: int) -> int:
        sending = pair.ab.send([number, torch.ones(1000)], tag=number)
        got = pair.ba.recv(tag=number).wait(20)
        sending.wait(20)
        return int(got[0])

    functions = [with_loop, without_loop] * 3
    calls = [asyncio.to_thread(function, number) for number, function in enumerate(functions)]
    assert await asyncio.gather(*calls, exchange(99)) == [*range(6), 99]


# ---- one slow peer


async def be_stopped(comm: Worker) -> None:
    await comm.send("ready", "a:0")
    assert await comm.recv("a:0") == "first"
    await comm.send("got it", "a:0")
    await asyncio.sleep(60)


@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.asyncio
async def test_a_peer_that_stands_still_holds_up_nobody_else(carrier: str, complaints: list[str]) -> None:
    config = carried_by(carrier, window_bytes=1 << 20)
    async with init("c:0", config=config) as c:
        a = await init("a:0", config=config)
        async with peers.worker(a, "b:0", be_stopped) as peer:
            assert await a.recv("b:0") == "ready"
            await a.send("first", "b:0")
            assert await a.recv("b:0") == "got it"
            os.kill(peer.pid, signal.SIGSTOP)
            stuck = [a.send(torch.ones(200_000), "b:0") for _ in range(20)]
            stuck += [a.send_tensor(torch.ones(200_000), "b:0", tag=1)]
            for number in range(20):
                sending = a.send([number, torch.ones(200_000)], "c:0")
                assert (await c.recv("a:0", timeout=20))[0] == number
                await sending
            assert not all(work.done() for work in stuck)
            begin = time.monotonic()
            await a.close(timeout=0.3)
            assert time.monotonic() - begin < 15  # b stands still for longer than this test may take
            for work in stuck:
                if not work.done() or work.exception() is not None:
                    with pytest.raises(AiorlinfError):
                        await work
            assert any("before it could deliver" in text and "b:0" in text for text in complaints)
            complaints.clear()


# ---- Ctrl-C


def interrupted(pipe: peers.Pipe) -> str:
    with init("a:0") as a:
        receiving = a.recv("a:0")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        try:
            receiving.wait(30)
        except KeyboardInterrupt:
            elapsed = time.monotonic() - begin
        else:
            return "not interrupted"
        timer.join()
        a.send("still alive", "a:0").wait()
        return f"{receiving.wait(20)} after {'a moment' if elapsed < 15 else elapsed}"


def test_ctrl_c_interrupts_a_wait_and_leaves_the_work_alive() -> None:
    with peers.process(interrupted) as peer:
        assert peer.wait_result() == "still alive after a moment"
