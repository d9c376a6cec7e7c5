"""The process that is tormented: one worker, told by the driver what to do next."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import random
import socket
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import uvloop

import aiorlinf
from aiorlinf.errors import PeerError

__all__ = ["run"]

MIB = 1 << 20
SMALLEST, LARGEST = 64 * 1024, 24 * MIB
IN_FLIGHT = 3
KEPT = 6
ANSWER_SECONDS = 30.0


def run(connection: Connection, parent: int, environment: dict[str, str], address: str) -> None:
    """Until the driver closes its end of the connection, or ends."""
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(parent,), name="watch the driver", daemon=True).start()
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection, address))


def _end_with(parent: int) -> None:
    """A fork server is between us and the driver: look at the driver itself."""
    with contextlib.suppress(ProcessLookupError):
        wait([os.pidfd_open(parent)])
    ctypes.CDLL(None)._exit(1)


async def _first_stream() -> None:
    """The first stream of a loop makes libuv open a descriptor that it keeps, for days when there are none: not one of ours."""
    one, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        transport.abort()


async def _serve(connection: Connection, address: str) -> None:
    await _first_stream()
    async with aiorlinf.init(address) as comm:
        victim = Victim(comm)
        while True:
            try:
                name, *arguments = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            try:
                answer = ("ok", await getattr(victim, name)(*arguments))
            except Exception:  # whatever it is, the driver prints it and ends the run
                answer = ("failed", traceback.format_exc())
            connection.send(answer)


class Victim:
    """What can be asked of it."""

    def __init__(self, comm: aiorlinf.Worker) -> None:
        self.comm = comm
        self.source: torch.Tensor | None = None
        self.kept: deque[torch.Tensor] | None = None

    async def verify(self, peer: str, seed: int) -> None:
        """Exchange a few messages with a peer of the same seed, both ways at once, and look at every byte."""
        choice = random.Random(seed)
        for number in range(3):
            size = choice.randrange(SMALLEST, LARGEST)
            mine = self.comm.empty(size, dtype=torch.uint8) if number == 1 else torch.empty(size, dtype=torch.uint8)
            mine.fill_(number + 1)
            await until_there(functools.partial(self.comm.send, [mine, seed], peer, tag=1, timeout=ANSWER_SECONDS))
            theirs, echo = await until_there(functools.partial(self.comm.recv, peer, tag=1, timeout=ANSWER_SECONDS))
            assert echo == seed, f"a message of round {echo} in round {seed}"
            assert bool((theirs == number + 1).all()), "the message is not what was sent"

    async def storm(self, peer: str, seed: int) -> Counter[str]:
        """Send to the peer and receive from it, as much as goes, until it is gone; how many messages got through."""
        counts: Counter[str] = Counter()
        await asyncio.gather(self._send_all(peer, random.Random(seed), counts), self._receive_all(peer, random.Random(~seed), counts))
        return counts

    async def _send_all(self, peer: str, choice: random.Random, counts: Counter[str]) -> None:
        works: deque[Any] = deque()
        try:
            while True:
                works.append(self._send_one(peer, choice))
                if len(works) > IN_FLIGHT:
                    await works.popleft()
                    counts["sent"] += 1
        except PeerError:
            counts["lost sends"] += 1
        for work in works:
            try:
                await work
                counts["sent"] += 1
            except PeerError:
                counts["lost sends"] += 1

    def _send_one(self, peer: str, choice: random.Random) -> Any:
        value = choice.randrange(1, 255)
        size = int(SMALLEST * (LARGEST / SMALLEST) ** choice.random())
        kind = choice.randrange(4)
        if kind == 0:
            return self.comm.send([self.comm.empty(size, dtype=torch.uint8).fill_(value), value], peer)
        tensor = torch.full((size,), value, dtype=torch.uint8)
        if kind == 1:
            return self.comm.send([tensor, value], peer)
        if kind == 2:
            return self.comm.send([tensor.numpy(), value], peer)
        return self.comm.send([{"parts": [tensor, tensor[: size // 2], torch.tensor(value)]}, value], peer)

    async def _receive_all(self, peer: str, choice: random.Random, counts: Counter[str]) -> None:
        kept: list[tuple[Any, int]] = []
        while counts["lost receives"] < 2:
            try:
                content, value = await self.comm.recv(peer)
            except PeerError:
                counts["lost receives"] += 1  # what had come before, and was not asked for yet, can still be received
                continue
            parts = content["parts"] if isinstance(content, dict) else [content]
            kept += [(torch.as_tensor(part), value) for part in parts]
            del content, parts
            counts["received"] += 1
            while len(kept) > choice.randrange(KEPT):
                look_at(*kept.pop(choice.randrange(len(kept))))
        # The sender is gone; what it sent is still ours.
        for tensor, value in kept:
            look_at(tensor, value)

    async def calm(self) -> dict[str, int]:
        """Let go of everything that is free; what is left of links and shared memory."""
        gc.collect()
        memory = self.comm._table.memory
        assert memory is not None
        memory.arena.trim()  # segments that nobody uses would be kept for the next messages
        ctypes.CDLL(None).malloc_trim(0)  # as the C library would keep what was freed
        return {"links": len(self.comm.stats().links), "arena": memory.arena.bytes}

    async def flow_out(self, peer: str, count: int, size: int) -> None:
        """Send so many messages of so many bytes, always from the same tensor."""
        if self.source is None:
            self.source = torch.ones(size, dtype=torch.uint8)
        for number in range(count):
            self.source[0] = number % 256
            await until_there(functools.partial(self.comm.send, self.source, peer))

    async def flow_in(self, peer: str, count: int, keep: int) -> None:
        """Receive so many, touch every page of each, and keep the last few."""
        if self.kept is None:
            self.kept = deque(maxlen=keep)
        for number in range(count):
            tensor = await until_there(functools.partial(self.comm.recv, peer))
            assert int(tensor[0]) == number % 256
            assert int(tensor[4096::4096].sum()) == len(tensor[4096::4096])
            self.kept.append(tensor)
            del tensor


def look_at(tensor: torch.Tensor, value: int) -> None:
    """Is it what was sent?"""
    assert bool((tensor == value).all()), f"a tensor that should be full of {value} is not"


async def until_there(operation: Callable[[], Any]) -> Any:
    """Until a peer that was killed is there again; before that, operations say that it is gone."""
    end = asyncio.get_running_loop().time() + ANSWER_SECONDS
    while True:
        try:
            return await operation()
        except PeerError:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.01)
