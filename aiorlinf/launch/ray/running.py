"""A script or a function as every worker of a job on Ray: the script itself is as it is under ``aiorlinf run``.

Each worker is a process that an actor starts on the actor's node, with the environment that ``aiorlinf run`` would have made, and ends with
it. So the script has an interpreter, a main thread and signals of its own; what the actor has of Ray is its place and its resources.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import UsageError
from aiorlinf.launch.api import (
    DEFAULT_GRACE_S,
    ConfigSource,
    JobSpec,
    finish,
    in_thread,
    make_spec,
    new_loop,
    refuse_running_loop,
)
from aiorlinf.launch.job import JobState, Order, Stop
from aiorlinf.launch.printer import standard_sinks
from aiorlinf.launch.ray.needs import driver, node_host
from aiorlinf.launch.ray.ticket import Ticket
from aiorlinf.launch.result import LaunchResult, is_consequence
from aiorlinf.launch.spec import format_workers
from aiorlinf.launch.supervisor import Supervisor, WorkerCommand
from aiorlinf.manager.embedded import manager_host
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.tls import tls_of

__all__ = ["Ended", "Placement", "RunnerActor", "check_placement", "launch", "launch_async", "run_on_ray"]

_HOLD_SECONDS = 3.0  # as on one machine: for the worker whose loss another one reports
_MARGIN_SECONDS = 10.0  # what an actor may need beyond the grace until it has ended its worker

Placement = Mapping[str, Mapping[str, Any]]
"""Ray's options for the workers of each group: ``{"trainer": {"num_gpus": 1}, "rollout": {"label_selector": {"zone": "a"}}}``."""


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: str | Mapping[str, int],
    *,
    placement: Placement | None = None,
    args: Sequence[Any] = (),
    config: ConfigSource = None,
    env: Mapping[str, str] | None = None,
    grace: float = DEFAULT_GRACE_S,
    prefix: bool = True,
    timeout: float | None = None,
    check: bool = False,
) -> LaunchResult:
    """`aiorlinf.launch` in the Ray cluster that this process is connected to; returns when all workers have ended.

    What the workers print is where Ray puts the output of actors: in this program's, too, unless that was switched off.

    Args:
        placement: Ray's options for each group, such as ``num_cpus``, ``num_gpus``, ``resources``, ``label_selector``.

    The others, the environment of the workers, and what becomes of a job when one fails: as there. A script's path is looked for in the
    directory that this program runs in; on nodes that do not have it, in the actor's own (see Ray's ``working_dir``).

    Raises:
        UsageError: Ray is not installed, or not connected; `placement` names a group that is not there; as of `aiorlinf.launch`.
        As `aiorlinf.launch`.
    """
    refuse_running_loop()
    spec = make_spec(target, workers, args, config, env, grace, prefix, timeout)
    options = check_placement(placement, spec)
    driver()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return finish(runner.run(run_on_ray(spec, options)), spec, check)


async def launch_async(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: str | Mapping[str, int],
    *,
    placement: Placement | None = None,
    args: Sequence[Any] = (),
    config: ConfigSource = None,
    env: Mapping[str, str] | None = None,
    grace: float = DEFAULT_GRACE_S,
    prefix: bool = True,
    timeout: float | None = None,
    check: bool = False,
) -> LaunchResult:
    """`launch` for asynchronous programs, and for async actors.

    Cancelling ends the job and returns when everything has ended; cancelling again does not wait for the grace.
    """
    spec = make_spec(target, workers, args, config, env, grace, prefix, timeout)
    options = check_placement(placement, spec)
    driver()
    return finish(await in_thread(lambda: run_on_ray(spec, options)), spec, check)


def check_placement(placement: Placement | None, spec: JobSpec) -> Placement:
    """Raises UsageError when it is about a group that the job has not."""
    groups = {worker.group for worker in spec.workers}
    for group, options in (placement or {}).items():
        if group not in groups:
            raise UsageError(f"placement: the job has no group {group!r}", operation="launch", hint=f"it has {', '.join(sorted(groups))}")
        if not isinstance(options, Mapping):
            raise UsageError(f"placement: {group!r} has {options!r}", operation="launch", hint="Ray's options, such as {'num_cpus': 2}")
    return placement or {}


@dataclass(frozen=True, slots=True)
class Ended:
    """How one worker ended: its return code, and the last lines of its stderr."""

    returncode: int
    stderr: tuple[str, ...]


class RunnerActor:
    """The actor that runs one worker's process."""

    def __init__(self, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._supervisor: Supervisor | None = None
        self._stopped: Stop | None = None

    async def run(self, ticket: Ticket, argv: Sequence[str], env: Mapping[str, str], grace: float, prefix: bool) -> Ended:
        """Start it, and return when it has ended and nothing of it is left."""
        full = {"PYTHONFAULTHANDLER": "1", **os.environ, "PYTHONUNBUFFERED": "1", **env, **ticket.variables()}
        command = WorkerCommand(ticket.address, (sys.executable, *argv[1:]), full)
        self._supervisor = Supervisor([command], standard_sinks(), grace=grace, prefix=prefix)
        if self._stopped is not None:
            asyncio.get_running_loop().call_soon(self._supervisor.stop, self._stopped)
        result = await self._supervisor.run()
        # A worker that was told to end may do so well, or by the signal.
        return Ended(result.returncodes.get(ticket.address, -signal.SIGTERM), result.stderr)

    async def stop(self, why: Stop) -> None:
        """End it: SIGTERM, and SIGKILL after the grace; called again, SIGKILL."""
        self._stopped = why
        if self._supervisor is not None:
            self._supervisor.stop(why)


async def run_on_ray(spec: JobSpec, placement: Placement) -> LaunchResult:
    """Run a manager here and the workers in the cluster, to the end of the last one. Cancelling ends the job."""
    token = secrets.token_hex(32)
    manager = ManagerService(config=spec.config, token=token.encode(), job=f"ray-{secrets.token_hex(8)}", expected=spec.workers)
    network = spec.config.cluster.network
    told = network.bind_host != "auto" or network.interface is not None
    await manager.start(manager_host(spec.config) if told else node_host())
    try:
        tls = tls_of(network)
        env = {} if tls is None else tls.env()
        names = format_workers(spec.workers)
        tickets = [Ticket(str(worker), manager.address, token, names, env={**env, **spec.target.env}) for worker in spec.workers]
        return await _Coordinator(spec).run(placement, tickets)
    finally:
        await manager.close()


class _Coordinator:
    """One job, from its first actor to its last."""

    def __init__(self, spec: JobSpec) -> None:
        self._ray = driver()
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._state = JobState(spec.workers)
        self._stderr: dict[str, tuple[str, ...]] = {}
        self._failed_after: float | None = None
        self._began = time.monotonic()
        self._timers: list[asyncio.TimerHandle] = []
        self._cancels = 0
        self._actors: dict[str, Any] = {}
        self._ends: dict[asyncio.Future[Ended], str] = {}

    def _start(self, placement: Placement, tickets: Sequence[Ticket]) -> None:
        spec = self._spec
        made = self._ray.remote(RunnerActor)
        for ticket in tickets:
            options = dict(placement.get(WorkerAddress(ticket.address).group, {}))
            actor = (made.options(**options) if options else made).remote(os.getcwd())
            self._actors[ticket.address] = actor
            ref = actor.run.remote(ticket, spec.target.argv, dict(spec.env), spec.grace, spec.prefix)
            self._ends[asyncio.wrap_future(ref.future())] = ticket.address

    async def run(self, placement: Placement, tickets: Sequence[Ticket]) -> LaunchResult:
        if self._spec.timeout is not None:
            self._after(self._spec.timeout, self._out_of_time)
        try:
            self._start(placement, tickets)
            while self._ends:
                try:
                    done, _ = await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    self._cancels += 1
                    self._obey(self._state.stop(Stop("cancel")))
                    continue
                for future in done:
                    self._ended(self._ends.pop(future), future)
        finally:
            for timer in self._timers:
                timer.cancel()
            for actor in self._actors.values():  # one that is only let go of would end its call first
                self._ray.kill(actor)
        if self._cancels:
            raise asyncio.CancelledError
        failed = self._state.failed
        return LaunchResult(
            returncodes={worker: self._state.returncodes[worker] for worker in self._actors},
            failed=failed,
            stderr=() if failed is None else self._stderr[failed],
            elapsed=time.monotonic() - self._began,
            stopped=self._state.stopped,
            failed_after=self._failed_after,
        )

    def _ended(self, worker: str, future: asyncio.Future[Ended]) -> None:
        error = future.exception()
        # An actor, or its node, that has died, could not be placed, or that we have killed.
        end = Ended(-signal.SIGKILL, tuple(str(error).splitlines())) if error is not None else future.result()
        self._stderr[worker] = end.stderr
        order = self._state.exited(worker, end.returncode, consequence=is_consequence(end.stderr))
        if self._state.failed == worker:
            self._failed_after = time.monotonic() - self._began
        self._obey(order)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, call))

    def _obey(self, order: Order) -> None:
        if order is Order.HOLD:
            self._after(_HOLD_SECONDS, lambda: self._obey(self._state.hold_over()))
        elif order is Order.TERMINATE:
            self._stop_all()
            self._after(self._spec.grace + _MARGIN_SECONDS, lambda: self._obey(self._state.grace_over()))
        elif order is Order.KILL:
            for worker in self._ends.values():
                self._ray.kill(self._actors[worker])

    def _stop_all(self) -> None:
        for worker in self._ends.values():
            self._actors[worker].stop.remote(Stop("cancel"))

    def _out_of_time(self) -> None:
        self._obey(self._state.stop(Stop("timeout")))
