from __future__ import annotations

import asyncio
import io
import os
import pty
import threading

import pytest

from aiorlinf.launch.printer import HIGH_WATER, Printer, Sink, standard_sinks


class Pipe:
    """A pipe as a program's stdout."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.reader, writer = os.pipe()
        self.stream = io.TextIOWrapper(os.fdopen(writer, "wb"), encoding=encoding)
        self.sink = Sink(self.stream, self.stream)

    def read_all(self) -> bytes:
        self.stream.close()
        with os.fdopen(self.reader, "rb") as file:
            return file.read()


def make(out: Sink, err: Sink | None = None) -> tuple[Printer, list[str]]:
    calls: list[str] = []
    printer = Printer(out, err or Sink(None, None), on_full=lambda: calls.append("full"), on_low=lambda: calls.append("low"))
    return printer, calls


@pytest.mark.asyncio
async def test_in_order_and_complete() -> None:
    out, err = Pipe(), Pipe()
    printer, calls = make(out.sink, err.sink)
    for number in range(1000):
        printer.write("out" if number % 3 else "err", f"{number}\n")
    printer.write("out", "")
    assert await printer.close(None)
    assert [int(line) for line in out.read_all().split()] == [number for number in range(1000) if number % 3]
    assert [int(line) for line in err.read_all().split()] == [number for number in range(1000) if not number % 3]
    assert calls == []
    assert printer.lost == {}


@pytest.mark.asyncio
async def test_a_slow_reader_holds_back_the_workers_not_the_loop() -> None:
    pipe = Pipe()
    printer, calls = make(pipe.sink)
    text = "x" * 1023 + "\n"
    for _ in range(HIGH_WATER // 1024 + 1):
        printer.write("out", text)
    assert calls == ["full"]
    await asyncio.sleep(0.05)
    assert calls == ["full"]
    reading = asyncio.create_task(asyncio.to_thread(read_to_end, pipe.reader))
    assert await printer.close(None)
    assert calls == ["full", "low"]
    pipe.stream.close()
    assert await reading == HIGH_WATER + 1024


def read_to_end(fd: int) -> int:
    total = 0
    with os.fdopen(fd, "rb", buffering=0) as file:
        while data := file.read(65536):
            total += len(data)
    return total


@pytest.mark.asyncio
async def test_a_reader_that_stopped_is_given_up_after_the_limit() -> None:
    pipe = Pipe()
    printer, _ = make(pipe.sink)
    printer.write("out", "x" * 1_000_000)
    assert not await printer.close(0.05)
    os.close(pipe.reader)  # lets the thread go
    assert await printer.close(None)
    assert "out" in printer.lost
    pipe.stream.close()


@pytest.mark.asyncio
async def test_a_reader_that_went_away() -> None:
    pipe, err = Pipe(), Pipe()
    os.close(pipe.reader)
    printer, _ = make(pipe.sink, err.sink)
    printer.write("out", "gone\n")
    printer.write("out", "gone too\n")
    printer.write("err", "still there\n")
    assert await printer.close(None)
    assert list(printer.lost) == ["out"]
    assert "BrokenPipeError" in printer.lost["out"]
    assert err.read_all() == b"still there\n"
    pipe.stream.close()


@pytest.mark.asyncio
async def test_a_non_blocking_terminal() -> None:
    pipe = Pipe()
    os.set_blocking(pipe.stream.fileno(), False)
    printer, _ = make(pipe.sink)
    printer.write("out", "x" * 500_000)
    reading = asyncio.create_task(asyncio.to_thread(read_to_end, pipe.reader))
    assert await printer.close(None)
    pipe.stream.close()
    assert await reading == 500_000


@pytest.mark.asyncio
async def test_characters_that_the_stream_cannot_write() -> None:
    pipe = Pipe("ascii")
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding="latin-1")
    printer, _ = make(pipe.sink, Sink(text, None))
    printer.write("out", "caf\u00e9\n")
    printer.write("err", "caf\u00e9 \U0001f680\n")
    assert await printer.close(None)
    assert pipe.read_all() == b"caf\\xe9\n"
    assert raw.getvalue() == "caf\u00e9 \\U0001f680\n".encode("latin-1")


@pytest.mark.asyncio
async def test_streams_that_are_only_text() -> None:
    out = io.StringIO()
    printer, _ = make(Sink(out, None))
    printer.write("out", "a notebook\n")
    assert await printer.close(None)
    assert out.getvalue() == "a notebook\n"


@pytest.mark.asyncio
async def test_no_stream_at_all() -> None:
    printer, _ = make(Sink(None, None))
    printer.write("out", "to nobody\n")
    assert await printer.close(None)
    assert not printer.is_terminal("out")


@pytest.mark.asyncio
async def test_a_stream_whose_write_raises() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("no")

    printer, _ = make(Sink(Broken(), None))
    printer.write("out", "x\n")
    assert await printer.close(None)
    assert printer.lost == {"out": "RuntimeError: no"}


@pytest.mark.asyncio
async def test_no_thread_stays() -> None:
    before = threading.active_count()
    printer, _ = make(Sink(io.StringIO(), None))
    assert threading.active_count() == before + 1
    assert await printer.close(None)
    assert threading.active_count() == before


def test_terminals() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        assert Sink(stream, stream).is_terminal
    assert not Sink(stream, stream).is_terminal, "closed"
    os.close(master)
    out, err = standard_sinks()
    assert not out.is_terminal
    assert not err.is_terminal
