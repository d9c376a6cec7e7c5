"""The part of ``scripts/bench collectives`` on one host: a broadcast against one transfer, gather and all-to-all against torch's Gloo.

All are measured in turn, round by round, in the same five processes, so that whatever else the machine does falls on all of them. Times are
those of the first worker: of a broadcast from the call until all have the object, of a transfer until the receiver has said that it has it,
of a gather and an all-to-all until everything has come and has left. Gloo moves tensors of one shape into tensors that are there, or
(`NEW`) into such as are made for it, which is what the others do.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
import uvloop

import aiorlinf
from aiorlinf import Worker
from scripts.benchmarks.collectives_processes import started

__all__ = ["EXCHANGES", "GLOO", "NEW", "OURS", "RECEIVERS", "TRANSFER", "on_one_host"]

RECEIVERS: Final = (1, 2, 4)
TRANSFER: Final = "transfer"
OURS: Final = "aiorlinf"
GLOO: Final = "Gloo"
NEW: Final = "Gloo, new tensors"

_MIB: Final = 1 << 20
EXCHANGES: Final = [(name, nbytes) for nbytes in (1024, _MIB) for name in ("gather", "all_to_all")]
"""What, and bytes of each part."""

_WARM_UP: Final = 2
_MEMBERS: Final = [f"w:{rank}" for rank in range(5)]
_FOUR: Final = _MEMBERS[:4]
_REPEATS: Final = 3
"""Exchanges are quick: so many of each in a round."""

_Key = tuple[str, ...] | str


class _Part(NamedTuple):
    """One measurement: who takes part, what he does, and whether Gloo does it."""

    members: list[str]
    once: Callable[[Worker], Awaitable[None]]
    repeats: int = 1


def on_one_host(size: int, rounds: int) -> dict[object, float]:
    """Median seconds: of TRANSFER and of broadcasts by the number of receivers, of `size` bytes, and of (who, *exchange)."""
    with aiorlinf.init("driver:0", loop="thread") as comm, tempfile.TemporaryDirectory() as folder:
        functions = [
            partial(_member, rank=rank, env=comm.env(member), folder=folder, size=size, rounds=rounds)
            for rank, member in enumerate(_MEMBERS)
        ]
        with started(functions) as members:
            took, *_ = [member.hear() for member in members]
            return dict(took)


def _member(connection: Connection, rank: int, env: dict[str, str], folder: str, size: int, rounds: int) -> None:
    os.environ.update(env)
    if rank < len(_FOUR):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(_FOUR))
    connection.send(uvloop.run(_measure(size, rounds)))
    if rank < len(_FOUR):
        dist.destroy_process_group()
    connection.poll(None)


async def _measure(size: int, rounds: int) -> dict[object, float]:
    async with aiorlinf.init() as comm:
        parts = _parts(size)
        took: dict[object, list[float]] = {key: [] for key in parts}
        for number in range(_WARM_UP + rounds):
            for key, (members, once, repeats) in parts.items():
                for _ in range(repeats):
                    await comm.broadcast(None, members=_MEMBERS)  # all are there
                    if comm.address in members:
                        begin = time.perf_counter()
                        await once(comm)
                        if number >= _WARM_UP:
                            took[key].append(time.perf_counter() - begin)
        await comm.gather(None, members=_MEMBERS)  # all have heard of everything
    return {key: statistics.median(times or [0.0]) for key, times in took.items()}


def _parts(size: int) -> dict[object, _Part]:
    tensor = torch.zeros(size, dtype=torch.uint8)
    parts: dict[object, _Part] = {TRANSFER: _Part(_MEMBERS[:2], partial(_transfer, tensor=tensor))}
    for receivers in RECEIVERS:
        members = _MEMBERS[: 1 + receivers]
        parts[receivers] = _Part(members, partial(_broadcast, tensor=tensor, members=members))
    for name, nbytes in EXCHANGES:
        tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in _FOUR]
        there = [torch.zeros(nbytes, dtype=torch.uint8) for _ in _FOUR]
        parts[OURS, name, nbytes] = _Part(_FOUR, partial(_exchange, name=name, tensors=tensors), _REPEATS)
        parts[GLOO, name, nbytes] = _Part(_FOUR, partial(_gloo, name=name, tensors=tensors, out=there), _REPEATS)
        parts[NEW, name, nbytes] = _Part(_FOUR, partial(_gloo, name=name, tensors=tensors, out=None), _REPEATS)
    return parts


async def _transfer(comm: Worker, tensor: torch.Tensor) -> None:
    if comm.address == "w:0":
        await comm.send(tensor, "w:1")
        await comm.recv("w:1")
    else:
        await comm.send((await comm.recv("w:0")).numel(), "w:0")


async def _broadcast(comm: Worker, tensor: torch.Tensor, members: list[str]) -> None:
    await comm.broadcast(tensor if comm.address == "w:0" else None, members=members)


async def _exchange(comm: Worker, name: str, tensors: list[torch.Tensor]) -> None:
    if name == "gather":
        await comm.gather(tensors[0], members=_FOUR)
    else:
        await comm.all_to_all(tensors, members=_FOUR)


async def _gloo(comm: Worker, name: str, tensors: list[torch.Tensor], out: list[torch.Tensor] | None) -> None:
    """Blocks, which is how it is quickest."""
    rank = int(comm.address.rank)
    if out is None and (name == "all_to_all" or rank == 0):
        out = [torch.empty_like(tensor) for tensor in tensors]
    if name == "gather":
        dist.gather(tensors[0], out if rank == 0 else None)
        return
    assert out is not None
    # Gloo has none for lists of tensors.
    works = [dist.isend(tensors[other], other) for other in range(len(_FOUR)) if other != rank]
    for other in range(len(_FOUR)):
        if other != rank:
            dist.recv(out[other], other)
    for work in works:
        if work is not None:
            work.wait()
