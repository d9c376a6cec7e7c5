"""What members tell each other: there and back, and whatever else may come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.notes import ALL, ROOT, Cause, Key, Note, Step
from aiorlinf.collective.route import Route, routes_of, routes_to_list
from aiorlinf.errors import AiorlinfError, DeadlineExceeded, PeerLeft, PeerLost, PeerRestarted, RemoteError, UsageError, WireError
from aiorlinf.plans.broadcast import Place, plan_broadcast

ADDRESSES = st.integers(0, 50).map(lambda rank: WorkerAddress(f"w:{rank}"))
KEYS = st.builds(Key, st.sampled_from([ROOT, ALL]), ADDRESSES, ADDRESSES, st.integers(0, 2**40))
FACTS = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers(0, 2**50) | st.text(max_size=9))
NOTES = st.builds(
    Note,
    KEYS,
    st.sampled_from([Step.HEAD, Step.PART, Step.DONE, Step.TAKEN, Step.AGAIN, Step.FAIL]),
    st.dictionaries(ADDRESSES, st.integers(1, 9)),
    FACTS,
    st.binary(max_size=50),
)


@given(NOTES)
def test_a_note_arrives_as_it_was(note: Note) -> None:
    read = Note.decode(note.encode())
    assert (read.key, read.step, read.lives, read.facts, bytes(read.body)) == (note.key, note.step, note.lives, note.facts, note.body)


@given(NOTES, st.data())
def test_a_note_that_is_not_one_is_an_error_of_the_wire(note: Note, data: st.DataObject) -> None:
    whole = bytearray(note.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    odd: list[Any] = [bytes(whole), bytes(whole[: data.draw(st.integers(0, len(whole)))]), data.draw(st.binary()), None, 5, ["x"]]
    for each in odd:
        try:
            Note.decode(each)
        except (WireError, UsageError):
            pass


def test_facts_are_checked() -> None:
    note = Note(Key(ROOT, "w:0", "w:1", 0), Step.HEAD, {}, {"total": -1, "text": 5, "flag": True})
    for name in ("total", "flag", "missing"):
        with pytest.raises(WireError, match=name):
            note.number(name)
    with pytest.raises(WireError, match="text=5"):
        note.text("text")


@given(st.integers(1, 40), st.data(), st.booleans())
def test_a_route_arrives_as_it_was_planned(size: int, data: st.DataObject, bulk: bool) -> None:
    places = [Place(str(data.draw(st.integers(0, 6)))) for _ in range(size)]
    members = [(WorkerAddress(f"w:{rank}"), rank + 1, 2 * rank) for rank in range(size)]
    plan = plan_broadcast(places, data.draw(st.integers(0, size - 1)), bulk=bulk)
    routes = Route.plan(plan, members)
    assert routes_of(routes_to_list(routes)) == routes
    assert sorted([plan.member, *(route.life - 1 for route in _all(routes))]) == list(range(size))
    for edge in plan.edges():
        if edge.source != plan.member:
            (source,) = [route for route in _all(routes) if route.address == f"w:{edge.source}"]
            assert f"w:{edge.target}" in [route.address for route in source.below]


def test_a_long_chain_is_no_problem() -> None:
    members = [(WorkerAddress(f"w:{rank}"), 1, 0) for rank in range(3000)]
    routes = Route.plan(plan_broadcast([Place(str(rank)) for rank in range(3000)], 0, bulk=True), members)
    assert len(_all(routes_of(routes_to_list(routes)))) == 2999


def _all(routes: tuple[Route, ...]) -> list[Route]:
    found = list(routes)
    for route in found:
        found.extend(route.below)
    return found


@pytest.mark.parametrize(
    "told", [None, {}, [1], [[0, "w:0", 1, 0]], [[-2, "w:0", 1, 0]], [[-1, "w:0", 1]], [[-1, "nobody", 1, 0]], [[-1, "w:0", "1", 0]]]
)
def test_a_way_that_leads_nowhere(told: Any) -> None:
    with pytest.raises((WireError, UsageError)):
        routes_of(told)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PeerLost("it died", remote="w:5"), PeerLost, "it died"),
        (PeerLeft("it left", remote="w:5"), PeerLeft, "it left"),
        (PeerRestarted("it is new", remote="w:5"), PeerRestarted, "it is new"),
        (RemoteError("w:5 failed with KeyError: x", remote="w:5", remote_type="KeyError"), RemoteError, "KeyError"),
    ],
)
def test_the_cause_stays_that_of_the_one_whose_failure_it_is(error: AiorlinfError, kind: type[AiorlinfError], text: str) -> None:
    cause = Cause.of(error, "w:1")
    told = Cause.from_note(Note.decode(Note(Key(ROOT, "w:0", "w:1", 3), Step.FAIL, {}, cause.facts()).encode()))
    again = told.error("gather", "w:2")
    assert type(again) is kind
    assert again.remote == "w:5"
    assert again.operation == "gather"
    assert text in str(again)


def test_the_cause_of_an_error_of_ones_own() -> None:
    remote = Cause.of(DeadlineExceeded("too late"), "w:1").error("broadcast", "w:2")
    assert isinstance(remote, RemoteError)
    assert (remote.remote, remote.remote_type, remote.message) == ("w:1", "DeadlineExceeded", "w:1 failed with DeadlineExceeded: too late")
    assert Cause.of(ValueError("x"), "w:1", "Traceback ...").error("broadcast", "w:2").remote_traceback == "Traceback ..."  # type: ignore[attr-defined]
