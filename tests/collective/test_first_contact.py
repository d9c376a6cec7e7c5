"""Two members meet for the first time, and a connection between them ends at the worst of moments: nobody is dead, so nobody may hear so,
and no part of a collective may be missed by anybody.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiorlinf import Worker
from aiorlinf.errors import PeerLost
from aiorlinf.link.connecting import Connector
from aiorlinf.link.connection import Connection
from aiorlinf.link.link import LinkState
from aiorlinf.link.table import LinkTable
from aiorlinf.rendezvous.tls import TLS_VARIABLES
from aiorlinf.testing.spawned import spawned_cluster
from tests.collective.company import Company, company
from tests.life.certificates import Authority

__all__: list[str] = []

WAYS = {"one host": ("", ""), "two hosts": ("left", "right"), "two hosts, TLS": ("left", "right")}
LIMIT_S = 20.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.SelectorEventLoop

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(coroutine)

    return run


@pytest.fixture
def encrypted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "TLS" in request.getfixturevalue("way"):
        for name, path in Authority(tmp_path / "authority").files("worker").items():
            monkeypatch.setenv(TLS_VARIABLES[name], path)


def only_from(monkeypatch: pytest.MonkeyPatch, dialler: str, broken: Callable[[Connection], None], times: int) -> list[str]:
    """Only this member connects, and the first connections that it has made meet this, although both sides have proved themselves."""
    met: list[str] = []
    real = Connector._prove

    async def prove(self: Connector, *args: Any) -> Any:
        if self._address != dialler:
            raise ConnectionResetError("not from this side")
        made = await real(self, *args)
        if len(met) < times:
            met.append(self._address)
            broken(made[0])
        return made

    monkeypatch.setattr(Connector, "_prove", prove)
    return met


def out_of_time(connection: Connection) -> None:
    """What a time limit does that passes in the very moment in which the other side's last word is there."""
    connection.abort()
    raise TimeoutError


def politely(connection: Connection) -> None:
    """As `out_of_time`, but with TLS the other side is told: there is something to read before the end of the stream."""
    assert connection.transport is not None
    connection.transport.close()
    raise TimeoutError


async def all_goes_through(made: Company) -> None:
    """Whatever is under way between the two at their first contact."""
    one, other = made.workers
    works: list[Any] = [
        *(made[rank].broadcast(("from the root",) if rank == 0 else None) for rank in range(2)),
        *(made[rank].gather(rank, root=1) for rank in range(2)),
        *(made[rank].all_to_all([(rank, 0), (rank, 1)]) for rank in range(2)),
        one.send("there", other.address),
        other.recv(one.address),
        other.send("and back", one.address),
        one.recv(other.address),
    ]
    found = await asyncio.wait_for(asyncio.gather(*works), LIMIT_S)
    rows = [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert found == [("from the root",), ("from the root",), None, [0, 1], *rows, None, "there", None, "and back"]
    for worker in made.workers:
        (link,) = worker._table.links()
        assert link.state is LinkState.UP
        assert link.identity is not None
        assert worker._table.links_had(link.identity) == 1, "both sides count alike, which resuming relies on"


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize("how", [out_of_time, politely])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dialler", ["w:0", "w:1"])
def test_who_connects_gives_up_as_he_is_let_in(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, way: str, dialler: str, how: Callable[[Connection], None]
) -> None:
    async def main() -> None:
        async with company(WAYS[way]) as made:
            met = only_from(monkeypatch, dialler, how, times=2)
            await all_goes_through(made)
            assert met == [dialler] * 2
            await made.check_works()

    run(main())


@pytest.mark.parametrize("dialler", ["w:0", "w:1"])
def test_the_first_word_is_lost_with_its_connection(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, dialler: str) -> None:
    """Here one has the link, and the other has never heard of it."""

    def cut(connection: Connection) -> None:
        with socket.socket(fileno=os.dup(connection.extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    async def main() -> None:
        async with company(WAYS["two hosts"]) as made:
            only_from(monkeypatch, dialler, cut, times=1)
            await all_goes_through(made)
            rejoined = [link.reconnects for worker in made.workers for link in worker._table.links()]
            assert sum(rejoined) == 1
            await made.check_works()

    run(main())


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize("way", WAYS)
def test_who_connects_is_silent_as_he_is_let_in(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """His loop is blocked there. The other side connects no second time, however long that lasts, and loses nothing."""
    entered: list[LinkTable] = []
    real = LinkTable.bring_up

    def late(self: LinkTable, *args: Any, dialled: bool = False) -> None:
        if dialled and not entered:
            entered.append(self)
            asyncio.get_running_loop().call_later(0.5, lambda: real(self, *args, dialled=True))
        else:
            real(self, *args, dialled=dialled)

    async def main() -> None:
        async with company(WAYS[way]) as made:
            monkeypatch.setattr(LinkTable, "bring_up", late)
            await all_goes_through(made)
            assert len(entered) == 1

    run(main())


async def connect_and_die(comm: Worker, other: str) -> None:
    """Killed between the other side's last word and the first of ours."""
    real = Connector._prove

    async def prove(self: Connector, *args: Any) -> Any:
        await real(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    Connector._prove = prove  # type: ignore[assignment, method-assign]
    await comm.recv(other)


@pytest.mark.asyncio
@pytest.mark.parametrize("host", [None, "another"])
async def test_who_connects_and_dies_before_he_says_so_is_lost(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    """Nobody waits for a new life of him until the time for joining is over, for this one was there."""
    only_from(monkeypatch, "w:1", out_of_time, times=0)
    async with spawned_cluster() as cluster:
        one = await cluster.join("w:0")
        works = [one.recv("w:1"), one.send(1, "w:1"), one.broadcast(1, members=["w:0", "w:1"])]
        other = await cluster.start("w:1", connect_and_die, "w:0", host=host)
        for work in works:
            with pytest.raises(PeerLost, match="w:1"):
                await asyncio.wait_for(work.async_wait(), LIMIT_S)
        assert await other.exited() == -signal.SIGKILL
