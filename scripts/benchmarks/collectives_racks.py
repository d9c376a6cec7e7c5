"""The part of ``scripts/bench collectives`` on two racks: what crosses the link between them in a broadcast, and how long it takes.

Two racks of two hosts with two workers each (`racks`); the first worker sends to the seven others. Beside it one transfer of the same size
over the same link. The bytes are the kernel's count of what has gone over the link, with all headers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

import torch
import uvloop

import aiorlinf
from aiorlinf.manager.service import ManagerService
from scripts.benchmarks import racks, shaped
from scripts.benchmarks.collectives_processes import started

__all__ = ["MBPS", "Crossing", "across_two_racks", "racks_problem"]

MBPS: Final = 1000.0

_MIB: Final = 1 << 20
_A_HOST: Final = 2
_MEMBERS: Final = [f"w:{rank}" for rank in range(racks.HOSTS * _A_HOST)]
_FAR: Final = "w:4"
"""The first worker of the second rack."""
_TOKEN: Final = b"nobody else is in these racks"
_PATTERN: Final = 251 * 4096
"""A period of the payload, prime to all sizes of pieces."""

racks_problem = racks.racks_problem


@dataclass(frozen=True, slots=True)
class Crossing:
    """Medians.

    Attributes:
        transfer_s, broadcast_s: how long they took.
        transfer_bytes, broadcast_bytes: what went over the link, as a multiple of the payload. The worst of the broadcast's.
        wrong: members that got something else.
    """

    transfer_s: float
    transfer_bytes: float
    broadcast_s: float
    broadcast_bytes: float
    wrong: list[str]


def across_two_racks(size: int, rounds: int) -> Crossing:
    """Measure payloads of `size` bytes. Raises Ended if one of the processes fails."""
    with started([_fabric, *(partial(_worker, rank=rank) for rank in range(len(_MEMBERS)))]) as (fabric, *workers):
        first = workers[::_A_HOST]
        pids = [worker.hear() for worker in first]
        fabric.say(pids)
        built = fabric.hear()
        for worker in first:
            worker.say(None)  # the network is there
        manager, *_ = [worker.hear() for worker in first]
        for rank, worker in enumerate(workers):
            worker.say((pids[rank // _A_HOST], manager, built, size, rounds))
        crossing, *_ = [worker.hear() for worker in workers]
        assert isinstance(crossing, Crossing)
        return crossing


# ---- in the processes


def _fabric(connection: Connection) -> None:
    shaped.enter_namespace()
    racks.build(connection.recv(), MBPS)
    connection.send(os.getpid())
    connection.poll(None)  # the namespace is there as long as this process


def _worker(connection: Connection, rank: int) -> None:
    host, inside = divmod(rank, _A_HOST)
    manager: ManagerService | None = None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if inside == 0:
            shaped.enter_namespace()
            connection.send(os.getpid())
            connection.recv()
            racks.take_address(host)
            if rank == 0:
                manager = ManagerService(config=None, token=_TOKEN)
                runner.run(manager.start(racks.address_of(host)))
            connection.send(None if manager is None else manager.address)
        pid, address, built, size, rounds = connection.recv()
        if inside:
            racks.enter_namespace_of(pid)
        connection.send(runner.run(_take_part(rank, address, built, size, rounds)))
        connection.poll(None)
        if manager is not None:
            runner.run(manager.close())


async def _take_part(rank: int, manager: str, fabric: int, size: int, rounds: int) -> Crossing | None:
    period = (torch.arange(_PATTERN) % 251).to(torch.uint8)
    payload = period.repeat(-(-size // _PATTERN))[:size] if rank == 0 else None
    labels = {"rack": racks.rack_of(rank // _A_HOST)}
    async with aiorlinf.init(f"w:{rank}", manager=manager, token=_TOKEN, labels=labels) as comm:
        transfers, broadcasts = [], []
        wrong: set[str] = set()
        for number in range(1 + rounds):
            # The first round makes the connections, with little.
            sent = payload if number or payload is None else payload[:_MIB]
            await comm.broadcast(None, members=_MEMBERS)
            begin = _Mark(fabric)
            if rank == 0:
                await comm.send(sent, _FAR)
                await comm.recv(_FAR)
                transfers.append(begin.since())
            elif comm.address == _FAR:
                await comm.send((await comm.recv("w:0")).numel(), "w:0")
            await comm.broadcast(None, members=_MEMBERS)
            begin = _Mark(fabric)
            got = await comm.broadcast(sent, members=_MEMBERS)
            broadcasts.append(begin.since())
            await comm.gather(None, members=_MEMBERS)  # nobody's loop is kept from handing on by what comes next
            told = await comm.gather(await _as_sent(got, period), members=_MEMBERS)
            wrong.update(member for member, right in zip(_MEMBERS, told or (), strict=False) if not right)
            del got
        await comm.gather(None, members=_MEMBERS)  # all have heard of everything
    if rank:
        return None
    return Crossing(
        transfer_s=statistics.median(took for took, _ in transfers[1:]),
        transfer_bytes=statistics.median(crossed / size for _, crossed in transfers[1:]),
        broadcast_s=statistics.median(took for took, _ in broadcasts[1:]),
        broadcast_bytes=max(crossed / size for _, crossed in broadcasts[1:]),
        wrong=sorted(wrong),
    )


class _Mark:
    """A moment, and what had crossed by then."""

    def __init__(self, fabric: int) -> None:
        self._fabric = fabric
        self._crossed = racks.crossed_bytes(fabric)
        self._time = time.perf_counter()

    def since(self) -> tuple[float, int]:
        """Seconds and bytes."""
        took = time.perf_counter() - self._time
        return took, racks.crossed_bytes(self._fabric) - self._crossed


async def _as_sent(got: torch.Tensor, period: torch.Tensor) -> bool:
    """Bit by bit, so that the loop runs on: on that of the first worker the manager lives, too."""
    for part in torch.split(got, _PATTERN):
        if not torch.equal(part, period[: part.numel()]):
            return False
        await asyncio.sleep(0)
    return True
