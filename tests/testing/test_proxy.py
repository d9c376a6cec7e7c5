"""The proxy, before an ordinary server that sends back what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aiorlinf.testing.proxy import Plan, Proxy
from tests.system import soon

__all__: list[str] = []

DATA = bytes(range(256)) * 400


class Echo:
    """What it has seen."""

    def __init__(self) -> None:
        self.got = 0
        self.ends: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.got += len(data)
                writer.write(data)
                await writer.drain()
            self.ends.append("end")
        except ConnectionError:
            self.ends.append("reset")
        finally:
            writer.transport.abort()


@asynccontextmanager
async def echo_behind(*plans: Plan) -> AsyncIterator[tuple[Echo, Proxy, Callable[[], object]]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        async with Proxy(*plans) as proxy:
            assert proxy.door(host, port) == proxy.door(host, port)
            yield echo, proxy, lambda: asyncio.open_connection(*proxy.door(host, port))
    finally:
        server.close()
        await soon(lambda: len(echo.ends) >= proxy.accepted or not proxy.connections)


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = DATA) -> bytes:
    writer.write(data)
    await writer.drain()
    return await reader.readexactly(len(data))


async def until_the_end(reader: asyncio.StreamReader) -> str:
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        return "reset"
    return "end"


@pytest.mark.asyncio
async def test_it_carries_what_comes_and_the_ends() -> None:
    async with echo_behind() as (echo, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        assert await talk(reader, writer) == DATA
        writer.write_eof()
        assert await until_the_end(reader) == "end"
        await soon(lambda: echo.ends == ["end"])
        await soon(lambda: proxy.connections == 0)
        assert proxy.carried == 2 * len(DATA)
        writer.close()
        await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_plan_for_each_connection() -> None:
    async with echo_behind(Plan(refuse=True), Plan(cut_after=1000), Plan(corrupt_at=(3, 5))) as (_, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        assert await until_the_end(reader) == "reset"
        writer.close()
        reader, writer = await connect()  # type: ignore[misc]
        writer.write(DATA)
        assert await until_the_end(reader) == "reset"
        writer.close()
        for _ in range(2):  # the last plan is for all that follow
            reader, writer = await connect()  # type: ignore[misc]
            changed = await talk(reader, writer, b"0123456789")
            assert [place for place in range(10) if changed[place] != b"0123456789"[place]] == []  # flipped there, and back on the way home
            writer.close()
        assert proxy.accepted == 4


@pytest.mark.asyncio
async def test_one_bit_is_flipped() -> None:
    async with echo_behind() as (_, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        assert await talk(reader, writer, b"0123") == b"0123"
        assert proxy.corrupt() == 1
        proxy._flows.copy().pop().directions[1].flip_next = False
        assert await talk(reader, writer, b"0123") == b"1123"
        assert await talk(reader, writer, b"0123") == b"0123"
        writer.close()


@pytest.mark.asyncio
async def test_it_delays_and_limits() -> None:
    loop = asyncio.get_running_loop()
    async with echo_behind(Plan(delay_s=0.05, bytes_per_s=1_000_000)) as (_, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        begin = loop.time()
        assert await talk(reader, writer) == DATA
        assert loop.time() - begin >= 0.09, "there and back"
        begin = loop.time()
        assert await talk(reader, writer) == DATA
        assert loop.time() - begin >= 0.09 + len(DATA) / 1_000_000 - 0.07, "65,536 bytes of it may be under way at once"
        proxy.set(Plan())
        assert await talk(reader, writer) == DATA
        writer.close()


@pytest.mark.asyncio
async def test_cut_hold_and_forget() -> None:
    async with echo_behind() as (echo, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        assert await talk(reader, writer) == DATA
        proxy.hold()
        work = asyncio.ensure_future(talk(reader, writer))
        await asyncio.sleep(0.05)
        assert not work.done()
        assert echo.got == len(DATA)
        proxy.go_on()
        assert await work == DATA
        assert proxy.forget() == 1
        writer.write(b"into the void")
        writer.close()
        await writer.wait_closed()
        again, other = await connect()  # type: ignore[misc]
        assert await talk(again, other) == DATA
        assert echo.ends == [], "nobody has told the server of the end of the first"
        assert proxy.cut() == 2
        assert await until_the_end(again) == "reset"
        other.close()
        await soon(lambda: len(echo.ends) == 2)


@pytest.mark.asyncio
async def test_it_forgets_after_so_many_bytes() -> None:
    async with echo_behind(Plan(forget_after=300)) as (echo, proxy, connect):
        reader, writer = await connect()  # type: ignore[misc]
        assert await talk(reader, writer, bytes(150)) == bytes(150)
        writer.write(bytes(150))
        await asyncio.sleep(0.05)
        assert (echo.got, proxy.carried) == (150, 300)
        writer.close()


@pytest.mark.asyncio
async def test_a_server_that_is_not_there() -> None:
    async with Proxy() as proxy:
        gone = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        where = gone.sockets[0].getsockname()
        gone.close()
        await gone.wait_closed()
        reader, writer = await asyncio.open_connection(*proxy.door(*where))
        assert await until_the_end(reader) == "reset"
        writer.close()
