"""The clock that jumps."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from aiorlinf.errors import DeadlineExceeded
from aiorlinf.testing.clock import VirtualClock, run_virtual

__all__: list[str] = []


def test_hours_pass_in_no_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def tick(name: str, pause: float, times: int) -> None:
            for _ in range(times):
                await asyncio.sleep(pause)
                seen.append((name, loop.time()))

        await asyncio.gather(tick("a", 3600.0, 3), tick("b", 5000.0, 2))
        return seen

    begin = time.monotonic()
    assert run_virtual(main()) == [("a", 3600.0), ("b", 5000.0), ("a", 7200.0), ("b", 10000.0), ("a", 10800.0)]
    assert time.monotonic() - begin < 60


def test_a_wait_of_days_is_one_wait() -> None:
    async def main() -> float:
        await asyncio.sleep(86400 * 365)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(86400 * 365)


def test_limits_of_time_are_exact() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        assert loop.time() == 10.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(1000), 5)
        done, waiting = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(n)) for n in (1, 2, 30)], timeout=2.5)
        assert (len(done), len(waiting)) == (2, 1)
        return loop.time()

    assert run_virtual(main()) == 17.5


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        go_on = threading.Event()
        late = asyncio.ensure_future(asyncio.sleep(1000))

        def work() -> str:
            go_on.wait(20)
            return "done"

        working = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.sleep(0)
        threading.Timer(0.05, go_on.set).start()
        assert await working == "done"
        return loop.time(), late.done()

    assert run_virtual(main()) == (0.0, False)


def test_sockets_are_looked_at() -> None:
    async def main() -> bytes:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(10))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello")
            got = await reader.read()
            writer.close()
            await writer.wait_closed()
        return got

    assert run_virtual(main()) == b"hello"


def test_busy_code_is_late() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClock)
        rang: list[float] = []
        loop.call_later(1.0, lambda: rang.append(loop.time()))
        loop.advance(5.0)
        await asyncio.sleep(0.5)
        return rang

    assert run_virtual(main()) == [5.0]


def test_what_hangs_for_good_is_an_error() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClock)
        loop.idle_limit_s = 0.05
        await asyncio.sleep(100)
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="nothing is left that could happen"):
        run_virtual(main())


def test_another_thread_can_wake_it() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, [future.set_result, "woken"]).start()
        return await future

    assert run_virtual(main()) == "woken"
