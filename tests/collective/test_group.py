"""Groups: who is meant, and whose messages are whose."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf import CollectiveGroup, Worker, init
from aiorlinf.address import WorkerAddress
from aiorlinf.collective.group import circle_context, context_of
from aiorlinf.errors import UsageError
from aiorlinf.link.pending import CALLS_BIT

__all__: list[str] = []

A, B, C = (WorkerAddress(text) for text in ("a:0", "b:0", "c:0"))


def test_the_unnamed_group_of_two_is_what_workers_use_without_a_group() -> None:
    assert context_of([A, B], None) == 0


def test_a_context_does_not_depend_on_the_order_of_the_members() -> None:
    assert len({context_of(list(members), None) for members in itertools.permutations([A, B, C])}) == 1
    assert context_of([A, B], "x") == context_of([B, A], "x")


@given(st.text(min_size=1, max_size=20))
def test_a_context_fits_its_place_in_the_stream_key(name: str) -> None:
    assert 0 < context_of([A, B], name) < CALLS_BIT <= circle_context([A, B], name) < 1 << 32


def test_names_and_members_make_different_contexts() -> None:
    contexts = [
        context_of([A, B], None),
        context_of([A, B], "x"),
        context_of([A, B], "y"),
        context_of([A, C], "x"),
        context_of([A, B, C], None),
        context_of([A, B, C], "x"),
    ]
    assert len(set(contexts)) == len(contexts)


class NoExchange:
    """Enough to make a group of."""

    local = A


def group_of(*members: WorkerAddress, name: str | None = None) -> CollectiveGroup:
    exchange: Any = NoExchange()
    return CollectiveGroup(exchange, members, name, context_of(members, name))


def test_who_is_meant() -> None:
    two, three = group_of(B, A), group_of(B, C, A)
    assert (two.rank, three.rank) == (1, 2)
    assert two._peer(None, "dst") == B
    assert three._peer(0, "dst") == B
    assert three._peer("c:0", "dst") == C
    assert two._peer(1, "dst") == A, "oneself is a member, too"


@pytest.mark.parametrize("which", [3, -1, "d:0", "c", 1.0, True, b"c:0"])
def test_who_is_nobody(which: Any) -> None:
    with pytest.raises(UsageError, match="is no member of the group") as caught:
        group_of(A, B, C)._peer(which, "src")
    assert "a:0, b:0, c:0" in str(caught.value)


def test_a_larger_group_has_to_be_told() -> None:
    with pytest.raises(UsageError, match="a group of 3 needs dst="):
        group_of(A, B, C)._peer(None, "dst")


def test_a_group_shows_what_it_is() -> None:
    assert repr(group_of(A, B)) == "<CollectiveGroup of a:0, b:0; rank 0>"
    assert repr(group_of(A, B, name="x")) == "<CollectiveGroup 'x' of a:0, b:0; rank 0>"


# ---- with workers


def groups(workers: list[Worker], name: str | None = None) -> list[CollectiveGroup]:
    """The group of all of them, at each."""
    members = [worker.address for worker in workers]
    return [worker.collective.create_collective_group(members, name) for worker in workers]


@pytest.mark.asyncio
async def test_groups_of_the_same_workers_do_not_hear_each_other() -> None:
    async with init("a:0") as a, init("b:0") as b:
        plain, named, other = groups([a, b]), groups([a, b], "x"), groups([a, b], "y")
        for group, obj in ((other, "y"), (plain, "plain"), (named, "x")):
            await group[0].send(obj)
        await a.send("by address", "b:0")
        assert await named[1].recv() == "x"
        assert await plain[1].recv() == "plain"
        assert await b.recv("a:0") == "by address"
        assert await other[1].recv() == "y"


@pytest.mark.asyncio
async def test_everybody_to_everybody_by_rank_and_by_address() -> None:
    async with init("a:0") as a, init("b:0") as b, init("c:0") as c:
        members = groups([a, b, c])
        works = [
            group.send((group.rank, other), other if other % 2 else group.members[other])
            for group in members
            for other in range(3)
            if other != group.rank
        ]
        for group in members:
            for other in range(3):
                if other != group.rank:
                    assert await group.recv(group.members[other] if other % 2 else other, timeout=20) == (other, group.rank)
        await asyncio.gather(*works)
        assert [stats.remote for stats in members[0].stats()] == ["b:0", "c:0"]
        assert all(stats.messages_sent == 2 or stats.messages_sent == 1 for stats in members[0].stats())


@pytest.mark.asyncio
async def test_tensors_in_a_named_group() -> None:
    async with init("a:0") as a, init("b:0") as b:
        one, two = groups([a, b], "weights")
        sent = one.send_tensor(torch.arange(5), tag=3)
        out = torch.zeros(5, dtype=torch.int64)
        assert await two.recv_tensor(out, tag=3, timeout=20) is out
        assert torch.equal(out, torch.arange(5))
        await sent


@pytest.mark.asyncio
async def test_a_member_may_send_to_itself() -> None:
    async with init("a:0") as a:
        group = a.collective.create_collective_group(["b:0", "a:0"])
        sent = group.send("to me", 1)
        assert await group.recv(1, timeout=20) == "to me"
        await sent
