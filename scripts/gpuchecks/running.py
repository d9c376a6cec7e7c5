"""Runs the two halves of a check in two processes, within a time limit."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple

from aiorlinf import init
from aiorlinf.errors import PeerError
from scripts.gpuchecks.checks import B, Check
from scripts.gpuchecks.place import Place, place

__all__ = ["Outcome", "run_check"]

LIMIT_S = 90.0


class Outcome(NamedTuple):
    """How a check ended.

    Attributes:
        word: passed, FAILED or skipped.
        text: what it found.
    """

    word: str
    text: str


def run_check(check: Check, kind: str, where: Place) -> Outcome:
    """Run it, its first half in this process."""
    if where.count() < check.devices:
        return Outcome("skipped", f"needs {check.devices} devices")
    try:
        found = asyncio.run(asyncio.wait_for(_first(check, kind, where), LIMIT_S))
        if kind != "fake" and not found.startswith(check.way):
            raise AssertionError(f"it went another way than {check.way}: {found}")
        return Outcome("passed", found)
    except Exception as error:  # the next check runs all the same
        text = f"not over after {LIMIT_S:.0f} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        traceback.print_exc()
        return Outcome("FAILED", text)


async def _first(check: Check, kind: str, where: Place) -> str:
    config = {"cluster": {"collective": {"backend": check.backend, "fallback": check.fallback}}}
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    async with init("a:0", config=config) as comm:
        other = context.Process(target=_second, args=(check, kind, comm.env(B), theirs), daemon=True)
        other.start()
        theirs.close()
        try:
            found = await check.first(comm, where)
            trouble = await asyncio.to_thread(_hear, ours, LIMIT_S)
            if trouble is not None:
                raise AssertionError(f"in the other process: {trouble}")
            return found
        except PeerError as error:
            trouble = await asyncio.to_thread(_hear, ours, 5.0)
            raise AssertionError(f"in the other process: {trouble}") from error
        finally:
            ours.close()  # which ends the other
            await asyncio.to_thread(other.join, 5.0)
            other.kill()


def _hear(pipe: Connection, limit: float) -> str | None:
    """What the other process reports: what went wrong there, None if nothing did."""
    if not pipe.poll(limit):
        return f"nothing came of it within {limit:.0f} s"
    found: str | None = pipe.recv()
    return found


def _end(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        pass


def _second(check: Check, kind: str, env: Mapping[str, str], pipe: Connection) -> None:
    os.environ.update(env)

    async def main() -> None:
        with place(kind) as where:
            async with init(device=f"{kind}:{check.lands_on}") as comm:
                await check.second(comm, where)
                pipe.send(None)
                await asyncio.to_thread(_end, pipe)  # the statistics of the link are read meanwhile

    try:
        asyncio.run(main())
    except BaseException:  # told to the one who waits
        pipe.send(traceback.format_exc())
