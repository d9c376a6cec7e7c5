"""The driver's side of a contender: starts its two processes, tells both what to do, and ends them whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.contender import Effort, Metrics

__all__ = ["ContenderMissing", "Pair", "PairFailed"]

ROOT: Final = Path(__file__).resolve().parents[2]
START_LIMIT_S: Final = 90.0
STEP_LIMIT_S: Final = 180.0
"""Six ways to send four to nine messages of 13 MB each over 100 Mbit/s take 40 s where nothing else runs."""

GRACE_S: Final = 2.0


class ContenderMissing(Exception):
    """The contender is not installed here."""


class PairFailed(Exception):
    """One of the two processes failed, died or did not answer in time; both are gone now."""


class Half:
    """One process and its control socket."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.log = log

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the answer; raises PairFailed with the process's own words."""
        try:
            self.writer.write(json.dumps(request).encode() + b"\n")
            line = await self.reader.readline()
        except OSError:
            line = b""
        if not line:
            status = await self.process.wait()
            raise PairFailed(f"process {self.process.pid} ended with status {status} during {request['do']}\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PairFailed(answer["error"])
        result: dict[str, Any] = answer["ok"]
        return result

    def tail(self) -> str:
        """The last lines that the process printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    async def end(self) -> None:
        """Kill the process by its id and wait for it."""
        self.writer.close()
        try:
            async with asyncio.timeout(GRACE_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


class Pair:
    """Two processes of one contender. A failure ends them; opening it again starts new ones."""

    def __init__(self, name: str, profiles: Path | None = None) -> None:
        self.name = name
        self.profiles = profiles
        self.halves: list[Half] = []
        self.directory: tempfile.TemporaryDirectory[str] | None = None
        self.opened = False

    async def start(self) -> None:
        """Start both processes; raises ContenderMissing or PairFailed."""
        if self.halves:
            return
        self.directory = tempfile.TemporaryDirectory(prefix="aiorlinf-bench-")
        try:
            for role in (0, 1):
                self.halves.append(await self._spawn(role))
            for answer in await self._both({"do": "probe"}, START_LIMIT_S):
                if answer["missing"] is not None:
                    raise ContenderMissing(answer["missing"])
        except BaseException:  # also when cancelled: no process may be left behind
            await self.end()
            raise

    async def reopen(self) -> None:
        """Close the contender in both processes, if open, and open it anew: nothing is connected afterwards."""
        await self.start()
        if self.opened:
            self.opened = False
            await self._both({"do": "close"})
        offers = await self._both({"do": "offer"})
        await self._both({"do": "open", "offer": offers[1]}, second={"do": "open", "offer": offers[0]})
        self.opened = True

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        """One measurement in both processes at the same time. After PairFailed the pair has to be opened again."""
        answers = await self._both({"do": "measure", "case": case, "variant": variant, "effort": effort.to_json()})
        merged: Metrics = {}
        for answer in answers:
            for metric, value in answer.items():
                merged[metric] = max(value, merged.get(metric, value))
        return merged

    async def end(self) -> None:
        """End both processes. Does nothing when none runs."""
        halves, self.halves, self.opened = self.halves, [], False
        await asyncio.gather(*(half.end() for half in halves))
        if self.directory is not None:
            self.directory.cleanup()
            self.directory = None

    async def close(self) -> None:
        """Close the contender in good order, then end both processes."""
        try:
            if self.opened:
                await self._both({"do": "close"})
        finally:
            await self.end()

    async def _both(
        self, request: dict[str, Any], limit: float = STEP_LIMIT_S, *, second: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        tasks = [asyncio.ensure_future(half.ask(asked)) for half, asked in zip(self.halves, (request, second or request), strict=True)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                # The other half may know the cause while this one only saw its end: give it a moment to say so.
                done, _ = await asyncio.wait(tasks, timeout=GRACE_S)
            if failures := [str(task.exception()) for task in tasks if task in done and task.exception() is not None]:
                raise PairFailed("\n".join([*failures, *filter(None, (half.tail() for half in self.halves))]))
            if len(done) < len(tasks):
                tails = "\n".join(half.tail() for half in self.halves)
                raise PairFailed(f"no answer to {request['do']} within {limit:g} s\n{tails}".rstrip())
        except BaseException:  # also when cancelled: two halves in the middle of something cannot be used again
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for half in self.halves:
                if half.process.returncode is None:
                    half.process.kill()
            await self.end()
            raise
        return [task.result() for task in tasks]

    async def _spawn(self, role: int) -> Half:
        assert self.directory is not None
        here, there = socket.socketpair()
        here.setblocking(False)
        log = Path(self.directory.name) / f"{role}.log"
        work = Path(self.directory.name) / "shared"
        work.mkdir(exist_ok=True)
        arguments = [self.name, str(role), str(there.fileno()), str(work), str(os.getpid())]
        if self.profiles is not None:
            arguments += ["--profiles", str(self.profiles)]
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "scripts.benchmarks.child",
                    *arguments,
                    cwd=ROOT,
                    env=child_environment(),
                    pass_fds=[there.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        except BaseException:  # whatever kept it from starting: the sockets are not leaked
            here.close()
            raise
        finally:
            there.close()
        reader, writer = await asyncio.open_connection(sock=here)
        return Half(process, reader, writer, log)


def child_environment() -> dict[str, str]:
    """The environment of both processes: our own modules found, no job of someone else joined, one compute thread each.

    One thread: the two processes share the machine's cores, and copies by several threads of one would measure the scheduler.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AIORLINF_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
