"""Questions to workers through the manager: an answer reaches who asked, and nobody is left behind."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.directory import Directory
from aiorlinf.manager.inspections import MAX_INSPECTIONS, Asked, Inspections
from aiorlinf.manager.instructions import Refuse, Reply, SessionId, Tell
from aiorlinf.manager.requests import Inspect, Register, Told, parse_request

__all__: list[str] = []

SESSIONS = [SessionId(number) for number in range(4)]


class Machine(RuleBasedStateMachine):
    """Against a plain list of who waits for whom."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Inspections()
        self.asked: dict[int, Asked] = {}

    @rule(asker=st.sampled_from(SESSIONS), request=st.integers(1, 3), whom=st.sampled_from(SESSIONS))
    def ask(self, asker: SessionId, request: int, whom: SessionId) -> None:
        number = self.made.ask(asker, request, whom)
        if any((each.asker, each.request) == (asker, request) for each in self.asked.values()):
            assert number is None
        else:
            assert number is not None
            assert number not in self.asked
            self.asked[number] = Asked(asker, request, whom)

    @rule(session=st.sampled_from(SESSIONS), number=st.integers(1, 30))
    def answer(self, session: SessionId, number: int) -> None:
        known = self.asked.get(number)
        expected = self.asked.pop(number) if known is not None and known.target == session else None
        assert self.made.answered(session, number) == expected

    @rule(asker=st.sampled_from(SESSIONS), request=st.integers(1, 3))
    def forget(self, asker: SessionId, request: int) -> None:
        self.made.forget(asker, request)
        self.asked = {number: each for number, each in self.asked.items() if (each.asker, each.request) != (asker, request)}

    @rule(session=st.sampled_from(SESSIONS))
    def drop(self, session: SessionId) -> None:
        left = [each for _, each in sorted(self.asked.items()) if each.target == session and each.asker != session]
        assert self.made.drop(session) == left
        self.asked = {number: each for number, each in self.asked.items() if session not in (each.asker, each.target)}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert len(self.made) == len(self.asked)
        assert set().union(*self.made._of.values()) == set(self.asked)


TestMachine = Machine.TestCase


def test_one_connection_has_not_more_under_way_than_is_reasonable() -> None:
    made = Inspections()
    for request in range(MAX_INSPECTIONS):
        assert made.ask(SESSIONS[0], request, SESSIONS[1]) is not None
    assert made.ask(SESSIONS[0], MAX_INSPECTIONS, SESSIONS[1]) is None
    assert made.ask(SESSIONS[2], 1, SESSIONS[1]) is not None, "others are not concerned"


def test_the_directory_passes_question_and_answer_on() -> None:
    directory = Directory(job="j", config={})
    tool, worker = SESSIONS[:2]
    directory.join(tool, "127.0.0.1")
    directory.join(worker, "127.0.0.1")
    directory.register(worker, Register(1, WorkerAddress("a:0"), None, 7000, (), {}, "h", 42))
    living = Identity(WorkerAddress("a:0"), Incarnation(1))
    (told,) = directory.inspect(tool, Inspect(5, living))
    assert isinstance(told, Tell)
    assert told.session == worker
    number = told.event["number"]
    assert directory.told(tool, Told(number, {})) == [], "another one than who was asked says nothing"
    assert directory.told(worker, Told(number, {"x": 1})) == [Reply(tool, 5, {"report": {"x": 1}})]
    assert directory.told(worker, Told(number, {"x": 1})) == [], "only once"
    for unknown in (Identity(WorkerAddress("a:0"), Incarnation(2)), Identity(WorkerAddress("b:0"), Incarnation(1))):
        (refused,) = directory.inspect(tool, Inspect(6, unknown))
        assert isinstance(refused, Refuse)
    directory.inspect(tool, Inspect(7, living))
    (refused,) = directory.drop(worker, "it is gone")
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, RendezvousError)
    assert (refused.session, refused.request) == (tool, 7)
    (refused,) = directory.inspect(tool, Inspect(8, living))
    assert isinstance(refused, Refuse)
    assert "has lost its connection" in refused.error.message


def test_requests_are_checked() -> None:
    assert parse_request({"op": "inspect", "id": 1, "address": "a:0", "incarnation": 2}) == Inspect(
        1, Identity(WorkerAddress("a:0"), Incarnation(2))
    )
    assert parse_request({"op": "tell", "number": 3, "report": {"y": 1}}) == Told(3, {"y": 1})
