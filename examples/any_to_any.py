"""Actors that ask each other anything at any time: an inbox for the questions, a tag for each answer.

    aiorlinf run --workers actor=4 examples/any_to_any.py

Every actor answers the others while it waits for answers itself. Nobody knows beforehand who will ask whom.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

import aiorlinf


@dataclass
class Call:
    """A question: call this method, and send the result under this tag."""

    method: str
    argument: Any
    reply: int


class Actor:
    """Has methods that others may call, and calls those of others."""

    def __init__(self, comm: aiorlinf.Worker) -> None:
        self.comm = comm
        self.parameters = torch.full((1000,), float(comm.address.rank))
        self.answered = 0
        self._tags = itertools.count(1)  # 0 is where questions come in

    async def ask(self, peer: str, method: str, argument: Any = None) -> Any:
        """The result of the method at that actor. If it dies meanwhile, this raises PeerLost."""
        tag = next(self._tags)
        answer = self.comm.recv(peer, tag=tag)
        await self.comm.send(Call(method, argument, tag), peer)
        return await answer

    async def serve(self) -> None:
        """Answer until cancelled, one question at a time and in the order in which they come."""
        async for sender, call in self.comm.inbox():
            # Begun, not waited for: a slow reader does not hold up the others. What goes wrong on the way is logged.
            self.comm.send(getattr(self, call.method)(call.argument), sender, tag=call.reply)
            self.answered += 1

    def average(self, theirs: torch.Tensor) -> torch.Tensor:
        """Gossip: meet half way."""
        mine = self.parameters
        self.parameters = (mine + theirs) / 2
        return self.parameters


async def main() -> None:
    """One actor, from its first question to the last one of all."""
    async with aiorlinf.init() as comm:
        actor = Actor(comm)
        serving = asyncio.create_task(actor.serve())
        everybody = await comm.broadcast(await comm.gather(comm.address))
        others = [address for address in everybody if address != comm.address]
        choose = random.Random(comm.address.rank)
        for _ in range(20):
            actor.parameters = await actor.ask(choose.choice(others), "average", actor.parameters)
        # Nobody leaves while others may still ask: a gather is done when all have come, and so is the broadcast after it.
        values = await comm.gather(float(actor.parameters.mean()))
        await comm.broadcast(None)
        serving.cancel()
        if values is not None:
            print(f"{len(values)} actors, {'close together' if max(values) - min(values) < 1 else f'apart: {values}'}")


if __name__ == "__main__":
    asyncio.run(main())
