"""A channel under pressure: calls that are cancelled at random, consumers that are killed, a consumer that is slow."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

import aiorlinf
from aiorlinf.errors import ChannelClosed
from scripts.tortures.stage import Failed

__all__ = ["Bounds", "ExactlyOnce", "Leases", "render", "run_bounds", "run_exactly_once", "run_leases"]

LIMIT_S = 300.0
TIME_LIMIT_S = 0.003
LARGE_SHARE = 0.1
MIB = 1 << 20

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["aiorlinf.worker", "scripts.tortures.channel"])


@dataclass
class ExactlyOnce:
    """What the consumers got.

    Attributes:
        items: numbers that were put, from 0.
        got: of each consumer, in order.
        cancelled: gets that its time limit ended, of each consumer; `cancelled_puts` of the producer.
        seconds: how long it took.
    """

    items: int
    batches: bool
    got: list[list[int]]
    cancelled: list[int]
    cancelled_puts: int
    seconds: float

    def wrong(self) -> list[str]:
        """What must not be."""
        found = []
        everything = sorted(number for each in self.got for number in each)
        expected = list(range(self.items))
        if everything != expected:
            missing = sorted(set(expected) - set(everything))
            twice = sorted({number for number in everything if everything.count(number) > 1})
            found.append(f"{len(missing)} items are missing {missing[:5]}, {len(twice)} came more than once {twice[:5]}")
        for index, each in enumerate(self.got):
            backwards = sum(later < earlier for earlier, later in itertools.pairwise(each))
            if backwards:
                found.append(f"consumer {index} saw {backwards} items after newer ones")
        return found


@dataclass
class Leases:
    """What became of items on lease.

    Attributes:
        processed: how often each item was dealt with, by its number.
        killed: consumers.
        redelivered: items that came back.
    """

    items: int
    processed: dict[int, int]
    killed: int
    redelivered: int
    seconds: float

    def wrong(self) -> list[str]:
        """What must not be."""
        lost = [number for number in range(self.items) if not self.processed.get(number)]
        return [f"{len(lost)} items were lost: {lost[:5]}"] if lost else []


@dataclass
class Bounds:
    """Memory of a channel worker.

    Attributes:
        bound, item: bytes, as asked for.
        before, highest: resident bytes.
        moved: bytes that went through.
        backend: how.
    """

    backend: str
    bound: int
    item: int
    before: int
    highest: int
    moved: int
    looks: list[int] = field(default_factory=list)

    def wrong(self) -> list[str]:
        """What must not be."""
        growth = self.highest - self.before
        if growth > self.bound + self.item:
            return [f"the channel worker grew by {growth / MIB:.1f} MiB; {(self.bound + self.item) / MIB:.1f} MiB are allowed"]
        return []


# ---- the processes


def _child(connection: Connection, environment: dict[str, str], part: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)

    async def body() -> Any:
        async with aiorlinf.init() as comm:
            return await part(comm, connection, *arguments)

    connection.send(asyncio.run(body()))


@contextmanager
def _part(comm: aiorlinf.Worker, address: str, part: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that runs `part(comm, connection, *arguments)` as this worker; killed at the end of the block."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_child, args=(theirs, comm.env(address), part, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


async def _said(connection: Connection) -> Any:
    end = time.monotonic() + LIMIT_S
    while not connection.poll():
        if time.monotonic() > end:
            raise Failed(f"a process of the channel's drill says nothing within {LIMIT_S:g} s")
        await asyncio.sleep(0.01)
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise Failed("a process of the channel's drill died of itself") from None


# ---- exactly once


async def _get_with_limits(comm: aiorlinf.Worker, connection: Connection, batches: bool, seed: int) -> tuple[list[int], int]:
    """Get in a loop, each time for some milliseconds at most; now and then a cancel comes at any other moment."""
    channel = await comm.connect_channel("drill")
    connection.send("ready")
    dice = random.Random(seed)
    got: list[int] = []
    cancelled = 0
    while True:
        limit = TIME_LIMIT_S if dice.random() < 0.7 else TIME_LIMIT_S * dice.random()
        try:
            async with asyncio.timeout(limit):
                found = await channel.get_batch(4) if batches else [await channel.get()]
        except TimeoutError:
            cancelled += 1
        except ChannelClosed:
            return got, cancelled
        else:
            got += [item["number"] for item in found]


async def _exactly_once(items: int, batches: bool, seed: int) -> ExactlyOnce:
    dice = random.Random(seed)
    large = torch.zeros(MIB // 4)
    async with aiorlinf.init("driver:0") as comm:
        channel = await comm.create_channel("drill", maxsize=16, producer=True)
        with (
            _part(comm, "consumer:0", _get_with_limits, batches, seed + 1) as (_, one),
            _part(comm, "consumer:1", _get_with_limits, batches, seed + 2) as (_, two),
        ):
            for connection in (one, two):
                await _said(connection)
            begin = time.perf_counter()
            cancelled = 0
            for number in range(items):
                item = {"number": number, "payload": large if dice.random() < LARGE_SHARE else None}
                while True:
                    try:
                        async with asyncio.timeout(TIME_LIMIT_S if dice.random() < 0.3 else None):
                            await channel.put(item)
                    except TimeoutError:
                        cancelled += 1
                    else:
                        break
                if dice.random() < 0.5:
                    await asyncio.sleep(dice.expovariate(1000))
            await channel.close()
            found = [await _said(one), await _said(two)]
            seconds = time.perf_counter() - begin
    return ExactlyOnce(items, batches, [got for got, _ in found], [count for _, count in found], cancelled, seconds)


def run_exactly_once(items: int, *, batches: bool, seed: int) -> ExactlyOnce:
    """Two consumer processes with time limits of milliseconds; puts are cancelled, too. Raises Failed."""
    return asyncio.run(_exactly_once(items, batches, seed))


# ---- leases


async def _process_leases(comm: aiorlinf.Worker, connection: Connection) -> None:
    channel = await comm.connect_channel("drill")
    while True:
        try:
            async with channel.lease() as item:
                await asyncio.sleep(0.001)
                connection.send(item)  # it is dealt with; the lease may still be lost
        except ChannelClosed:
            break
    connection.send(None)


async def _leases(items: int, consumers: int, kills: int, seed: int) -> Leases:
    dice = random.Random(seed)
    processed: dict[int, int] = {}
    begin = time.perf_counter()
    async with aiorlinf.init("driver:0") as comm:
        channel = await comm.create_channel("drill")
        for number in range(items):
            channel.put(number)
        await channel.close()
        lives = 0
        killed = 0

        async def consumer() -> None:
            nonlocal lives, killed
            while True:
                lives += 1
                with _part(comm, f"consumer:{lives}", _process_leases) as (process, connection):
                    doomed = killed < kills
                    killed += doomed
                    left = dice.randrange(1, max(2, items // (kills + consumers))) if doomed else -1
                    while left:
                        item = await _said(connection)
                        if item is None:
                            return
                        processed[item] = processed.get(item, 0) + 1
                        left -= 1
                    process.kill()
                    process.join()
                    while connection.poll():
                        try:
                            item = connection.recv()
                        except EOFError:
                            break
                        processed[item] = processed.get(item, 0) + 1

        await asyncio.gather(*(consumer() for _ in range(consumers)))
        stats = await channel.stats()
    return Leases(items, processed, killed, stats.redeliveries, time.perf_counter() - begin)


def run_leases(items: int, *, consumers: int, kills: int, seed: int) -> Leases:
    """Consumers with leases that are killed at random moments. Raises Failed."""
    return asyncio.run(_leases(items, consumers, kills, seed))


# ---- bounds


async def _read_slowly(comm: aiorlinf.Worker, connection: Connection, pause: float) -> int:
    channel = await comm.connect_channel("drill")
    connection.send("ready")
    count = 0
    async for _ in channel:
        count += 1
        await asyncio.sleep(pause)
    return count


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmRSS"].split()[0]) * 1024


async def _bounds(total: int, bound: int, item: int, backend: str) -> Bounds:
    tensor = torch.zeros(item // 4)
    async with aiorlinf.init("driver:0", config={"cluster": {"collective": {"backend": backend}}}) as comm:
        channel = await comm.create_channel("drill", max_bytes=bound)
        pid = next(peer.pid for peer in await comm.peers() if peer.address == "channel.drill:0")
        with _part(comm, "consumer:0", _read_slowly, 0.02) as (_, connection):
            await _said(connection)
            await channel.stats()
            before = _resident(pid)
            looks = [before]
            moved = 0
            works: list[aiorlinf.AsyncWork[None]] = []
            while moved < total:
                works.append(channel.put(tensor))
                moved += item
                if len(works) > 2 * bound // item:
                    await works.pop(0)
                    looks.append(_resident(pid))
            await aiorlinf.wait_all(works)
            await channel.close()
            await _said(connection)
            looks.append(_resident(pid))
    return Bounds(backend, bound, item, before, max(looks), moved, looks)


def run_bounds(total: int, *, bound: int = 64 * MIB, item: int = 4 * MIB, backend: str = "auto") -> Bounds:
    """A fast producer and a slow consumer. Raises Failed."""
    return asyncio.run(_bounds(total, bound, item, backend))


def render(parts: Sequence[ExactlyOnce | Leases | Bounds], seed: int) -> str:
    """As a table."""
    rows = []
    wrong = []
    for part in parts:
        wrong += part.wrong()
        match part:
            case ExactlyOnce():
                what = "exactly once, get_batch" if part.batches else "exactly once, get"
                shares = " and ".join(f"{len(got):,}" for got in part.got)
                cut = f"{sum(part.cancelled):,} gets and {part.cancelled_puts:,} puts were cancelled"
                rows.append((what, f"{part.items:,} items, {shares} to the two consumers; {cut}; {part.seconds:.1f} s"))
            case Leases():
                more = sum(part.processed.values()) - len(part.processed)
                text = f"{part.items:,} items, {part.killed} consumers killed, {part.redelivered} redelivered"
                rows.append(("at least once, lease", f"{text}, {more} dealt with more than once; {part.seconds:.1f} s"))
            case Bounds():
                growth = (part.highest - part.before) / MIB
                text = f"{part.moved / MIB:.0f} MiB through a bound of {part.bound / MIB:.0f} MiB, items of {part.item / MIB:g} MiB"
                rows.append((f"bounded memory, {part.backend}", f"{text}: the channel worker grew by {growth:.1f} MiB at most"))
    rows.append(("wrong", str(len(wrong) or "nothing")))
    lines = [
        f"# A channel under pressure (seed {seed})",
        "",
        "| drill | |",
        "| --- | --- |",
        *(f"| {what} | {text} |" for what, text in rows),
    ]
    return "\n".join([*lines, *([""] if wrong else []), *wrong]) + "\n"
