"""Inside an asyncio simulator that was there before: the workers live on its event loop, beside everything else that runs there.

    aiorlinf run --workers simulator=2,policy=1 examples/embedded_simulator.py

Each robot of the simulator is a coroutine. It awaits its next move as it awaits everything else, and the policy worker answers many
robots of several simulators with one call of the network.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

import aiorlinf

ROBOTS, STEPS, PLACES = 20, 30, 11
POLICY = "policy:0"


class Simulator:
    """What was there before, and knows nothing of aiorlinf: robots on a line that shall meet in the middle of it."""

    def __init__(self, decide: Callable[[int, torch.Tensor], Awaitable[int]]) -> None:
        self.decide = decide
        self.places = [number % PLACES for number in range(ROBOTS)]

    async def robot(self, number: int) -> None:
        for _ in range(STEPS):
            seen = torch.nn.functional.one_hot(torch.tensor(self.places[number]), PLACES).float()
            move = await self.decide(number, seen)
            self.places[number] = min(max(self.places[number] + move, 0), PLACES - 1)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(ROBOTS):
                tasks.create_task(self.robot(number))


@dataclass
class Question:
    """The answer comes with the robot's number as its tag, so robots do not wait for each other's answers."""

    robot: int
    seen: torch.Tensor


async def simulate(comm: aiorlinf.Worker) -> None:
    """All that changed for the simulator is what `decide` does."""

    async def decide(robot: int, seen: torch.Tensor) -> int:
        comm.send(Question(robot, seen), POLICY)  # begins at once, and need not be awaited for the answer to come
        move: int = await comm.recv(POLICY, tag=robot)
        return move

    simulator = Simulator(decide)
    await simulator.run()
    await comm.send(None, POLICY)
    print(f"places of the robots: {sorted(set(simulator.places))}")


async def answer(comm: aiorlinf.Worker, simulators: int) -> None:
    """Answer whoever asked until now, all in one batch."""
    left = PLACES // 2 - torch.arange(PLACES)
    policy = torch.stack([left < 0, left == 0, left > 0]).float()  # a network that has learned already: back, stay, on
    asked: asyncio.Queue[tuple[str, Question] | None] = asyncio.Queue()

    async def collect() -> None:
        leaving = simulators
        async for sender, question in comm.inbox():
            if question is not None:
                asked.put_nowait((sender, question))
            elif (leaving := leaving - 1) == 0:
                break
        asked.put_nowait(None)

    collecting = asyncio.create_task(collect())
    batches = questions = 0
    while (first := await asked.get()) is not None:
        batch = [first]
        while not asked.empty() and (more := asked.get_nowait()) is not None:
            batch.append(more)
        seen = torch.stack([question.seen for _, question in batch])
        moves = (seen @ policy.T).argmax(1) - 1
        # One work for all of them. A robot's tag keeps its answer apart from those of others.
        await aiorlinf.wait_all(
            [comm.send(move, sender, tag=question.robot) for (sender, question), move in zip(batch, moves.tolist(), strict=True)]
        )
        batches += 1
        questions += len(batch)
    await collecting
    print(f"answered {questions} questions in {batches} batches")


async def main() -> None:
    """One worker, of either kind."""
    workers = dict(part.split("=") for part in os.environ["AIORLINF_WORKERS"].split(","))
    async with aiorlinf.init() as comm:
        if comm.address == POLICY:
            await answer(comm, int(workers["simulator"]))
        else:
            await simulate(comm)


if __name__ == "__main__":
    asyncio.run(main())
