"""What the accepting side answers; and that simultaneous connects leave one link, in whatever order things happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.link.arbitrate import Answer, arbitrate
from aiorlinf.link.link import LinkState

__all__: list[str] = []

A, B = WorkerAddress("a:0"), WorkerAddress("b:0")
UP, CONNECTING, CLOSING, ENDED = LinkState.UP, LinkState.CONNECTING, LinkState.CLOSING, LinkState.ENDED


def judge(
    state: LinkState | None, *, local: str = A, life: int = 1, known: int = 0, dialling: bool = False, here: int = 0, there: int = 0
) -> Answer:
    """The answer of `local` to the other of the two."""
    remote = B if local == A else A
    return arbitrate(
        Identity(WorkerAddress(local), Incarnation(1)), Identity(remote, Incarnation(life)), state, known, dialling, here, there
    )


@pytest.mark.parametrize("state", [None, ENDED])
@pytest.mark.parametrize("local", [A, B])
def test_a_peer_without_a_link_is_welcome(state: LinkState | None, local: str) -> None:
    assert judge(state, local=local) is Answer.ACCEPT


def test_a_link_that_waits_takes_the_first_connection() -> None:
    assert judge(CONNECTING, local=A) is Answer.ACCEPT
    assert judge(CONNECTING, local=B) is Answer.ACCEPT


def test_of_two_connections_that_are_being_made_the_smaller_address_has_its_own() -> None:
    assert judge(CONNECTING, local=A, dialling=True) is Answer.YIELD
    assert judge(CONNECTING, local=B, dialling=True) is Answer.ACCEPT


@pytest.mark.parametrize("state", [UP, CLOSING])
def test_a_peer_that_has_lost_its_link_replaces_it(state: LinkState) -> None:
    assert judge(state, known=1, here=1, there=1) is Answer.REPLACE
    assert judge(state, known=1, here=2, there=3) is Answer.REPLACE


def test_a_connection_older_than_the_link_does_not_replace_it() -> None:
    assert judge(UP, known=1, here=1, there=0) is Answer.YIELD


def test_a_new_life_replaces_the_link_of_the_old_one() -> None:
    assert judge(UP, life=2, known=1, here=3, there=0) is Answer.REPLACE


@pytest.mark.parametrize("state", [None, ENDED, CONNECTING, UP, CLOSING])
def test_an_old_life_has_nothing_to_say(state: LinkState | None) -> None:
    assert judge(state, life=1, known=2) is Answer.STALE


# ---- all orders of events

ADDRESSES = (A, B)


class End(NamedTuple):
    """One worker, as far as connecting goes. `told`: the accept of its own connection is here, its coroutine has not gone on yet."""

    up: int = 0  # number of the connection that its link uses
    dialling: int = 0
    told: bool = False
    links: int = 0
    tries: int = 2


class Wire(NamedTuple):
    """A connection: who made it, and what is under way on it in each direction."""

    maker: int
    there: tuple[str, ...]
    back: tuple[str, ...]


class World(NamedTuple):
    ends: tuple[End, End]
    wires: tuple[Wire, ...]


class LinkLost(AssertionError):
    """A link that was up has ended, though nobody died."""


def _with(world: World, side: int, end: End, **wires: tuple[int, Wire]) -> World:
    ends = (end, world.ends[1]) if side == 0 else (world.ends[0], end)
    changed = list(world.wires)
    for number, wire in wires.values():
        changed[number - 1] = wire
    return World(ends, tuple(changed))


def _abort(world: World, side: int, number: int) -> World:
    wire = world.wires[number - 1]
    wire = wire._replace(there=(*wire.there, "abort")) if wire.maker == side else wire._replace(back=(*wire.back, "abort"))
    return _with(world, side, world.ends[side], wire=(number, wire))


def _dial(world: World, side: int) -> World:
    end = world.ends[side]
    number = len(world.wires) + 1
    wires = (*world.wires, Wire(side, (f"hello {end.links}",), ()))
    return _with(World(world.ends, wires), side, end._replace(dialling=number, tries=end.tries - 1))


def _hello(world: World, side: int, number: int, links_there: int) -> World:
    """As `LinkTable._judge` and `_proved`."""
    end = world.ends[side]
    state = UP if end.up else CONNECTING
    known = 1 if end.links else 0
    answer = judge(state, local=ADDRESSES[side], known=known, dialling=bool(end.dialling), here=end.links, there=links_there)
    wire = world.wires[number - 1]
    if answer is Answer.YIELD:
        return _with(world, side, end, wire=(number, wire._replace(back=(*wire.back, "yield"))))
    if end.up:
        raise LinkLost
    world = _with(world, side, end._replace(up=number, dialling=0, told=False, links=end.links + 1))
    world = _with(world, side, world.ends[side], wire=(number, wire._replace(back=(*wire.back, "accept"))))
    return _abort(world, side, end.dialling) if end.dialling else world


def _goes_on(world: World, side: int) -> World:
    """As the end of `LinkTable._dial`."""
    end = world.ends[side]
    if end.up:
        return _abort(_with(world, side, end._replace(dialling=0, told=False)), side, end.dialling)
    return _with(world, side, end._replace(up=end.dialling, dialling=0, told=False, links=end.links + 1))


def _comes(world: World, side: int, number: int, word: str) -> World:
    end = world.ends[side]
    if word.startswith("hello"):
        return _hello(world, side, number, int(word[6:]))
    if word == "abort":
        if end.up == number:
            raise LinkLost
        return _with(world, side, end._replace(dialling=0)) if end.dialling == number else world
    if end.dialling != number:
        return world  # given up meanwhile
    return _with(world, side, end._replace(told=True) if word == "accept" else end._replace(dialling=0))


def _next(world: World) -> Iterator[World]:
    """Every world that one event leads to."""
    for side, end in enumerate(world.ends):
        if not end.up and not end.dialling and end.tries:
            yield _dial(world, side)
        if end.told:
            yield _goes_on(world, side)
    for index, wire in enumerate(world.wires):
        for maker_reads in (False, True):
            words = wire.back if maker_reads else wire.there
            if words:
                rest = wire._replace(back=words[1:]) if maker_reads else wire._replace(there=words[1:])
                side = wire.maker if maker_reads else 1 - wire.maker
                taken = _with(world, side, world.ends[side], wire=(index + 1, rest))
                yield _comes(taken, side, index + 1, words[0])


def test_simultaneous_connects_leave_one_link_in_every_order_of_events() -> None:
    begin = World((End(), End()), ())
    seen = {begin}
    stack = [begin]
    ends = 0
    while stack:
        world = stack.pop()
        following = list(_next(world))
        if not following:
            ends += 1
            one, two = world.ends
            assert one.up == two.up, world
            assert one.up or not (one.tries or two.tries), world
        for new in following:
            if new not in seen:
                seen.add(new)
                stack.append(new)
    assert ends > 1
    assert len(seen) > 50
