"""A whole job for a test, whose workers are processes of their own: they can be killed, frozen and started again.

::

    async def play(comm, episodes):
        for number in range(episodes):
            await comm.send(number, "trainer:0")
        return "done"

    async with spawned_cluster() as cluster:
        trainer = await cluster.join("trainer:0")  # this one is here, on the loop of the test
        rollout = await cluster.start("rollout:0", play, 3)
        print([await trainer.recv("rollout:0") for _ in range(3)])
        print(await rollout.result())

What a process runs is a function of a module that can be imported; its arguments and its result travel as pickles. A process ends with
the cluster, and with the process that made it, whatever happens. A fork server that has imported everything starts each in milliseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal

import uvloop

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import UsageError
from aiorlinf.rendezvous.settings import Backend, ConfigSource
from aiorlinf.testing.child import Told, run_child, say
from aiorlinf.testing.cluster import LocalCluster, Workers
from aiorlinf.worker import init

__all__ = ["LoopKind", "SpawnedCluster", "SpawnedWorker", "Talk", "WorkerFailed", "spawned_cluster", "talk"]

LoopKind = Literal["asyncio", "uvloop", "thread"]
"""What a worker's process runs on: asyncio's loop, uvloop's, or (for functions that are no coroutines) one in a thread."""

DEFAULT_LIMIT_S = 30.0
"""Seconds that a test waits for anything of another process, unless it says otherwise."""

_THIS = "aiorlinf.testing.spawned"
_FROZEN = "aiorlinf.testing.frozen"
_LOOK_S = 0.005
_END_S = 10.0

_context = multiprocessing.get_context("forkserver")


class WorkerFailed(AssertionError):
    """What a worker's process ran has raised, or the process has died, or said nothing in time.

    Attributes:
        address: of the worker.
        kind: the name of the class of what was raised; "" if nothing was.
        text: what that says.
        exit_code: of the process, -N for signal N; None while it runs.

    The message has the traceback, and what the process has printed.
    """

    def __init__(self, address: str, kind: str, text: str, exit_code: int | None, message: str) -> None:
        super().__init__(message)
        self.address = address
        self.kind = kind
        self.text = text
        self.exit_code = exit_code


class Talk:
    """What a function in a worker's process says to the test and hears of it, beside aiorlinf. Got by `talk`. Blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, obj: object) -> None:
        """To the test, which gets it by `SpawnedWorker.hear`. Any thread."""
        with self._lock:
            say(self._connection, obj)

    def hear(self, limit: float | None = DEFAULT_LIMIT_S) -> Any:
        """What the test says next, by `SpawnedWorker.say`. Raises TimeoutError after `limit` seconds; None: as long as the test lives."""
        if not self._connection.poll(limit):
            raise TimeoutError(f"the test has said nothing for {limit:g} s")
        return self._connection.recv()


_talk: Talk | None = None


def talk() -> Talk:
    """In a worker's process: its talk with the test. Raises UsageError in any other process."""
    if _talk is None:
        raise UsageError("this process was not started by a spawned cluster")
    return _talk


class SpawnedWorker:
    """One life of a worker in a process of its own. Made by `SpawnedCluster.start`.

    Attributes:
        address: whose.
        pid: of the process.
    """

    def __init__(self, address: WorkerAddress, call: _Call, env: Mapping[str, str]) -> None:
        self.address = address
        self._call = call
        self._env = dict(env)
        self._code: int | None = None
        self._closed = False
        self._connection, theirs = _context.Pipe()
        self._told = Told(self._connection)
        descriptor, self._log = tempfile.mkstemp(prefix="aiorlinf-worker-")
        os.close(descriptor)
        _preload()
        self._process = _context.Process(target=_main, args=(theirs, self._log, self._env, call), name=str(address))
        try:
            self._process.start()
        except BaseException:
            self._connection.close()
            os.unlink(self._log)
            raise
        finally:
            theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    # ---- what it says

    async def result(self, limit: float = DEFAULT_LIMIT_S) -> Any:
        """What its function returns. Cancelling stops the waiting.

        Raises:
            WorkerFailed: it raised, or its process died, or it is not over after `limit` seconds.
        """
        await self._until(lambda: self._told.outcome is not None, limit, "is not over")
        assert self._told.outcome is not None
        if self._told.raised:
            self._fail()
        return self._told.outcome[1]

    async def hear(self, limit: float = DEFAULT_LIMIT_S) -> Any:
        """What its function says next by ``talk().say(...)``. Raises as `result`. Cancelling takes nothing."""
        await self._until(lambda: bool(self._told.said), limit, "has said nothing")
        return self._told.said.popleft()

    def heard(self) -> list[Any]:
        """All that it has said and that nobody has heard; does not wait."""
        while self._told.look():
            pass
        found = list(self._told.said)
        self._told.said.clear()
        return found

    def say(self, obj: object) -> None:
        """To its function, which gets it by ``talk().hear()``. Raises OSError if the process is gone."""
        self._connection.send(obj)

    def printed(self) -> str:
        """All that the process has written to its standard output and error so far."""
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    # ---- its life

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return not self._closed and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Of the process, -N for signal N; None while it runs."""
        return self._code if self._closed else self._process.exitcode

    async def exited(self, limit: float = DEFAULT_LIMIT_S) -> int:
        """Wait for the end of the process; its exit code. Raises WorkerFailed after `limit` seconds. Cancelling stops the waiting."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        while self.alive:
            if loop.time() > end:
                self._fail("has not ended", limit)
            await asyncio.sleep(_LOOK_S)
        code = self.exit_code
        assert code is not None
        return code

    async def kill(self) -> int:
        """SIGKILL, and wait for the end; the exit code. Nothing happens if it has ended."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        return await self.exited()

    def freeze(self) -> None:
        """SIGSTOP: it stands still, and its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)

    def again(self) -> SpawnedWorker:
        """Start the next life, with the same function and arguments. Blocks for a moment."""
        return SpawnedWorker(self.address, self._call, self._env)

    async def close(self) -> None:
        """Kill it, unless it has ended, and forget what it has said. May be called again."""
        if self._closed:
            return
        if self._told.outcome is not None and self._process.is_alive():  # it has told its result and is about to go
            end = asyncio.get_running_loop().time() + 1.0
            while self._process.is_alive() and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(_LOOK_S)
        self._process.kill()
        await asyncio.to_thread(self._process.join, _END_S)
        self._code = self._process.exitcode
        self._closed = True
        self._process.close()
        self._connection.close()
        os.unlink(self._log)

    # ---- inside

    async def _until(self, there: Callable[[], bool], limit: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        told = self._told
        while not there():
            if told.look():
                continue
            if told.raised:
                self._fail()
            if told.ended or told.outcome is not None:
                self._fail("has ended and " + what)
            if loop.time() > end:
                self._fail(what, limit)
            await asyncio.sleep(_LOOK_S)

    def _fail(self, what: str = "", limit: float | None = None) -> None:
        kind = text = ""
        if self._told.outcome is not None and self._told.raised:
            _, kind, text, trace = self._told.outcome
            said = f"{self.address} (process {self.pid}) raised\n{trace}"
        else:
            if self._told.ended and not self._closed:
                self._process.join(1.0)
            state = f", exit code {self.exit_code}" if self.exit_code is not None else ""
            said = f"{self.address} (process {self.pid}{state}) {what}{'' if limit is None else f' within {limit:g} s'}"
        printed = "" if self._closed else self.printed().strip()
        raise WorkerFailed(self.address, kind, text, self.exit_code, said + (f"\nIt has printed:\n{printed}" if printed else ""))

    def __repr__(self) -> str:
        return f"<SpawnedWorker {self.address} pid {self.pid} {'alive' if self.alive else f'ended with {self.exit_code}'}>"


class SpawnedCluster(LocalCluster):
    """One job, whose workers are in processes of their own, or here, as the test likes. Made by `spawned_cluster`."""

    def __init__(
        self, config: ConfigSource = None, *, here: Workers = (), backend: Backend | None = None, loop: LoopKind = "asyncio"
    ) -> None:
        super().__init__(here, config, backend=backend)
        self._loop_kind = loop
        self._spawned: dict[WorkerAddress, SpawnedWorker] = {}
        self._earlier: list[SpawnedWorker] = []

    async def start(
        self,
        address: str,
        function: Callable[..., Any],
        *args: Any,
        backend: Backend | None = None,
        loop: LoopKind | None = None,
        env: Mapping[str, str] | None = None,
        host: str | None = None,
        join: bool = True,
    ) -> SpawnedWorker:
        """Run ``function(comm, *args)`` in a process of its own, as this worker. Returns at once: it has not joined yet.

        Args:
            function: plain or a coroutine function, at the top level of a module that can be imported.
            backend: of this worker.
            loop: what it runs on; for the cluster it was said when that was made. With a plain function it is a thread.
            env: more environment variables.
            host: makes it a worker of another host than those that have none or another: no shared memory, no Unix sockets.
            join: whether the worker is made before the call, and closed after it; if not, `function(*args)` does it.

        Raises UsageError if a process of this worker runs already, or the process could not find the function.
        """
        _check_importable(function)
        where = WorkerAddress(address)
        present = self._spawned.get(where)
        if present is not None:
            if present.alive:
                raise UsageError(f"{where} runs already, in process {present.pid}")
            self._earlier.append(present)
        environment = {**self.env(address), **({} if host is None else {"AIORLINF_HOST_ID": host}), **(env or {})}
        call = _Call(function, args, loop or self._loop_kind, backend or self._backend, join)
        worker = self._spawned[where] = await asyncio.to_thread(SpawnedWorker, where, call, environment)
        return worker

    async def restart(self, address: str) -> SpawnedWorker:
        """Kill this worker's process, if it runs, and start its next life with the same function and arguments."""
        old = self._spawned[WorkerAddress(address)]
        await old.kill()
        self._earlier.append(old)
        new = self._spawned[old.address] = await asyncio.to_thread(old.again)
        return new

    def spawned(self, address: str) -> SpawnedWorker:
        """The present life of a worker in a process of its own. Raises KeyError, which says who is there."""
        where = WorkerAddress(address)
        if where not in self._spawned:
            raise KeyError(f"no process of {where}; there are: {', '.join(self._spawned) or 'none'}")
        return self._spawned[where]

    async def _end(self) -> None:
        workers, self._earlier = [*self._earlier, *self._spawned.values()], []
        await asyncio.gather(*(worker.close() for worker in workers))
        self._spawned.clear()
        await super()._end()


def spawned_cluster(
    config: ConfigSource = None, *, here: Workers = (), backend: Backend | None = None, loop: LoopKind = "asyncio"
) -> SpawnedCluster:
    """A job for ``async with`` whose workers are started with `SpawnedCluster.start`.

    Args:
        config: the job's configuration: a path, a mapping or a `JobConfig`.
        here: workers that live in this process, on the running loop.
        backend: of all workers that do not name another.
        loop: what the processes run on.

    Raises:
        UsageError, ConfigError: at the call.
        AiorlinfError: from ``async with``: what a worker's start raised.
    """
    return SpawnedCluster(config, here=here, backend=backend, loop=loop)


# ---- in the process


class _Call:
    """What a process runs."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], loop: LoopKind, backend: Backend | None, join: bool) -> None:
        self.function = function
        self.args = args
        self.loop = loop
        self.backend = backend
        self.join = join

    def run(self) -> Any:
        """Its value."""
        if not inspect.iscoroutinefunction(self.function):
            if not self.join:
                return self.function(*self.args)
            with init(backend=self.backend, loop="thread") as comm:
                return self.function(comm, *self.args)
        factory = uvloop.new_event_loop if self.loop == "uvloop" else asyncio.SelectorEventLoop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._main())

    async def _main(self) -> Any:
        if not self.join:
            return await self.function(*self.args)
        async with init(backend=self.backend, loop="thread" if self.loop == "thread" else "auto") as comm:
            return await self.function(comm, *self.args)


def _check_importable(function: Callable[..., Any]) -> None:
    """Raise UsageError for a function that another process cannot find by its name."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} cannot be run in a process of its own: {error}",
            hint="give a function at the top of a module that can be imported, and what it needs as further arguments",
        ) from None


def _preload() -> None:
    """The fork server imports this module, beside what others have asked it to, if it has not been started yet."""
    server: Any = getattr(forkserver, "_forkserver", None)
    names = getattr(server, "_preload_modules", None)
    if names is not None and _THIS not in names and getattr(server, "_forkserver_pid", None) is None:
        forkserver.set_forkserver_preload([*(name for name in names if name != _FROZEN), _THIS, _FROZEN])


def _main(connection: Connection, log: str, env: dict[str, str], call: _Call) -> None:
    global _talk
    _talk = Talk(connection)
    run_child(connection, log, env, call.run)
