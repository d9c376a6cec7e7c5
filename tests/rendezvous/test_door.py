"""Who is let in, when, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
import uvloop

from aiorlinf.rendezvous.door import Door
from aiorlinf.rendezvous.hosts import bind_listener
from tests.system import no_more_descriptors

LOOPS = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
WORD = b"AIORLINF and more"


class Guest(asyncio.Protocol):
    """Somebody who was let in."""

    def __init__(self) -> None:
        self.heard = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "abort")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard += data


class House:
    """A door and what came of it."""

    def __init__(self, *, limit: int = 100, time_limit_s: float = 30.0) -> None:
        self.guests: list[Guest] = []
        self.turned_away: list[str] = []
        listener = bind_listener("127.0.0.1")
        self.where: tuple[str, int] = listener.getsockname()
        self.door = Door(
            asyncio.get_running_loop(),
            listener,
            self._guest,
            time_limit_s=time_limit_s,
            limit=lambda: limit,
            turned_away=self.turned_away.append,
        )

    def _guest(self) -> Guest:
        self.guests.append(Guest())
        return self.guests[-1]

    def knock(self, said: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.where, 10)
        if said:
            sock.sendall(said)
        sock.setblocking(False)
        return sock


@contextlib.asynccontextmanager
async def house(**options: float) -> AsyncIterator[House]:
    made = House(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.door.close()
        await made.door.wait_closed()
        for guest in made.guests:
            if guest.transport is not None:
                guest.transport.abort()
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def on_both_loops(test: Callable[[], object]) -> Callable[[Callable[[], asyncio.AbstractEventLoop]], None]:
    @pytest.mark.parametrize("factory", LOOPS)
    def run(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(debug=True, loop_factory=factory) as runner:
            runner.run(test())  # type: ignore[arg-type]

    return run


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@on_both_loops
async def test_who_says_the_word_is_let_in_with_all_that_was_said() -> None:
    async with house() as made:
        with made.knock(WORD) as one, made.knock() as other:
            await until(lambda: bool(made.guests) and made.guests[0].heard == WORD)
            assert made.door.quiet == 1
            other.send(WORD[:1])
            await until(lambda: len(made.guests) == 2 and made.guests[1].heard == WORD[:1])
            assert (made.door.quiet, made.turned_away) == (0, [])
            one.send(b"!")
            await until(lambda: made.guests[0].heard == WORD + b"!")


@on_both_loops
async def test_a_wrong_word_costs_no_protocol() -> None:
    async with house() as made:
        with made.knock(b"GET / HTTP/1.1\r\n\r\n") as one, made.knock(b"AIO, AIO") as other:
            await until(lambda: len(made.turned_away) == 2)
            await until(lambda: is_closed(one) and is_closed(other))
        assert made.guests == []
        assert any("it looks like an HTTP client" in why for why in made.turned_away)
        assert any("it begins with b'AIO, AIO'" in why for why in made.turned_away)


@on_both_loops
async def test_who_hangs_up_is_the_protocols_to_judge() -> None:
    async with house() as made:
        made.knock().close()
        await until(lambda: len(made.guests) == 1)
        assert made.turned_away == []


@on_both_loops
async def test_the_oldest_of_the_silent_makes_way() -> None:
    async with house(limit=3) as made:
        with contextlib.ExitStack() as stack:
            socks = []
            for number in range(5):
                socks.append(stack.enter_context(made.knock()))
                await until(lambda number=number: made.door.quiet == min(3, number + 1))  # type: ignore[misc]
            await until(lambda: is_closed(socks[0]) and is_closed(socks[1]))
            assert [is_closed(sock) for sock in socks] == [True, True, False, False, False]
            assert made.turned_away == ["too many connections have not proved themselves"] * 2


@on_both_loops
async def test_silence_has_a_limit() -> None:
    async with house(time_limit_s=0.2) as made:
        begin = time.monotonic()
        with made.knock() as one:
            await asyncio.sleep(0.1)
            with made.knock() as other:
                await until(lambda: is_closed(one))
                assert 0.15 < time.monotonic() - begin < 2.0
                await until(lambda: is_closed(other))
                assert made.turned_away == ["it said nothing within 0.2 s"] * 2


@on_both_loops
async def test_closing_closes_the_silent_and_the_socket() -> None:
    made = House()
    with made.knock() as silent, made.knock(WORD) as guest:
        await until(lambda: bool(made.guests) and made.door.quiet == 1)
        made.door.close()
        made.door.close()
        await until(lambda: is_closed(silent))
        assert not is_closed(guest)
        with pytest.raises(ConnectionError):
            made.knock()
        transport = made.guests[0].transport
        assert transport is not None
        transport.abort()
        await made.door.wait_closed()
        await asyncio.sleep(0.01)


@on_both_loops
async def test_without_descriptors_the_silent_make_way_and_the_others_wait() -> None:
    async with house() as made:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(made.knock()) for _ in range(3)]
            await until(lambda: made.door.quiet == 3)
            waiting = [socket.socket() for _ in range(4)]
            for sock in waiting:
                stack.callback(sock.close)
            with no_more_descriptors():
                for sock in waiting:
                    sock.connect(made.where)
                await until(lambda: all(map(is_closed, silent)))
                await asyncio.sleep(0.1)
            for sock in waiting:
                sock.setblocking(False)
                with contextlib.suppress(ConnectionError):
                    sock.send(WORD)
            await until(lambda: any(guest.heard == WORD for guest in made.guests))


@on_both_loops
async def test_whatever_accepting_fails_with_the_next_ones_come_in() -> None:
    for number in (errno.EPERM, errno.EPROTO, errno.ENETUNREACH):
        await cannot_accept(OSError(number, os.strerror(number)))


async def cannot_accept(error: OSError) -> None:
    async with house() as made:
        real = made.door._listener
        failing = _Failing(real, error)
        made.door._listener = cast(socket.socket, failing)
        with made.knock(WORD) as guest:
            await until(lambda: failing.tries >= 3)
            assert made.door._complained
            assert not is_closed(guest)
            made.door._listener = real
            await until(lambda: any(guest.heard == WORD for guest in made.guests))
            assert not made.door._complained, "the next time it is said again"


class _Failing:
    """A listening socket that cannot accept."""

    def __init__(self, sock: socket.socket, error: OSError) -> None:
        self._sock = sock
        self._error = error
        self.tries = 0

    def accept(self) -> None:
        self.tries += 1
        raise self._error

    def fileno(self) -> int:
        return self._sock.fileno()
