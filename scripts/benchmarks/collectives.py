"""``scripts/bench collectives``: what a broadcast on this host costs, against one transfer; gather and all-to-all against torch's Gloo.

All workers are processes of their own. A broadcast is timed at its root from the call until all have the object; the transfer from the
call of send until the receiver, who looks at all of it, has said so. Gloo moves tensors of one shape; objects go through its pickling.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import uvloop

import aiorlinf
from aiorlinf import Worker

__all__ = ["SUMMARY", "main"]

SUMMARY = "broadcast, gather and all-to-all between processes of this host"

MIB = 1 << 20
WARM_UP = 2
MEMBERS = 5
RECEIVERS = (1, 2, 4)
EXCHANGES = [(name, nbytes) for nbytes in (1024, MIB) for name in ("gather", "all_to_all")]


def main(arguments: Sequence[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench collectives", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small amounts: shows that all of it works, not how fast it is")
    parser.add_argument("--mib", type=int, default=64, help="size of the broadcast (default 64)")
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement; medians are printed")
    asked = parser.parse_args(arguments)
    size, rounds = (1, 3) if asked.quick else (asked.mib, asked.rounds)
    ours = _run(MEMBERS, partial(_measure, size=size * MIB, rounds=rounds))
    theirs = _processes_of_gloo(rounds)
    print(f"{f'one transfer of {size} MiB on this host':38} {1000 * ours['transfer']:8.2f} ms")
    for receivers in RECEIVERS:
        took = ours[f"broadcast to {receivers}"]
        print(f"{f'broadcast to {receivers}':38} {1000 * took:8.2f} ms, {took / ours['transfer']:.2f} times as long")
    print(f"\n{'among 4 workers':34} {'aiorlinf':>12} {'Gloo':>12}")
    for name in theirs:
        print(f"{name:34} {1000 * ours[name]:9.2f} ms {1000 * theirs[name]:9.2f} ms")
    return 0


# ---- processes

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])  # torch is imported once


def _processes(size: int, target: Callable[..., None], *args: Any) -> dict[str, float]:
    """What rank 0 answers."""
    answers = _context.SimpleQueue()
    members = [_context.Process(target=target, args=(rank, size, answers, *args)) for rank in range(size)]
    for member in members:
        member.start()
    for member in members:
        member.join()
        if member.exitcode:
            raise SystemExit(f"a process of the benchmark ended with {member.exitcode}")
    return dict(answers.get())


# ---- aiorlinf


def _run(size: int, part: Callable[[Worker], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """What the part of w:0 gives; w:1 and so on take part in processes of their own."""
    with aiorlinf.init("driver:0", loop="thread") as comm:
        return _processes(size, _member, comm.env("w:0"), part)


def _member(rank: int, size: int, answers: Any, env: dict[str, str], part: Callable[[Worker], Awaitable[dict[str, float]]]) -> None:
    os.environ.update(env)

    async def run() -> None:
        async with aiorlinf.init(f"w:{rank}") as comm:
            took = await part(comm)
            if rank == 0:
                answers.put(took)
            await comm.gather(None, members=_first(size))  # all have heard of everything

    uvloop.run(run())


def _first(count: int) -> list[str]:
    return [f"w:{rank}" for rank in range(count)]


async def _measure(comm: Worker, size: int, rounds: int) -> dict[str, float]:
    """One after the other; who takes no part waits for the end of it."""
    took = {}
    for name, count, part in (
        ("transfer", 2, partial(_transfer, size=size)),
        *((f"broadcast to {receivers}", 1 + receivers, partial(_broadcast, size=size)) for receivers in RECEIVERS),
        *((_title(name, nbytes), 4, partial(_exchange, name=name, nbytes=nbytes)) for name, nbytes in EXCHANGES),
    ):
        members = _first(count)
        if comm.address in members:
            took[name] = await part(comm, members, rounds=rounds)
        await comm.broadcast(None, members=_first(MEMBERS))
    return took


def _title(name: str, nbytes: int) -> str:
    return f"{name} of tensors of {'1 MiB' if nbytes == MIB else '1 KiB'}"


async def _transfer(comm: Worker, members: list[str], size: int, rounds: int) -> float:
    times = []
    tensor = torch.zeros(size, dtype=torch.uint8)
    for _ in range(WARM_UP + rounds):
        if comm.address == "w:0":
            begin = time.perf_counter()
            await comm.send(tensor, "w:1")
            await comm.recv("w:1")
            times.append(time.perf_counter() - begin)
        else:
            got = await comm.recv("w:0")
            await comm.send(got.numel(), "w:0")
            del got
    return statistics.median(times[WARM_UP:] or [0.0])


async def _broadcast(comm: Worker, members: list[str], size: int, rounds: int) -> float:
    times = []
    tensor = torch.zeros(size, dtype=torch.uint8)
    for _ in range(WARM_UP + rounds):
        begin = time.perf_counter()
        await comm.broadcast(tensor if comm.address == "w:0" else None, members=members)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


async def _exchange(comm: Worker, members: list[str], name: str, nbytes: int, rounds: int) -> float:
    times = []
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(4)]
    for _ in range(WARM_UP + rounds):
        begin = time.perf_counter()
        if name == "gather":
            await comm.gather(tensors[0], members=members)
        else:
            await comm.all_to_all(tensors, members=members)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


# ---- torch


def _processes_of_gloo(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return _processes(4, _gloo_member, folder, rounds)


def _gloo_member(rank: int, size: int, answers: Any, folder: str, rounds: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    took = {_title(name, nbytes): _gloo(rank, size, name, nbytes, rounds) for name, nbytes in EXCHANGES}
    if rank == 0:
        answers.put(took)
    dist.barrier()
    dist.destroy_process_group()


def _gloo(rank: int, size: int, name: str, nbytes: int, rounds: int) -> float:
    times = []
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
    out = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
    for _ in range(WARM_UP + rounds):
        begin = time.perf_counter()
        if name == "gather":
            dist.gather(tensors[0], out if rank == 0 else None)
            dist.barrier()  # ours is over when the root has everything
        else:  # Gloo has none for lists of tensors
            works = [dist.isend(tensors[other], other) for other in range(size) if other != rank]
            for other in range(size):
                if other != rank:
                    dist.recv(out[other], other)
            for work in works:
                if work is not None:
                    work.wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])
