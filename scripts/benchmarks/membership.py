"""``scripts/bench membership``: what a worker costs its manager, for jobs of different sizes.

The manager is a process of its own, as `aiorlinf manager` runs it. The workers are simulated: each is one proven connection that speaks
the real protocol, registers, looks others up, sends heartbeats and leaves; all of them live in this process, whose time does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import uvloop

from aiorlinf.config import ClusterConfig, JobConfig, NetworkConfig
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.service import ManagerService
from scripts.benchmarks.footprint import resident_bytes
from scripts.benchmarks.summary import number

__all__ = ["SUMMARY", "Size", "main", "render"]

SUMMARY: Final = "what a worker costs its manager, for jobs of up to 5,000 workers"

PHASES: Final = ("join", "find", "beat", "leave")
FOUND: Final = 8
"""Others that each worker looks up."""
BEATS: Final = 3
AT_ONCE: Final = 200
"""Simulated workers that do something at the same time."""
FLAT: Final = 2.0
"""Up to this factor between the smallest and the largest job a cost is called flat; what there is, is caches that no longer hold it all."""

TOKEN: Final = b"the token of the benchmark"


@dataclass
class Size:
    """What was measured for a job of this many workers: seconds of the manager's CPU time, and of wall time, for each phase."""

    workers: int
    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    bytes: int = 0

    def per_worker(self, phase: str) -> float:
        """Microseconds of the manager's CPU time for one worker; of one look-up, and of one heartbeat."""
        times = {"find": FOUND, "beat": BEATS}.get(phase, 1)
        return self.cpu[phase] / self.workers / times * 1e6


# ---- the manager's process


async def serve() -> None:
    config = JobConfig(ClusterConfig(network=NetworkConfig(heartbeat_timeout_s=600.0, handshake_timeout_s=60.0)))
    manager = ManagerService(config=config, token=TOKEN)
    manager.max_unproven = 2 * AT_ONCE
    await manager.start()
    print(manager.address, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(usage.ru_utime + usage.ru_stime, resident_bytes(), flush=True)
    await manager.close()


class Manager:
    """The process, and what it has used so far."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "scripts.benchmarks.membership", "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the manager has ended")
        return line.strip()

    def usage(self) -> tuple[float, int]:
        """Seconds of CPU time, bytes of memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, memory = self._line().split()
        return float(seconds), int(memory)

    def end(self) -> None:
        self._process.communicate(timeout=20)


# ---- the workers


async def in_parts(things: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Do all, some at once."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(thing: Callable[[], Awaitable[None]]) -> None:
        async with free:
            await thing()

    async with asyncio.TaskGroup() as group:
        for thing in things:
            group.create_task(one(thing))


async def measure(workers: int) -> Size:
    """One job of this size, from its beginning to its end."""
    size = Size(workers)
    manager = Manager()
    clients: list[ManagerClient] = []
    chance = random.Random(workers)

    async def join(index: int) -> None:
        client = await ManagerClient.connect(manager.address, TOKEN, deadline=120.0, worker=f"w:{index}")
        clients.append(client)
        await client.register(f"w:{index}", port=1, devices=["cpu"], timeout=120.0)

    async def find(client: ManagerClient) -> None:
        for _ in range(FOUND):
            await client.lookup(f"w:{chance.randrange(workers)}", 120.0)

    async def beat(client: ManagerClient) -> None:
        for _ in range(BEATS):
            client.beat()
            while client.unanswered:  # noqa: ASYNC110 - an answer sets no event
                await asyncio.sleep(0.001)

    async def leave(client: ManagerClient) -> None:
        await client.close(120.0)

    async def phase(name: str, things: Sequence[Callable[[], Awaitable[None]]]) -> None:
        before, begin = manager.usage()[0], time.monotonic()
        await in_parts(things)
        size.wall[name] = time.monotonic() - begin
        size.cpu[name] = manager.usage()[0] - before

    try:
        empty = manager.usage()[1]
        await phase("join", [lambda index=index: join(index) for index in range(workers)])  # type: ignore[misc]
        await phase("find", [lambda client=client: find(client) for client in clients])  # type: ignore[misc]
        size.bytes = manager.usage()[1] - empty
        await phase("beat", [lambda client=client: beat(client) for client in clients])  # type: ignore[misc]
        await phase("leave", [lambda client=client: leave(client) for client in clients])  # type: ignore[misc]
    finally:
        for client in clients:
            client.abort()
        manager.end()
    return size


# ---- the report


def render(sizes: Sequence[Size]) -> str:
    """A table, and whether the cost of a worker depends on how many there are."""
    lines = [
        "Microseconds of the manager's CPU time for one worker to join, for one look-up, for one heartbeat, for one worker to leave;",
        f"each worker looks {FOUND} others up, which hear of its end. In brackets the seconds that all of them took together.",
        "",
        "| workers | " + " | ".join(PHASES) + " | KiB each |",
        "| ---: |" + " ---: |" * (len(PHASES) + 1),
    ]
    for size in sizes:
        cells = [f"{number(size.per_worker(phase))} ({number(size.wall[phase])} s)" for phase in PHASES]
        lines.append(f"| {size.workers:,} | {' | '.join(cells)} | {number(size.bytes / size.workers / 1024)} |")
    if len(sizes) > 1:
        least, most = sizes[0], sizes[-1]
        ratios = {phase: most.per_worker(phase) / max(least.per_worker(phase), 1e-9) for phase in PHASES}
        told = ", ".join(f"{phase} {number(ratio)}" for phase, ratio in ratios.items())
        verdict = "flat" if max(ratios.values()) <= FLAT else "NOT flat"
        lines += ["", f"Cost with {most.workers:,} workers to that with {least.workers:,}: {told}: {verdict}."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench membership", description=SUMMARY)
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", default=[625, 1250, 2500, 5000], help="sizes (default: %(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.serve:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(serve())
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and max(asked.workers) + 100 > hard:
        parser.error(f"{max(asked.workers)} workers need as many file descriptors, and only {hard} are allowed here")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sizes = [runner.run(measure(workers)) for workers in sorted(asked.workers)]
    print(render(sizes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
