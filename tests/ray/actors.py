"""Actors for the tests: one asynchronous with the mixin, one plain and without any knowledge of aiorlinf."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch

import aiorlinf
import aiorlinf.ray
from aiorlinf.errors import AiorlinfError

__all__ = ["Player", "Trainer"]


class Player(aiorlinf.ray.WorkerActor):
    """Asynchronous: its worker lives on the actor's loop."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.at_first = self.comm.address  # there already

    async def facts(self) -> dict[str, Any]:
        """Who and where it is."""
        await self.comm
        peers = {str(peer.address): dict(peer.labels) for peer in await self.comm.peers()}
        return {
            "pid": os.getpid(),
            "address": str(self.comm.address),
            "at_first": str(self.at_first),
            "incarnation": self.comm.incarnation,
            "on_its_loop": self.comm.home.loop is asyncio.get_running_loop(),
            "same": aiorlinf.ray.comm() is self.comm,
            "peers": peers,
        }

    async def send(self, to: str, value: Any) -> str:
        """Send tensors of our size and a value."""
        await self.comm.send({"frames": torch.arange(self.size), "value": value}, to)
        return "sent"

    async def recv(self, source: str) -> Any:
        """What comes, as plain Python."""
        got = await self.comm.recv(source)
        return {name: value.sum().item() if isinstance(value, torch.Tensor) else value for name, value in got.items()}

    async def recv_or_error(self, source: str) -> str:
        """The name of the error that ends the waiting, and what it says."""
        try:
            return str(await self.comm.recv(source))
        except AiorlinfError as error:
            return f"{type(error).__name__}: {error}"

    async def broadcast(self, members: list[str], size: int) -> float:
        """Everybody calls it; the first has the tensor."""
        mine = torch.full((size,), 2.0) if self.comm.address == members[0] else None
        got = await self.comm.broadcast(mine, root=members[0], members=members)
        return float(got.sum())

    async def ways(self) -> dict[str, str]:
        """How large payloads go to each peer."""
        return {str(link.remote): link.backend for link in self.comm.stats().links}

    async def put(self, channel: str, items: int) -> str:
        """Make the channel, fill and close it; where it is held."""
        made: aiorlinf.Channel[torch.Tensor] = await self.comm.create_channel(channel, producer=True)
        for item in range(items):
            await made.put(torch.full((50_000,), item))
        await made.close()
        return "put"

    async def take_all(self, channel: str) -> list[int]:
        """Everything, to its end."""
        made: aiorlinf.Channel[torch.Tensor] = await self.comm.connect_channel(channel)
        return [int(item[-1]) async for item in made]

    async def holder(self, channel: str) -> dict[str, Any]:
        """Process and labels of the channel worker."""
        peer = next(peer for peer in await self.comm.peers() if str(peer.address) == f"channel.{channel}:0")
        return {"pid": peer.pid, "labels": dict(peer.labels)}

    async def sleep(self) -> str:
        """Be busy for long."""
        await asyncio.sleep(60)
        return "rested"

    async def new_life_of(self, address: str, incarnation: int) -> int:
        """Wait for a life after this one."""
        while (peer := await self.comm.wait_for(address)).incarnation <= incarnation:
            await asyncio.sleep(0.05)
        return int(peer.incarnation)


class Trainer:
    """Plain: it knows nothing of aiorlinf but what it imports, and blocks."""

    def __init__(self, bias: int, *, scale: int = 1) -> None:
        self.bias = bias
        self.scale = scale

    def step(self, source: str) -> int:
        """Receive, answer, and tell Ray."""
        comm = aiorlinf.ray.comm()
        got = comm.recv(source).wait(timeout=30)
        answer = self.scale * int(got["frames"].sum()) + self.bias
        comm.send({"answer": answer}, source).wait(timeout=30)
        return answer

    def facts(self) -> tuple[int, int, str]:
        """Process, incarnation, labels."""
        return os.getpid(), int(aiorlinf.ray.comm().incarnation), os.environ["AIORLINF_LABELS"]

    def die(self) -> None:
        """As by a crash in C."""
        os._exit(7)


class ByItself:
    """Joins as any other program does, with what is in its environment."""

    async def hello(self, to: str) -> str:
        """Join, say hello, leave."""
        async with aiorlinf.init() as comm:
            await comm.send(f"hello from {comm.address}", to)
            return str(comm.address)
