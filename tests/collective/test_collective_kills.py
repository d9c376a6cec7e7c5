"""A member's process is killed in the middle of a collective: the others raise, and a group of the survivors works at once.

Two hosts of two members each, as far as they know. The one who dies does it itself, at a certain point of what it does there: nothing is
left to chance. Silence counts as death only after minutes, so whoever raises within the limits of the test has been told.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from aiorlinf import Worker
from aiorlinf.collective.bulk import Bulk
from aiorlinf.collective.circle import Circle
from aiorlinf.collective.exchange import Exchange
from aiorlinf.collective.into import Target
from aiorlinf.collective.operation import Operation
from aiorlinf.collective.spread import Relay
from aiorlinf.errors import PeerLost
from aiorlinf.testing.spawned import spawned_cluster

__all__: list[str] = []

MEMBERS = [f"w:{rank}" for rank in range(4)]
HOSTS = ["a", "a", "b", "b"]
SLOW: dict[str, Any] = {"cluster": {"network": {"heartbeat_timeout_s": 300.0}}}
NUMBERS = 3 << 20
"""Float32: three pieces on the way to the other host."""

LIMIT_S = 100.0


class Point(NamedTuple):
    """Who dies, at which call of what."""

    victim: int
    owner: type
    method: str
    call: int = 1


def weights(rank: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUMBERS,), float(rank)), "v": torch.full((20_000,), float(rank)), "b": torch.full((3,), float(rank))}


_kept: dict[int, dict[str, torch.Tensor]] = {}
"""In one of the processes: what it broadcasts again and again."""


def small(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.broadcast({"from": rank} if rank == int(members[0][2:]) else None, members=members)


def large(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.broadcast(weights(rank), members=members)


def into(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.broadcast(weights(rank), members=members, into=weights(rank))


def changed_only(comm: Worker, rank: int, members: list[str]) -> Any:
    state = _kept.setdefault(rank, weights(rank))
    state["w"].add_(0)
    return comm.broadcast(state, members=members, changed_only=True)


def gather(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.gather(weights(rank), members=members)


def middling_gather(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.gather(weights(rank)["v"], members=members)


def small_gather(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.gather(rank, members=members)


def all_to_all(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.all_to_all([weights(rank) for _ in members], members=members)


def middling_all_to_all(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.all_to_all([weights(rank)["v"] for _ in members], members=members)


def small_all_to_all(comm: Worker, rank: int, members: list[str]) -> Any:
    return comm.all_to_all([rank for _ in members], members=members)


Call = Callable[[Worker, int, list[str]], Any]

CASES: dict[str, tuple[Call, Point]] = {
    "small, one who has it and has told nobody": (small, Point(2, Operation, "take")),
    "small, its root before it has told all": (small, Point(0, Circle, "tell", 2)),
    "large, the other host's first after a piece": (large, Point(2, Bulk, "advance")),
    "large, one who is lent memory": (large, Point(3, Operation, "take")),
    "large, a neighbour of the root": (large, Point(1, Operation, "take")),
    "large, its root between pieces": (large, Point(0, Exchange, "send_tensor", 3)),
    "large, its root before it has handed anything on": (large, Point(0, Relay, "pass_bulk")),
    "into tensors, before they are written to": (into, Point(2, Target, "fill")),
    "into tensors, after a piece": (into, Point(2, Bulk, "advance", 2)),
    "what has changed, one who has it": (changed_only, Point(3, Operation, "take")),
    "what has changed, its root": (changed_only, Point(0, Bulk, "advance")),
    "gather, one between word and object": (gather, Point(1, Exchange, "send_flat")),
    "gather, its root between objects": (gather, Point(0, Exchange, "recv_to", 2)),
    "middling gather, one who has put his part down": (middling_gather, Point(1, Circle, "tell")),
    "middling gather, its root": (middling_gather, Point(0, Operation, "take", 2)),
    "small gather, its root": (small_gather, Point(0, Operation, "take", 2)),
    "all to all, between objects that it sends": (all_to_all, Point(2, Exchange, "send_flat", 2)),
    "all to all, between objects that it gets": (all_to_all, Point(0, Exchange, "recv_to", 2)),
    "middling all to all, before a word about what it has seen": (middling_all_to_all, Point(1, Circle, "tell", 4)),
    "small all to all, between what it sends": (small_all_to_all, Point(3, Circle, "tell", 2)),
}


def die_at(point: Point) -> None:
    """From now on."""
    left = point.call
    method = getattr(point.owner, point.method)

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **options)

    setattr(point.owner, point.method, dying)


async def take_part(comm: Worker, name: str, rank: int) -> tuple[str, list[Any]]:
    """What the call came to, and what those of the survivors gave."""
    call, point = CASES[name]
    await comm.all_to_all([None] * len(MEMBERS), members=MEMBERS)
    await call(comm, rank, MEMBERS)  # one that works: there are links and memory, and what has changed is less from now on
    if rank == point.victim:
        die_at(point)
    try:
        outcome = described(await call(comm, rank, MEMBERS))
    except PeerLost as error:
        outcome = f"lost {error.remote}"
    survivors = [member for member in MEMBERS if member != f"w:{point.victim}"]
    return outcome, [described(await again(comm, rank, survivors)) for again in (small, changed_only, gather, all_to_all)]


def described(value: Any) -> Any:
    """Of each tensor its first element, if all are equal to it."""
    if isinstance(value, list):
        return [described(each) for each in value]
    if isinstance(value, dict):
        return {name: described(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value[0].item() if torch.equal(value, value[0].expand_as(value)) else "mixed"
    return value


@pytest.mark.sampled(3)
@pytest.mark.asyncio
@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize("name", CASES)
async def test_the_others_raise_and_go_on_without_it(name: str) -> None:
    call, point = CASES[name]
    async with spawned_cluster(SLOW) as cluster:
        workers = [await cluster.start(member, take_part, name, rank, host=HOSTS[rank]) for rank, member in enumerate(MEMBERS)]
        dead = workers.pop(point.victim)
        found = [await worker.result(LIMIT_S) for worker in workers]
        assert await dead.exited(LIMIT_S) == -signal.SIGKILL
    ranks = [rank for rank in range(4) if rank != point.victim]
    outcomes = [outcome for outcome, _ in found]
    assert f"lost w:{point.victim}" in outcomes
    # Who has the object of a broadcast returns it, and so may who has everybody's.
    rows = [state(rank) for rank in range(4)]
    other: dict[Call, Any] = {
        small: {"from": 0},
        gather: None,
        middling_gather: None,
        middling_all_to_all: [0.0, 1.0, 2.0, 3.0],
        small_gather: None,
        changed_only: state(0) if point.victim == 0 else {"w": 0.0, "b": 0.0},
        all_to_all: rows,
        small_all_to_all: [0, 1, 2, 3],
    }
    whole = other.get(call, rows[0])
    assert all(outcome in (f"lost w:{point.victim}", whole) for outcome in outcomes), outcomes
    assert call is not changed_only or whole in outcomes or point.victim == 0, "those who have it have only what has changed"
    for rank, (_, after) in zip(ranks, found, strict=True):
        everybody = [state(each) for each in ranks]
        assert after == [{"from": ranks[0]}, state(ranks[0]), everybody if rank == ranks[0] else None, everybody]


def state(rank: int) -> dict[str, float]:
    """As `described` shows `weights`."""
    return {"w": float(rank), "v": float(rank), "b": float(rank)}
