"""Asynchronous reinforcement learning: rollout workers play an Atari game, a trainer learns from them, and no one holds up the others.

    aiorlinf run --workers rollout=2,trainer=1 examples/async_rollout.py --seconds 60 --out out

Every worker runs this file, and its address says which part it plays. Rollout workers send each trajectory to the trainer's inbox.
After each update the trainer sends the new weights to all of them; they take these between two steps of the game and play on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from atari.games import Games, rom_name
from atari.learner import Learner
from atari.messages import Farewell, Trajectory, Weights
from atari.player import Player
from atari.report import Report, Traffic

import aiorlinf

TRAINER = "trainer:0"

NEWS = 1
"""The tag of what the trainer tells a rollout worker: `Weights` again and again, and in the end None."""

PROGRESS_S = 3.0
"""Time between two lines of progress."""

PARTING_S = 60.0
"""Time in which the last trajectories must have come in."""


async def roll_out(comm: aiorlinf.Worker, options: argparse.Namespace) -> None:
    """Play until the trainer says that it is enough."""
    group = comm.collective.create_collective_group([comm.address, TRAINER])
    seed = options.seed + 1000 * (comm.address.rank + 1)  # a worker's environments take consecutive seeds from here
    # In a thread, as everything that takes more than a few milliseconds: the loop has others to serve.
    games = await asyncio.to_thread(Games, options.game, options.envs, seed)
    player = await asyncio.to_thread(Player, comm.address, games, seed)
    # Without a bound, fast players would fill the trainer's memory with games that a policy of long ago has played.
    may_play_on = asyncio.Semaphore(options.ahead - 1)
    enough = asyncio.Event()
    waited_s = 0.0

    async def follow_news() -> None:
        trained = 0
        while (weights := await group.recv(tag=NEWS)) is not None:
            player.take(weights)
            for _ in range(weights.trained - trained):
                may_play_on.release()
            trained = weights.trained
        enough.set()
        may_play_on.release()

    try:
        await group.recv(tag=NEWS).then(player.take)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow_news())
            while not enough.is_set():
                trajectory = await player.play(options.length)
                await group.send(trajectory)
                before = time.perf_counter()
                await may_play_on.acquire()
                waited_s += time.perf_counter() - before
        await group.send(Farewell(player.steps, player.swaps, time.perf_counter() - began, waited_s))
    finally:
        player.close()


class Trainer:
    """Learns from whatever arrives, and tells everybody."""

    def __init__(self, comm: aiorlinf.Worker, options: argparse.Namespace, learner: Learner) -> None:
        rollouts = [f"rollout:{rank}" for rank in range(options.rollouts)]
        self.comm = comm
        self.options = options
        self.groups = {rollout: comm.collective.create_collective_group([rollout, comm.address]) for rollout in rollouts}
        self.learner = learner
        self.report = Report(options.game)
        self.arrived: asyncio.Queue[Trajectory | None] = asyncio.Queue()  # None: there will be no more
        self.trained: Counter[str] = Counter()  # trajectories of each rollout worker
        self.links: dict[str, aiorlinf.LinkStats] = {}  # as last seen: a link's counters go with it
        self.began = 0.0  # when the first trajectory came
        self.playing = asyncio.Event()  # from then on
        self.enough = False
        self.all_left = asyncio.Event()

    async def run(self) -> None:
        """Receive, learn, show progress and watch the clock, all at once."""
        await self.publish()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.collect())
            tasks.create_task(self.end_in_time())
            progress = tasks.create_task(self.show_progress())
            await self.learn()
            progress.cancel()
        self.print_progress()
        plot, figures = await asyncio.to_thread(self.report.save, self.options.out)
        print(f"{self.report.table()}\nplot: {plot}\nfigures: {figures}")

    async def collect(self) -> None:
        """Take what comes until all have said farewell. Messages keep their order, so that comes after a worker's last trajectory."""
        left = set()
        async for sender, message in self.comm.inbox():
            if isinstance(message, Trajectory):
                if not self.playing.is_set():
                    self.began = time.perf_counter()
                    self.playing.set()
                self.report.arrived(message, self.now())
                self.arrived.put_nowait(message)
            else:
                self.report.left(message)
                left.add(sender)
            self.links |= {link.remote: link for link in self.comm.stats().links}
            if len(left) == len(self.groups):
                break
        self.all_left.set()
        self.arrived.put_nowait(None)

    async def learn(self) -> None:
        """Update after update, until nothing more comes."""
        async for batch in self.batches():
            lags = [self.learner.version - trajectory.info.first_version for trajectory in batch]
            update = await asyncio.to_thread(self.learner.update, batch)  # the loop goes on receiving meanwhile
            self.report.trained(update, lags, self.now())
            self.trained.update(trajectory.info.worker for trajectory in batch)
            await self.publish()

    async def batches(self) -> AsyncIterator[list[Trajectory]]:
        """As many trajectories as there are rollout workers, whoever they come from; the last batch may be smaller."""
        batch: list[Trajectory] = []
        while (trajectory := await self.arrived.get()) is not None:
            batch.append(trajectory)
            if len(batch) == len(self.groups):
                yield batch
                batch = []
        if batch:
            yield batch

    async def publish(self) -> None:
        """Send the weights of now to everybody."""
        if self.enough:
            return
        state = self.learner.snapshot()
        news = {rollout: Weights(self.learner.version, self.trained[rollout], state) for rollout in self.groups}
        await aiorlinf.wait_all([group.send(news[rollout], tag=NEWS) for rollout, group in self.groups.items()])

    async def end_in_time(self) -> None:
        """Tell everybody when it is enough, and do not wait for ever on one that died before its farewell."""
        await self.playing.wait()
        await asyncio.sleep(self.options.seconds)
        self.enough = True
        await aiorlinf.wait_all([group.send(None, tag=NEWS) for group in self.groups.values()])
        async with asyncio.timeout(PARTING_S):
            await self.all_left.wait()

    async def show_progress(self) -> None:
        """One line every few seconds."""
        await self.playing.wait()
        while True:
            await asyncio.sleep(PROGRESS_S)
            self.print_progress()

    def print_progress(self) -> None:
        """One line about the time since the last."""
        links = self.links.values()
        messages = sum(link.messages_sent + link.messages_received for link in links)
        payload_bytes = sum(link.bytes_sent + link.bytes_received for link in links)
        print(self.report.sample(self.now(), Traffic(messages, payload_bytes)).line())

    def now(self) -> float:
        """Seconds since the first trajectory came."""
        return time.perf_counter() - self.began


def read_options() -> argparse.Namespace:
    """The command line."""
    # As "rollout=2,trainer=1", from `aiorlinf run`.
    workers = dict(part.split("=") for part in os.environ.get("AIORLINF_WORKERS", "rollout=1").split(","))
    parser = argparse.ArgumentParser(
        description="Rollout workers play an Atari game, and a trainer learns from it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to play")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot and the figures")
    parser.add_argument("--game", type=rom_name, default="road_runner", help="such as Pong, or space_invaders")
    parser.add_argument("--envs", type=int, default=8, help="environments of each rollout worker")
    parser.add_argument("--length", type=int, default=64, help="steps of a trajectory")
    parser.add_argument("--ahead", type=int, default=2, help="trajectories of one worker, at least 1, that may wait for the trainer")
    parser.add_argument("--seed", type=int, default=0, help="of the games, the first weights and the choice of actions")
    parser.add_argument("--rollouts", type=int, default=int(workers.get("rollout", 0)), help="rollout workers in the job")
    return parser.parse_args()


async def main() -> None:
    """One worker, from joining the job to leaving it."""
    options = read_options()
    async with aiorlinf.init() as comm:
        if comm.address == TRAINER:
            games = await asyncio.to_thread(Games, options.game, 1, options.seed)
            learner = await asyncio.to_thread(Learner, games.actions, options.seed)
            await Trainer(comm, options, learner).run()
        else:
            await roll_out(comm, options)


if __name__ == "__main__":
    asyncio.run(main())
