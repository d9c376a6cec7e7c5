"""A pipeline over channels: rollout workers of unequal speed, reward workers of unequal speed, and a trainer.

    aiorlinf run --workers rollout=3,reward=2,trainer=1 examples/channel_rollout.py --seconds 10

Rollout workers put trajectories into the channel `trajectories`, whose policy gives each to the reward worker that will have worked least
with it. Reward workers hold a trajectory on lease while they score it, so that one that dies loses nothing, and put it into `scored`, from
which the trainer takes batches of a number of steps. At the end everybody says how busy it was.

Work is played by sleeping: what is shown here is who waits for whom. `examples/async_rollout.py` plays and learns for real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, replace

import torch

import aiorlinf

TRAINER = "trainer:0"
REPORT = 1
"""The tag of what everybody tells the trainer at the end."""


@dataclass
class Trajectory:
    """Steps of one episode."""

    worker: str
    observations: torch.Tensor
    reward: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.observations)


@dataclass
class Report:
    """How a worker spent its time."""

    worker: str
    items: int
    busy_s: float
    total_s: float


class Clock:
    """Work that is slept, and counted."""

    def __init__(self, comm: aiorlinf.Worker, steps_per_s: float) -> None:
        self.comm = comm
        self.steps_per_s = steps_per_s
        self.items = 0
        self.busy_s = 0.0
        self.began = time.perf_counter()

    async def work(self, steps: int) -> None:
        """So many steps."""
        before = time.perf_counter()
        await asyncio.sleep(steps / self.steps_per_s)
        self.busy_s += time.perf_counter() - before
        self.items += 1

    async def report(self) -> None:
        """Tell the trainer."""
        total = time.perf_counter() - self.began
        await self.comm.send(Report(self.comm.address, self.items, self.busy_s, total), TRAINER, tag=REPORT)


async def roll_out(comm: aiorlinf.Worker, options: argparse.Namespace) -> None:
    """Play episodes of 8 to 128 steps until the time is over; the worker of rank 2 is three times as fast as that of rank 0."""
    trajectories = await comm.connect_channel("trajectories", producer=True)
    dice = random.Random(comm.address.rank)
    clock = Clock(comm, options.speed * (1 + comm.address.rank))
    while time.perf_counter() - clock.began < options.seconds:
        steps = int(8 * 16 ** dice.random())
        await clock.work(steps)
        await trajectories.put(Trajectory(comm.address, torch.randn(steps, options.width)), weight=steps)
    await trajectories.close()
    await clock.report()


async def reward(comm: aiorlinf.Worker, options: argparse.Namespace) -> None:
    """Score what comes, until there is no more."""
    scored = await comm.connect_channel("scored", producer=True)
    trajectories = await comm.connect_channel("trajectories", consumer=True)
    clock = Clock(comm, 2 * options.speed * (1 + comm.address.rank))
    while True:
        try:
            async with trajectories.lease() as trajectory:
                await clock.work(trajectory.steps)
                value = float(trajectory.observations.mean())
                await scored.put(replace(trajectory, reward=value), weight=trajectory.steps)
        except aiorlinf.errors.ChannelClosed:
            break
    await scored.close()
    await clock.report()


async def train(comm: aiorlinf.Worker, options: argparse.Namespace, others: list[str]) -> None:
    """Take batches until there are no more; then say how busy everybody was."""
    counts = {role: sum(address.startswith(f"{role}:") for address in others) for role in ("rollout", "reward")}
    trajectories = await comm.create_channel(
        "trajectories", maxsize=32, policy="performance_aware", producers=counts["rollout"], worker="pipeline"
    )
    scored = await comm.create_channel("scored", maxsize=64, producers=counts["reward"], worker="pipeline")
    clock = Clock(comm, 8 * options.speed)
    steps = 0
    while True:
        try:
            batch = await scored.get_batch(options.batch)
        except aiorlinf.errors.ChannelClosed:
            break
        await clock.work(sum(trajectory.steps for trajectory in batch))
        steps += sum(trajectory.steps for trajectory in batch)
    total = time.perf_counter() - clock.began
    reports = [await comm.recv(other, tag=REPORT) for other in others]
    reports.append(Report(comm.address, clock.items, clock.busy_s, total))
    print(await trajectories.stats())
    print(await scored.stats())
    print(f"{steps} steps learned from in {clock.items} batches")
    for report in reports:
        print(f"{report.worker:<12} {report.items:>6} items   busy {100 * report.busy_s / report.total_s:5.1f} %")


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A pipeline over channels.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to play")
    parser.add_argument("--speed", type=float, default=1000.0, help="steps per second of the slowest rollout worker")
    parser.add_argument("--batch", type=int, default=512, help="steps of a batch")
    parser.add_argument("--width", type=int, default=256, help="numbers of an observation")
    return parser.parse_args()


async def main() -> None:
    """One worker, from joining the job to leaving it."""
    options = read_options()
    workers = dict(part.split("=") for part in os.environ.get("AIORLINF_WORKERS", "").split(",") if part)
    others = [f"{role}:{rank}" for role in ("rollout", "reward") for rank in range(int(workers.get(role, 0)))]
    async with aiorlinf.init() as comm:
        if comm.address == TRAINER:
            await train(comm, options, others)
        elif comm.address.group == "reward":
            await reward(comm, options)
        else:
            await roll_out(comm, options)


if __name__ == "__main__":
    asyncio.run(main())
