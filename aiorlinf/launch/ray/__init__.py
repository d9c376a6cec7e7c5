"""Ray (the extra ``ray``): it starts processes and tells them where the job is; objects never go through its store.

`start` makes a job whose workers are actors of yours; `launch` runs a script or a function as every worker of a job, as `aiorlinf.launch`
does on this machine. All names are also in `aiorlinf.ray`. Importing this imports neither Ray nor torch: each name is fetched when it is
first used, for the actors that only start programs need little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiorlinf.lazy import fetcher

if TYPE_CHECKING:
    from aiorlinf.launch.ray.actors import ActorMaker, WorkerActor, comm
    from aiorlinf.launch.ray.job import Job, start, worker
    from aiorlinf.launch.ray.refs import work_of
    from aiorlinf.launch.ray.running import launch, launch_async

__all__ = ["ActorMaker", "Job", "WorkerActor", "comm", "launch", "launch_async", "start", "work_of", "worker"]

_HOMES = {
    "ActorMaker": "actors",
    "Job": "job",
    "WorkerActor": "actors",
    "comm": "actors",
    "launch": "running",
    "launch_async": "running",
    "start": "job",
    "work_of": "refs",
    "worker": "job",
}


if not TYPE_CHECKING:  # a type checker would take it to mean that any name is there
    __getattr__ = fetcher(__name__, _HOMES)
