"""``scripts/bench deaths``: how long until a peer's operation fails after a worker was killed, or stands still.

The worker is a process of its own, on this host; the peer has ten receives pending from it, in this process, on uvloop. The clock runs from
the signal to the moment when the last of the ten has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import uvloop

import aiorlinf
from aiorlinf.errors import PeerLost
from aiorlinf.testing.spawned import SpawnedCluster, SpawnedWorker, spawned_cluster
from scripts.benchmarks.summary import number

__all__ = ["SUMMARY", "main", "render"]

SUMMARY: Final = "from SIGKILL and SIGSTOP of a worker to the error at its peer"

PENDING: Final = 10
KILL_LIMIT_S: Final = 1.0
FREEZE_SLACK_S: Final = 1.0


async def stay(comm: aiorlinf.Worker) -> None:
    """Say that it is there, and wait for ever."""
    await comm.send("here", "peer:0")
    await comm.recv("peer:0", tag=1)


async def kill(cluster: SpawnedCluster, peer: aiorlinf.Worker) -> float:
    """Seconds from SIGKILL to the last error."""
    worker, pending = await met(cluster, peer)
    begin = time.perf_counter()
    dying = asyncio.ensure_future(worker.kill())
    await all_lost(pending)
    seconds = time.perf_counter() - begin
    await dying
    return seconds


async def freeze(cluster: SpawnedCluster, peer: aiorlinf.Worker) -> float:
    """Seconds from SIGSTOP to the last error."""
    worker, pending = await met(cluster, peer)
    begin = time.perf_counter()
    worker.freeze()
    await all_lost(pending)
    seconds = time.perf_counter() - begin
    await worker.kill()
    return seconds


async def met(cluster: SpawnedCluster, peer: aiorlinf.Worker) -> tuple[SpawnedWorker, list[aiorlinf.AsyncWork[Any]]]:
    """The next life of the worker, and what waits for it."""
    worker = await cluster.start("victim:0", stay, loop="uvloop")
    while True:
        try:
            await peer.recv("victim:0", timeout=30)
            break
        except PeerLost:  # its earlier life
            await asyncio.sleep(0.01)
    return worker, [peer.recv("victim:0", tag=2 + index) for index in range(PENDING)]


async def all_lost(pending: Sequence[aiorlinf.AsyncWork[Any]]) -> None:
    """Wait until all have failed."""
    for work in pending:
        try:
            await work
        except PeerLost:
            continue
        raise AssertionError("a receive is over, and not by the death of the peer")


async def measure(kills: int, freezes: int, heartbeat_s: float) -> tuple[list[float], list[float]]:
    """All of it."""
    config = {"cluster": {"network": {"heartbeat_timeout_s": heartbeat_s}}}
    async with spawned_cluster(config, here=["peer:0"]) as cluster:
        peer = cluster["peer:0"]
        return [await kill(cluster, peer) for _ in range(kills)], [await freeze(cluster, peer) for _ in range(freezes)]


def render(kills: Sequence[float], freezes: Sequence[float], heartbeat_s: float) -> str:
    """A table, and whether the limits were kept."""
    lines = [
        f"From the signal to the error of the last of {PENDING} pending receives at the peer, on one host, in milliseconds.",
        "",
        "| | rounds | median | worst | limit |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    kept = True
    for name, values, limit in (
        ("SIGKILL", kills, KILL_LIMIT_S),
        (f"SIGSTOP, heartbeat limit {number(1000 * heartbeat_s)}", freezes, heartbeat_s + FREEZE_SLACK_S),
    ):
        if values:
            median, worst = statistics.median(values), max(values)
            kept &= worst <= limit
            lines.append(f"| {name} | {len(values)} | {number(1000 * median)} | {number(1000 * worst)} | {number(1000 * limit)} |")
    lines += ["", "Within the limits." if kept else "NOT within the limits."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench deaths", description=SUMMARY)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="rounds with SIGKILL (default: %(default)s)")
    parser.add_argument("--freezes", type=int, default=10, metavar="N", help="rounds with SIGSTOP (default: %(default)s)")
    parser.add_argument("--heartbeat", type=float, default=2.0, metavar="S", help="seconds that are death (default: %(default)s)")
    asked = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        kills, freezes = runner.run(measure(asked.kills, asked.freezes, asked.heartbeat))
    print(render(kills, freezes, asked.heartbeat), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
