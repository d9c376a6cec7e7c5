"""Runs the two halves of a check in two processes, within a time limit.

The other process serves one check after the other: to start one, with torch and the device, takes longer than most checks. After a
failure, whose traces may be left in it, comes a new one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from aiorlinf import init
from aiorlinf.errors import PeerError
from scripts.gpuchecks.checks import B, Check
from scripts.gpuchecks.place import Place, place

__all__ = ["Outcome", "Partner", "run_check", "spawned"]

LIMIT_S = 60.0
"""For one check, the start of the other process counted in."""

_LEAVE_S = 10.0


class Outcome(NamedTuple):
    """How a check ended.

    Attributes:
        word: passed, FAILED or skipped.
        text: what it found.
        seconds: that it took.
    """

    word: str
    text: str
    seconds: float = 0.0


def spawned(target: Callable[[str, Connection], None], kind: str, *, daemon: bool) -> tuple[Any, Connection]:
    """A process that runs `target` with the kind of the devices and one end of a pipe; and the other end."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(kind, theirs), daemon=daemon)
    process.start()
    theirs.close()
    return process, ours


class Partner:
    """The other process. It starts when it is made; `with` ends it.

    Args:
        kind: of the devices.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: Any = None
        self._pipe: Connection | None = None
        self.start()

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Unless it runs already."""
        if self._process is not None:
            return
        self._process, self._pipe = spawned(_serve, self._kind, daemon=True)

    def end(self) -> None:
        """Whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._pipe is not None
        self._pipe.close()  # which ends it
        process.join(_LEAVE_S)
        process.kill()
        process.join()

    def begin(self, check: Check, env: Mapping[str, str]) -> None:
        """Have it run the second half."""
        self.start()
        self._say((check, dict(env)))

    def outcome(self, limit: float) -> str | None:
        """What went wrong there, None if nothing did. Blocks."""
        found: str | None = self._hear(limit)
        return found

    def leave(self) -> None:
        """Its worker may end now. Blocks until it has."""
        self._say(None)
        self._hear(_LEAVE_S)

    def _say(self, what: object) -> None:
        assert self._pipe is not None
        self._pipe.send(what)

    def _hear(self, limit: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(limit):
            return f"nothing came of it within {limit:.0f} s"
        try:
            return self._pipe.recv()
        except EOFError:
            return "it has died"


def run_check(check: Check, kind: str, where: Place, partner: Partner, limit: float = LIMIT_S) -> Outcome:
    """Run it, its first half in this process."""
    if where.count() < check.devices:
        return Outcome("skipped", f"needs {check.devices} devices")
    begin = time.perf_counter()
    try:
        found = asyncio.run(asyncio.wait_for(_first(check, where, partner, limit), limit))
        if check.way and not (kind == "fake" and check.way == "nccl") and not found.startswith(check.way):
            raise AssertionError(f"it went another way than {check.way}: {found}")
        outcome = Outcome("passed", found)
    except Exception as error:  # the next check runs all the same
        partner.end()
        traceback.print_exc()
        text = f"not over after {limit:.0f} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        outcome = Outcome("FAILED", text.strip().replace("\n", " ").replace("|", "/"))
    return outcome._replace(seconds=time.perf_counter() - begin)


async def _first(check: Check, where: Place, partner: Partner, limit: float) -> str:
    config = {"cluster": {"collective": {"backend": check.backend, "fallback": check.fallback}}}
    async with init("a:0", config=config) as comm:
        await asyncio.to_thread(partner.begin, check, comm.env(B))
        try:
            found = await asyncio.wait_for(check.first(comm, where), limit)
            trouble = await asyncio.to_thread(partner.outcome, limit)
        except PeerError as error:
            trouble = await asyncio.to_thread(partner.outcome, 5.0)
            raise AssertionError(f"in the other process: {trouble}") from error
        if trouble is not None:
            raise AssertionError(f"in the other process: {trouble}")
        await asyncio.to_thread(partner.leave)
        where.tidy()
        return found


def _serve(kind: str, pipe: Connection) -> None:
    """All of the other process."""
    with place(kind) as where:
        while True:
            try:
                check, env = pipe.recv()
                os.environ.update(env)
                asyncio.run(_second(check, kind, where, pipe))
            except EOFError:  # nobody wants anything any more
                return
            except BaseException:  # told to the one who waits, after the worker has ended: the first half may wait for it
                pipe.send(traceback.format_exc())
                return
            where.tidy()
            pipe.send(None)


async def _second(check: Check, kind: str, where: Place, pipe: Connection) -> None:
    async with init(device=f"{kind}:{check.lands_on}") as comm:
        await check.second(comm, where)
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)  # the statistics of the link are read meanwhile
