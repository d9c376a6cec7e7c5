"""``scripts/bench trace``: what it costs to record a trace, and what it costs that one could.

Two processes, small messages: how many in a second one way, and how long a round trip takes, in turns with and without recording on both
sides, so that whatever else the machine does meets both alike. Recording goes on in both processes until each part is over, the writing of
raw events to files included; the conversion for Perfetto, which follows at the end, is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from aiorlinf import Worker, init
from scripts.benchmarks.summary import number

__all__ = ["SUMMARY", "main"]

SUMMARY: Final = "what recording a trace costs, and what it costs when nothing is recorded"

PEER: Final = "peer:0"
TESTS: Final = 3
"""Of an attribute, for a small message, at both sides together, when nothing is recorded: as it is sent, as it comes, as it is taken."""
MESSAGE: Final = {"step": 1, "reward": 0.5, "done": False}


async def serve() -> None:
    """The other process: do what is asked."""
    async with init() as comm:
        trace: Any = None
        while True:
            what, argument = await comm.recv("us:0", tag=1)
            if what == "stop":
                return
            if what == "record":
                trace = comm.trace(argument, events=10_000_000) if argument else await trace
            begun = time.process_time()
            if what == "rate":
                for _ in range(argument):
                    await comm.recv("us:0")
            elif what == "trips":
                for _ in range(argument):
                    await comm.send(await comm.recv("us:0"), "us:0")
            await comm.send(time.process_time() - begun, "us:0", tag=1)


class Speed(NamedTuple):
    """So many in a second, and the seconds of CPU time that both processes took for one."""

    rate: float
    cpu: float


Found = dict[str, dict[str, list[Speed]]]


async def ask(comm: Worker, what: str, argument: Any) -> None:
    await comm.send((what, argument), PEER, tag=1)


async def one_way(comm: Worker, count: int) -> Speed:
    await ask(comm, "rate", count)
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        await comm.send(MESSAGE, PEER)
    theirs = await comm.recv(PEER, tag=1)
    return Speed(count / (time.perf_counter() - begun), (time.process_time() - used + theirs) / count)


async def round_trips(comm: Worker, count: int) -> Speed:
    await ask(comm, "trips", count)
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        await comm.send(MESSAGE, PEER)
        await comm.recv(PEER)
    taken, ours = time.perf_counter() - begun, time.process_time() - used
    return Speed(count / taken, (ours + await comm.recv(PEER, tag=1)) / count)


async def measure(count: int, rounds: int) -> Found:
    found: Found = {kind: {"off": [], "on": []} for kind in ("one way", "round trips")}
    config = {"cluster": {"collective": {"backend": "stream"}}}
    with tempfile.TemporaryDirectory() as folder:
        async with init("us:0", config=config) as comm:
            command = [sys.executable, "-m", "scripts.benchmarks.tracing", "--serve"]
            peer = subprocess.Popen(command, env={**os.environ, **comm.env(PEER)})  # noqa: ASYNC220 - nothing else is under way
            try:
                await one_way(comm, count)
                for number_of in range(rounds):
                    for state in ("off", "on") if number_of % 2 else ("on", "off"):
                        recording = comm.trace(Path(folder, "us.json"), events=10_000_000) if state == "on" else None
                        if recording is not None:
                            await ask(comm, "record", str(Path(folder, "peer.json")))
                            await comm.recv(PEER, tag=1)
                        found["one way"][state].append(await one_way(comm, count))
                        found["round trips"][state].append(await round_trips(comm, count // 4))
                        if recording is not None:
                            await recording
                            await ask(comm, "record", "")
                            await comm.recv(PEER, tag=1)
                await ask(comm, "stop", None)
            finally:
                peer.wait(20)
    return found


def test_seconds() -> float:
    """Of the one test of an attribute that is left when nothing is recorded."""

    class Side:
        trace = None

    loops = 1_000_000
    empty = min(timeit.repeat("pass", timer=time.process_time, number=loops))
    tested = min(timeit.repeat("if side.trace is not None: pass", globals={"side": Side()}, timer=time.process_time, number=loops))
    return max(0.0, tested - empty) / loops


def report(found: Found) -> list[str]:
    """A table for people."""
    lines = [
        "| | not recorded, per second | recorded, per second | CPU time of both, µs | recorded | costs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, speeds in found.items():
        off, on = speeds["off"], speeds["on"]
        costs = statistics.median(one.cpu / other.cpu - 1 for one, other in zip(on, off, strict=True))
        rates = [number(statistics.median(each.rate for each in state)) for state in (off, on)]
        cpu = [number(statistics.median(each.cpu for each in state) * 1e6) for state in (off, on)]
        lines.append(f"| {kind} | {rates[0]} | {rates[1]} | {cpu[0]} | {cpu[1]} | {costs:.1%} |")
    message = statistics.median(each.cpu for each in found["one way"]["off"])
    tests = TESTS * test_seconds()
    lines.append("")
    lines.append(f"Not recorded, a message has {TESTS} tests of an attribute: {tests * 1e9:.0f} ns, {tests / message:.2%} of its CPU time.")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench trace", description=SUMMARY)
    parser.add_argument("--messages", type=int, default=40_000, metavar="N", help="of each part (default: %(default)d)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="with and without (default: %(default)d)")
    asked = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(max(8, asked.messages), max(1, asked.rounds)))
    print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    if "--serve" in sys.argv:
        uvloop.run(serve())
    else:
        sys.exit(main(sys.argv[1:]))
