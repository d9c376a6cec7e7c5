"""Workers as Ray actors: ``import aiorlinf.ray``.

import ray
import aiorlinf.ray

class Rollout(aiorlinf.ray.WorkerActor):  # or any class that you have
    async def play(self, steps):
        await self.comm.send(await self.games.play(steps), "trainer:0")

ray.init()
with aiorlinf.ray.start() as job:
    rollout = job.worker(Rollout, "rollout:0", num_cpus=1, label_selector={"zone": "a"}).remote()
    ray.get(rollout.play.remote(64))
"""

from __future__ import annotations

from aiorlinf.launch.ray.actors import ActorMaker, WorkerActor, comm
from aiorlinf.launch.ray.job import Job, start, worker
from aiorlinf.launch.ray.refs import work_of
from aiorlinf.launch.ray.running import launch, launch_async

__all__ = ["ActorMaker", "Job", "WorkerActor", "comm", "launch", "launch_async", "start", "work_of", "worker"]
