"""One of the two processes of a contender: does what its driver asks, one JSON line at a time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks.contender import Contender, Effort, Place, load, missing_reason
from scripts.benchmarks.own_core import ON_OWN_CORE, own_core
from scripts.benchmarks.parent import die_with_parent

__all__ = ["main"]


class Child:
    """Keeps the contender between requests."""

    def __init__(self, name: str, role: int, directory: Path, profiles: Path | None) -> None:
        self.name = name
        self.role = role
        self.directory = directory
        self.profiles = profiles
        self.generation = 0
        self.contender: Contender | None = None

    async def obey(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request: ``probe``, ``offer``, ``open``, ``measure`` or ``close``."""
        match request["do"]:
            case "probe":
                return {"missing": missing_reason(self.name, self.role)}
            case "offer":
                self.generation += 1
                self.contender = load(self.name)(Place(self.role, self.directory, self.generation))
                return await self.contender.offer()
            case "open":
                assert self.contender is not None
                await self.contender.open(request["offer"])
                # A full collection walks all of torch's objects, for 50 ms and more. What is there now stays, so it is left out of them.
                gc.collect()
                gc.freeze()
                return {}
            case "measure":
                assert self.contender is not None
                where = own_core(self.role) if request["case"] in ON_OWN_CORE else contextlib.nullcontext()
                with where, self._profiled(f"{request['case']}-{request['variant']}"):
                    return {**await self.contender.measure(request["case"], request["variant"], Effort(**request["effort"]))}
            case "close":
                if self.contender is not None:
                    contender, self.contender = self.contender, None
                    await contender.close()
                return {}
        raise AssertionError(f"no such request: {request}")

    @contextlib.contextmanager
    def _profiled(self, what: str) -> Iterator[None]:
        if self.profiles is None:
            yield
            return
        profile = cProfile.Profile()
        profile.enable()
        try:
            yield
        finally:
            profile.disable()
            profile.dump_stats(self.profiles / f"{self.name}-{self.role}-{what}.prof")

    async def serve(self, control: socket.socket) -> None:
        """Answer requests until the driver closes the control socket."""
        reader, writer = await asyncio.open_connection(sock=control)
        try:
            while line := await reader.readline():
                answer: dict[str, Any]
                try:
                    answer = {"ok": await self.obey(json.loads(line))}
                except Exception:  # whatever it is, the driver prints it and ends both processes
                    answer = {"error": traceback.format_exc()}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("role", type=int)
    parser.add_argument("control", type=int, help="descriptor of the control socket")
    parser.add_argument("directory", type=Path)
    parser.add_argument("parent", type=int)
    parser.add_argument("--profiles", type=Path)
    asked = parser.parse_args()
    die_with_parent(asked.parent)
    child = Child(asked.contender, asked.role, asked.directory, asked.profiles)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(child.serve(socket.socket(fileno=asked.control)))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
