"""Eight consumer processes of unequal speed, and how evenly a policy keeps them at work."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import aiorlinf

__all__ = ["Consumers"]

CONSUMERS: Final = 8
SEED: Final = 7
SECONDS_PER_WEIGHT: Final = 0.004
"""Of the slowest consumer."""
LIMIT_S: Final = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["aiorlinf.worker", "scripts.benchmarks.channel_balance"])  # the second alone would not load torch


def _consumer(connection: Connection, environment: dict[str, str], speed: float) -> None:
    os.environ.update(environment)
    asyncio.run(_consume(connection, speed))


async def _consume(connection: Connection, speed: float) -> None:
    """Take part in one channel after the other, and say how long each time was busy."""
    async with aiorlinf.init() as comm:
        connection.send("ready")
        while (name := await _said(connection)) is not None:
            channel = await comm.connect_channel(name, consumer=True)
            connection.send("ready")
            busy = 0.0
            async for weight in channel:
                before = time.perf_counter()
                await asyncio.sleep(weight * SECONDS_PER_WEIGHT / speed)
                busy += time.perf_counter() - before
            connection.send(busy)


class Consumers:
    """The processes; they end with `close`, or with the process that made them."""

    def __init__(self, comm: aiorlinf.Worker) -> None:
        self._comm = comm
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(CONSUMERS):
            ours, theirs = _context.Pipe()
            arguments = (theirs, comm.env(f"consumer:{index}"), 4 ** (index / (CONSUMERS - 1)))
            process = _context.Process(target=_consumer, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    async def ready(self) -> None:
        """All have joined."""
        await self._answers()

    async def unevenness(self, name: str, policy: str, items: int) -> float:
        """The largest deviation of a consumer's busy time from the mean, as a share of it."""
        dice = random.Random(SEED)
        how = None if policy == "none" else policy
        channel = await self._comm.create_channel(name, maxsize=4 * CONSUMERS, policy=how, worker="bench")
        for end in self._ends:
            end.send(name)
        await self._answers()
        for _ in range(items):
            weight = 16 ** dice.random()
            await channel.put(weight, weight=weight)
        await channel.close()
        busy = await self._answers()
        mean = sum(busy) / len(busy)
        return float(max(abs(each - mean) for each in busy) / mean)

    async def _answers(self) -> list[Any]:
        return [await _said(end) for end in self._ends]

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.send(None)
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join(5.0)
            process.kill()
            process.join()
            end.close()


async def _said(connection: Connection) -> Any:
    end = time.monotonic() + LIMIT_S
    while not connection.poll():
        if time.monotonic() > end:
            raise TimeoutError(f"the other process says nothing within {LIMIT_S:g} s")
        await asyncio.sleep(0.005)
    return connection.recv()
