"""Workers in other processes: functions of a test, run there by name, under time limits.

A fork server that has imported everything makes a process in some milliseconds. A process ends with its context, and with
the process that made it. No port is chosen by a test: what a process is told is `comm.env(address)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Literal

import uvloop

from aiorlinf import Worker, init
from aiorlinf.testing.child import Told, run_child, say
from tests.short_stacks import shorten

__all__ = ["LoopKind", "Peer", "PeerFailed", "Pipe", "process", "run_loop", "run_worker", "worker"]

LoopKind = Literal["asyncio", "uvloop"]
"""The loop that a worker runs on."""

LIMIT_S = 25.0
"""Seconds that a test waits for anything from another process."""

_LOOK_S = 0.005

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.shortened", "tests.peers", "pytest", "aiorlinf.testing.frozen"])


class PeerFailed(AssertionError):
    """The function raised. `type_name` and `text` of what it raised; the message shows the traceback and what the process said."""

    def __init__(self, type_name: str, text: str, trace: str) -> None:
        super().__init__(trace)
        self.type_name = type_name
        self.text = text


class Pipe:
    """The end that a function gets, for what does not go through aiorlinf."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, obj: object) -> None:
        """To the test, which gets it by `Peer.hear`."""
        say(self._connection, obj)

    def hear(self, limit: float | None = LIMIT_S) -> Any:
        """Block for what the test says, at most `limit` seconds; None: as long as the test lives."""
        if not self._connection.poll(limit):
            raise TimeoutError("the test says nothing")
        return self._connection.recv()


class Peer:
    """A process that runs a function."""

    def __init__(self, child: Any, connection: Connection, log: str) -> None:
        self._child = child
        self._connection = connection
        self._log = log
        self._told = Told(connection)
        self.pid: int = child.pid

    def said_on_stderr(self) -> str:
        """Everything the process has written to its standard output and error so far."""
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def say(self, obj: object) -> None:
        """To the function, which gets it by `Pipe.hear`."""
        self._connection.send(obj)

    async def hear(self) -> Any:
        """What the function says next."""
        await self._until(lambda: bool(self._told.said), "said nothing")
        return self._told.said.popleft()

    def wait_hear(self) -> Any:
        """As `hear`, for synchronous code."""
        self._wait_until(lambda: bool(self._told.said), "said nothing")
        return self._told.said.popleft()

    async def result(self) -> Any:
        """What the function returns; raises PeerFailed if it raised, or if the process died."""
        await self._until(lambda: self._told.outcome is not None, "is not over")
        return self._value()

    def wait_result(self, limit: float = LIMIT_S) -> Any:
        """As `result`, for synchronous code; waits `limit` seconds at most."""
        self._wait_until(lambda: self._told.outcome is not None, "is not over", limit)
        return self._value()

    async def _until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not there():
            if self._told.outcome is not None or not self._told.look():
                self._check_alive(end, what)
                await asyncio.sleep(_LOOK_S)

    def _wait_until(self, there: Callable[[], bool], what: str, limit: float = LIMIT_S) -> None:
        end = time.monotonic() + limit
        while not there():
            if self._told.outcome is not None or not self._told.look():
                self._check_alive(end, what, limit)
                time.sleep(_LOOK_S)

    def kill(self) -> None:
        """SIGKILL, by its process id."""
        self._child.kill()
        self._child.join(LIMIT_S)

    def _check_alive(self, end: float, what: str, limit: float = LIMIT_S) -> None:
        if self._told.raised:
            self._value()
        if not self._child.is_alive() and (self._told.ended or not self._connection.poll()):
            raise PeerFailed("", "", f"process {self.pid} died with {self._child.exitcode}:\n{self.said_on_stderr()}")
        if time.monotonic() > end:
            raise PeerFailed("TimeoutError", "", f"process {self.pid} {what} within {limit} s:\n{self.said_on_stderr()}")

    def _value(self) -> Any:
        assert self._told.outcome is not None
        if self._told.raised:
            _, type_name, text, trace = self._told.outcome
            raise PeerFailed(type_name, text, f"in process {self.pid}:\n{trace}\n{self.said_on_stderr()}")
        return self._told.outcome[1]


@contextlib.contextmanager
def process(
    function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, prepare: Callable[[], None] | None = None
) -> Iterator[Peer]:
    """Run `function(pipe, *args)` in a process, which is killed at the end of the block if it is not over.

    Args:
        function: of a module that can be imported; its arguments and result travel as pickles.
        env: environment variables to set there.
        prepare: called there first of all, while the process has one thread.
    """
    ours, theirs = _context.Pipe()
    descriptor, log = tempfile.mkstemp(prefix="aiorlinf-peer-")
    os.close(descriptor)
    child = _context.Process(target=_main, args=(theirs, log, dict(env or {}), prepare, function, args))
    try:
        child.start()
        theirs.close()
        yield Peer(child, ours, log)
    finally:
        if child.pid is not None:
            child.join(0 if child.is_alive() else 1)
            child.kill()
            child.join(LIMIT_S)
            child.close()
        ours.close()
        theirs.close()
        os.unlink(log)


@contextlib.asynccontextmanager
async def worker(
    comm: Worker,
    address: str,
    function: Callable[..., Awaitable[Any]],
    *args: Any,
    loop: LoopKind = "asyncio",
    backend: Literal["auto", "stream", "shm", "gloo"] | None = None,
) -> AsyncIterator[Peer]:
    """Run the coroutine function `function(worker, *args)` in a process that has joined the job of `comm`."""
    with process(run_worker, loop, backend, function, args, env=comm.env(address)) as peer:
        yield peer


def run_loop(kind: LoopKind, main: Callable[[], Any]) -> Any:
    """Run the coroutine that `main` makes on a new loop of this kind, in debug mode."""
    factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(debug=True, loop_factory=factory) as runner:
        return runner.run(main())


def run_worker(pipe: Pipe, loop: LoopKind, backend: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What runs in a worker's process: `function(worker, *args)` on a new loop, inside the worker that the environment asks for."""

    async def main() -> Any:
        async with init(backend=backend) as comm:
            return await function(comm, *args)

    return run_loop(loop, main)


def _main(
    connection: Connection,
    log: str,
    env: dict[str, str],
    prepare: Callable[[], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    shorten()
    run_child(connection, log, env, functools.partial(function, Pipe(connection), *args), prepare or (lambda: None))
