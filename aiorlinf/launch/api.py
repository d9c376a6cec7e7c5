"""`launch` and `launch_async`: a job on this machine, from Python."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import DeadlineExceeded, UsageError, WouldBlockLoop
from aiorlinf.launch.main_program import is_loading
from aiorlinf.launch.output import wants_colour
from aiorlinf.launch.printer import standard_sinks
from aiorlinf.launch.result import LaunchResult
from aiorlinf.launch.spec import check_env, format_workers, worker_addresses
from aiorlinf.launch.supervisor import Supervisor, WorkerCommand
from aiorlinf.launch.target import Target, resolve_target
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.settings import LAUNCHER_ENV
from aiorlinf.rendezvous.tls import tls_of

__all__ = [
    "DEFAULT_GRACE_S",
    "JobSpec",
    "check_seconds",
    "finish",
    "in_thread",
    "launch",
    "launch_async",
    "make_spec",
    "new_loop",
    "refuse_running_loop",
    "run_job",
]

DEFAULT_GRACE_S = 8.0
"""Seconds between SIGTERM and SIGKILL: three more than a worker's ``close`` may take by default (cluster.network.close_timeout_s)."""

ConfigSource = JobConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that makes a job, checked."""

    workers: Sequence[WorkerAddress]
    target: Target
    config: JobConfig
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = DEFAULT_GRACE_S
    prefix: bool = True
    timeout: float | None = None


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: str | Mapping[str, int],
    *,
    args: Sequence[Any] = (),
    config: ConfigSource = None,
    env: Mapping[str, str] | None = None,
    grace: float = DEFAULT_GRACE_S,
    prefix: bool = True,
    timeout: float | None = None,
    check: bool = False,
) -> LaunchResult:
    """Run a job on this machine: start its workers, print what they print, and return when all of them have ended.

    Each worker is a process of its own that joins by ``aiorlinf.init()``. The first that fails ends the job: the others get SIGTERM
    and, `grace` seconds later, SIGKILL, and so does everything that they have started themselves. If this process is killed, they die too.

    Args:
        target: the path of a Python script; or a function ``main(comm, *args)``, plain or async, that is defined at the top level
            of a module or of the program itself. The worker is opened before and closed after the call. A program that launches
            one of its own functions does so under ``if __name__ == "__main__":``.
        workers: ``"rollout=2,trainer=1"`` or ``{"rollout": 2, "trainer": 1}``.
        args: for a script, its command line; for a function, picklable arguments after `comm` (64 KiB at most).
        config: the job's configuration: a YAML file's path, a mapping or a `JobConfig`.
        env: variables for all workers, on top of this process's environment.
        grace: seconds between SIGTERM and SIGKILL.
        prefix: begin each line that a worker prints with ``[rollout:0] ``.
        timeout: seconds after which the job is ended.
        check: raise `WorkerFailed` if a worker failed, as ``result.check()`` does.

    Environment: besides ``AIORLINF_ADDRESS``, ``AIORLINF_MANAGER`` and ``AIORLINF_TOKEN`` workers get ``AIORLINF_WORKERS`` (who belongs to
    the job, as ``rollout=2,trainer=1``), ``PYTHONUNBUFFERED=1`` and, unless set already, ``PYTHONFAULTHANDLER=1`` (a crash in C code
    prints a traceback) and, when there are several, ``OMP_NUM_THREADS``: this process's CPUs divided by the number of workers, at least
    1. It is what torch goes by.

    Raises:
        UsageError: the target, the workers or the environment cannot be used; nothing was started.
        ConfigError: the configuration is not valid; nothing was started.
        WouldBlockLoop: an event loop runs in this thread; use `launch_async`.
        WorkerFailed: a worker could not be started; or, with `check`, one failed.
        DeadlineExceeded: `timeout` passed; everything has been ended.

    Ctrl-C ends the job, in the same way as a failure does, and then raises `KeyboardInterrupt`; a second one does not wait for the grace.
    """
    refuse_running_loop()
    spec = make_spec(target, workers, args, config, env, grace, prefix, timeout)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return finish(runner.run(run_job(spec)), spec, check)


async def launch_async(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: str | Mapping[str, int],
    *,
    args: Sequence[Any] = (),
    config: ConfigSource = None,
    env: Mapping[str, str] | None = None,
    grace: float = DEFAULT_GRACE_S,
    prefix: bool = True,
    timeout: float | None = None,
    check: bool = False,
) -> LaunchResult:
    """`launch` for asynchronous programs and notebooks. The job is run by a thread with a loop of its own, so it does not matter
    which loop awaits it nor whether that is busy.

    Args and raises: as `launch`; `grace` and `timeout` are seconds.

    Cancelling ends the job as Ctrl-C does and returns when everything has ended; cancelling again does not wait for the grace.
    """
    spec = make_spec(target, workers, args, config, env, grace, prefix, timeout)
    return finish(await in_thread(lambda: run_job(spec)), spec, check)


async def in_thread(run: Callable[[], Coroutine[Any, Any, LaunchResult]]) -> LaunchResult:
    """Run a job in a thread with a loop of its own; see `launch_async`."""
    thread = _JobThread(run)
    cancelled = False
    try:
        while not thread.ended.done():
            try:
                await asyncio.wait({thread.ended})
            except asyncio.CancelledError:
                cancelled = True
                thread.cancel()
    finally:
        if not thread.ended.done():  # this coroutine is being closed: nobody is left to end the job
            thread.cancel()
    thread.join()
    if cancelled:
        thread.ended.exception()  # looked at, so that it is not logged
        raise asyncio.CancelledError
    return thread.ended.result()


class _JobThread:
    """Runs a job on a loop of its own; `ended` belongs to the loop that made it."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, LaunchResult]]) -> None:
        self._owner = asyncio.get_running_loop()
        self.ended: asyncio.Future[LaunchResult] = self._owner.create_future()
        self._job = run
        self._lock = threading.Lock()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[LaunchResult]] | None = None
        self._cancels = 0  # asked for before the loop ran
        # A daemon: if the program ends without waiting for the job, the workers die with it.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="aiorlinf-launch", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        with self._lock:
            if self._inner is None:
                self._cancels += 1
                return
            loop, task = self._inner
        with contextlib.suppress(RuntimeError):  # it ended just now, and its loop is closed
            loop.call_soon_threadsafe(task.cancel)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                result = runner.run(self._body())
        except BaseException as error:  # all of it belongs to the coroutine that waits
            self._settle(self.ended.set_exception, error)
        else:
            self._settle(self.ended.set_result, result)

    async def _body(self) -> LaunchResult:
        task = asyncio.ensure_future(self._job())
        with self._lock:
            self._inner = (asyncio.get_running_loop(), task)
            cancels = self._cancels
        for _ in range(cancels):
            task.cancel()
        return await task

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        def on_owner() -> None:
            if not self.ended.done():
                settle(value)

        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._owner.call_soon_threadsafe(on_owner)


async def run_job(spec: JobSpec, on_start: Callable[[Supervisor], None] | None = None) -> LaunchResult:
    """Run a manager and the workers on the running loop, to the end of the last one.

    Cancelling ends the job; see `Supervisor.run`.
    """
    token = secrets.token_hex(32)
    sinks = standard_sinks()
    colours = [wants_colour(sink.is_terminal, os.environ) for sink in sinks]
    manager = ManagerService(config=spec.config, token=token.encode(), job=secrets.token_hex(8), expected=spec.workers)
    await manager.start()
    try:
        commands = [WorkerCommand(worker, spec.target.argv, _environment(spec, worker, manager.address, token)) for worker in spec.workers]
        supervisor = Supervisor(
            commands, sinks, grace=spec.grace, prefix=spec.prefix, colours=(colours[0], colours[1]), timeout=spec.timeout
        )
        if on_start is not None:
            on_start(supervisor)
        return await supervisor.run()
    finally:
        await manager.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs a job: asyncio's own, whatever policy somebody has set; its work is light."""
    return asyncio.SelectorEventLoop()


def check_seconds(name: str, value: object, *, allow_none: bool = False) -> float | None:
    """A duration in seconds.

    Raises:
        UsageError: not a number of at least 0.
    """
    if value is None and allow_none:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} is {value!r}", operation="launch", hint=f"{name} is a number of seconds, at least 0")
    return float(value)


def refuse_running_loop() -> None:
    """Raises WouldBlockLoop when a loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    hint = "use: result = await aiorlinf.launch_async(...)"
    raise WouldBlockLoop("an event loop is running in this thread and would stand still", operation="launch", hint=hint)


def make_spec(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: str | Mapping[str, int],
    args: Sequence[Any],
    config: ConfigSource,
    env: Mapping[str, str] | None,
    grace: float,
    prefix: bool,
    timeout: float | None,
) -> JobSpec:
    """What `launch` was given, checked; raises as it says."""
    if is_loading():
        raise UsageError(
            "launch was called while a worker loads this program to find its function",
            operation="launch",
            hint='call it under: if __name__ == "__main__":',
        )
    addresses = worker_addresses(workers)
    if isinstance(args, (str, bytes)):
        raise UsageError(f"args is one text, {args!r}", operation="launch", hint="pass a list, such as ['--steps', '10']")
    env = dict(env or {})
    check_env(env)
    grace_s = check_seconds("grace", grace)
    assert grace_s is not None
    return JobSpec(
        workers=addresses,
        target=resolve_target(target, args),
        config=load_config(config),
        env=env,
        grace=grace_s,
        prefix=prefix,
        timeout=check_seconds("timeout", timeout, allow_none=True),
    )


def _environment(spec: JobSpec, worker: str, manager: str, token: str) -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("PYTHONFAULTHANDLER", "1")
    if len(spec.workers) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, _cpus() // len(spec.workers))))
    env["PYTHONUNBUFFERED"] = "1"
    env |= spec.env
    env |= spec.target.env
    env |= {"AIORLINF_ADDRESS": worker, "AIORLINF_MANAGER": manager, "AIORLINF_TOKEN": token}
    if (tls := tls_of(spec.config.cluster.network, env)) is not None:
        env |= tls.env()
    env["AIORLINF_WORKERS"] = format_workers(spec.workers)
    env[LAUNCHER_ENV] = str(os.getpid())
    return env


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def finish(result: LaunchResult, spec: JobSpec, check: bool) -> LaunchResult:
    """The result, or what the caller asked to be raised instead of it."""
    if result.stopped is not None and result.stopped.kind == "timeout":
        raise DeadlineExceeded("the job did not end in time and was ended", operation="launch", step="run", elapsed=result.elapsed)
    return result.check() if check else result
