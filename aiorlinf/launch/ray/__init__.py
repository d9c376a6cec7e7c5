"""Ray (the extra ``ray``): it starts processes and tells them where the job is; objects never go through its store.

`start` makes a job whose workers are actors of yours; `launch` runs a script or a function as every worker of a job, as `aiorlinf.launch`
does on this machine. All names are also in `aiorlinf.ray`. Importing this does not import Ray.
"""

from __future__ import annotations

from aiorlinf.launch.ray.actors import ActorMaker, WorkerActor, comm
from aiorlinf.launch.ray.job import Job, start, worker
from aiorlinf.launch.ray.refs import work_of
from aiorlinf.launch.ray.running import launch, launch_async

__all__ = ["ActorMaker", "Job", "WorkerActor", "comm", "launch", "launch_async", "start", "work_of", "worker"]
