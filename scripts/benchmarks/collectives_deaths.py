"""The part of ``scripts/bench collectives`` in which a member is killed: when do the others know, and does the next collective work?

Four workers in processes of their own. One calls the collective and then stands still (SIGSTOP); the others call it, so that it is under
way and cannot end; then the one is killed. The clock runs from SIGKILL until the last of those who raise has raised (a receiver of a
broadcast that has its object has nothing to raise), and until a broadcast among the three who are left is over at all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import uvloop

from aiorlinf import Worker
from aiorlinf.errors import PeerLost
from aiorlinf.testing.spawned import SpawnedWorker, spawned_cluster, talk

__all__ = ["Death", "killed_in_the_middle"]

_MEMBERS: Final = [f"w:{rank}" for rank in range(4)]
_NUMBERS: Final = 4 << 20
_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Death:
    """One killed member.

    Attributes:
        raised_s: until the last one who raises has raised.
        went_on_s: until all have done the next collective.
        had_it: how many had nothing to raise.
    """

    raised_s: float
    went_on_s: float
    had_it: int


def killed_in_the_middle(rounds: int) -> dict[str, list[Death]]:
    """By what is under way when who is killed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(rounds))


def _weights(rank: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((_NUMBERS // 4,), float(rank)) for name in "abcd"}


_kept: dict[int, dict[str, torch.Tensor]] = {}


def _changed(rank: int) -> dict[str, torch.Tensor]:
    """The same tensors every time, half of them written to."""
    state = _kept.setdefault(rank, _weights(rank))
    for name in "ab":
        state[name].add_(1)
    return state


_CALLS: Final[dict[str, Callable[[Worker, int], Any]]] = {
    "broadcast of a small object": lambda comm, rank: comm.broadcast(rank, members=_MEMBERS),
    "broadcast of 16 MiB": lambda comm, rank: comm.broadcast(_weights(rank), members=_MEMBERS),
    "broadcast of 16 MiB into tensors": lambda comm, rank: comm.broadcast(
        _weights(rank), members=_MEMBERS, into=_weights(rank) if rank else None
    ),
    "broadcast of what has changed": lambda comm, rank: comm.broadcast(_changed(rank), members=_MEMBERS, changed_only=True),
    "gather of 16 MiB each": lambda comm, rank: comm.gather(_weights(rank), members=_MEMBERS),
    "all_to_all of 16 MiB each": lambda comm, rank: comm.all_to_all([_weights(rank)] * len(_MEMBERS), members=_MEMBERS),
}
_ONE: Final = 2
"""Rank of the member that is killed, where it is not the root."""


async def _all(rounds: int) -> dict[str, list[Death]]:
    found: dict[str, list[Death]] = {}
    for kind in _CALLS:
        for victim in (_ONE, 0):
            if victim or kind.startswith("gather") or kind == "broadcast of 16 MiB":
                title = kind if victim else f"{kind}, its root"
                found[title] = [await _one(kind, victim) for _ in range(rounds)]
    return found


async def _one(kind: str, victim: int) -> Death:
    async with spawned_cluster(loop="uvloop") as cluster:
        workers = [await cluster.start(member, _take_part, kind, rank, victim) for rank, member in enumerate(_MEMBERS)]
        dying = workers.pop(victim)
        await _go(dying)  # it has stopped itself, before it could be done
        for worker in workers:
            await _go(worker)
        begin = time.monotonic()
        killing = asyncio.ensure_future(dying.kill())
        outcomes = [await worker.result(_LIMIT_S) for worker in workers]
        await killing
    raised = [at - begin for raised, at, _ in outcomes if raised]
    if not raised:
        raise AssertionError(f"nobody has noticed that w:{victim} was killed in the middle of a {kind}")
    return Death(max(raised), max(over for *_, over in outcomes) - begin, len(outcomes) - len(raised))


async def _go(worker: SpawnedWorker) -> None:
    """Let it call, and wait until it has."""
    await worker.hear(_LIMIT_S)
    worker.say(None)
    await worker.hear(_LIMIT_S)


async def _take_part(comm: Worker, kind: str, rank: int, victim: int) -> tuple[bool, float, float]:
    """Whether it raised, when its own part was over, and when the next one was."""
    await _CALLS[kind](comm, rank)  # there are links and memory; from now on less has changed
    talk().say("here")
    await asyncio.to_thread(talk().hear)
    work = _CALLS[kind](comm, rank)
    await asyncio.sleep(0)  # it has begun
    talk().say("called")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    raised = False
    try:
        await work
    except PeerLost:
        raised = True
    at = time.monotonic()
    await comm.broadcast(None, members=[member for member in _MEMBERS if member != f"w:{victim}"])
    return raised, at, time.monotonic()
