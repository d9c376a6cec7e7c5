"""The manager's memory, without any I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import RendezvousError, UsageError
from aiorlinf.manager import directory as directory_module
from aiorlinf.manager.directory import Directory
from aiorlinf.manager.instructions import Cut, Instruction, Probe, Refuse, Reply, SessionId, Tell, Wait
from aiorlinf.manager.requests import Expect, ListWorkers, Lookup, Register, Unregister
from aiorlinf.manager.roster import Patience

A, B, C = SessionId(1), SessionId(2), SessionId(3)
SILENT, BROKEN, CLOSED = 12, 6, 2


def ticks(directory: Directory, count: int) -> list[Instruction]:
    """What comes of so many ticks."""
    out: list[Instruction] = []
    for _ in range(count):
        out += directory.tick()
        directory.check()
    return out


def make(*sessions: SessionId, expected: Iterable[str] | None = None) -> Directory:
    made = Directory(job="j", config={"cluster": {}}, expected=expected, patience=Patience(SILENT, BROKEN, CLOSED))
    for session in sessions:
        made.join(session, "127.0.0.1")
    return made


def register(address: str, number: int = 1, host: str | None = None, **changes: Any) -> Register:
    made = Register(number, WorkerAddress(address), host, 7000, ("cpu",), {"host": "node"}, "h", 42)
    return replace(made, **changes)


def lookup(address: str, number: int = 9, timeout: float | None = 5.0) -> Lookup:
    return Lookup(number, WorkerAddress(address), timeout)


def only(instructions: list[Instruction]) -> Instruction:
    (instruction,) = instructions
    return instruction


def refusal(instructions: list[Instruction]) -> RendezvousError | UsageError:
    instruction = only(instructions)
    assert isinstance(instruction, Refuse)
    assert isinstance(instruction.error, (RendezvousError, UsageError))
    return instruction.error


def test_a_registration_is_answered_with_what_a_worker_needs() -> None:
    made = make(A, expected=["b:0", "a:0"])
    assert made.register(A, register("a:0")) == [
        Reply(
            A,
            1,
            {
                "address": "a:0",
                "incarnation": 1,
                "host": "127.0.0.1",
                "config": {"cluster": {}},
                "job": "j",
                "expected": ["a:0", "b:0"],
                "began": ["a:0", "b:0"],
            },
        )
    ]
    assert made.living == (Identity(WorkerAddress("a:0"), Incarnation(1)),)
    assert made.name(A) == "a:0"
    assert made.name(B) is None


def test_a_lookup_of_a_living_worker_is_answered_at_once() -> None:
    made = make(A, B)
    made.register(A, register("a:0", host="10.0.0.5"))
    answer = only(made.lookup(B, lookup("a:0")))
    assert isinstance(answer, Reply)
    assert answer.body["worker"]["host"] == "10.0.0.5"
    assert answer.body["worker"]["incarnation"] == 1


def test_a_lookup_waits_and_is_answered_in_the_order_of_asking() -> None:
    made = make(A, B, C)
    assert made.lookup(B, lookup("a:0", timeout=3.0)) == [Wait(B, 9, 3.0)]
    assert made.lookup(C, lookup("a:0", timeout=None)) == [Wait(C, 9, None)]
    out = made.register(A, register("a:0"))
    assert [type(item).__name__ for item in out] == ["Reply", "Tell", "Tell", "Reply", "Reply"]
    assert [item.session for item in out[3:]] == [B, C]
    made.check()


def test_a_lookup_that_is_forgotten_is_not_answered() -> None:
    made = make(A, B)
    made.lookup(B, lookup("a:0"))
    made.forget(B, 9)
    made.forget(B, 9)
    assert not any(isinstance(item, Reply) and item.session == B for item in made.register(A, register("a:0")))
    made.check()


def test_an_expired_lookup_names_who_waited_for_whom_and_who_is_there() -> None:
    made = make(A, B, expected=["a:0", "a:1", "b:0"])
    made.register(B, register("b:0"))
    made.lookup(B, lookup("a:0"))
    error = refusal(made.expire(B, 9, 5.0))
    assert error.message == "b:0 waited for a:0, which never registered; registered: b:0; expected and missing: a:0, a:1"
    assert (error.local, error.remote, error.elapsed) == ("b:0", "a:0", 5.0)
    assert made.expire(B, 9, 5.0) == made.expire(C, 9, 5.0) == []
    made.check()


def test_an_expired_lookup_tells_how_the_last_life_ended() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    made.drop(A, "its connection broke")
    assert only(made.lookup(B, lookup("a:0"))) == Wait(B, 9, 5.0)
    error = refusal(made.expire(B, 9, 5.0))
    assert error.message == "a client waited for a:0, whose life 1 has lost its connection (its connection broke); registered: nobody"
    ticks(made, CLOSED)
    made.lookup(B, lookup("a:0"))
    error = refusal(made.expire(B, 9, 5.0))
    assert error.message == "a client waited for a:0, whose life 1 is over (lost: its connection broke); registered: nobody"


def test_long_lists_are_cut_in_messages() -> None:
    made = make(A, *map(SessionId, range(10, 60)))
    for number in range(50):
        made.register(SessionId(10 + number), register(f"w:{number}"))
    made.lookup(A, lookup("x:0"))
    assert "w:19 and 30 more" in refusal(made.expire(A, 9, 1.0)).message


def test_unknown_to_a_closed_job_fails_at_once() -> None:
    made = make(A, B, expected=["a:0", "b:0"])
    made.register(A, register("a:0"))
    error = refusal(made.lookup(A, lookup("c:0")))
    assert isinstance(error, RendezvousError)
    assert error.message == "there is no worker c:0 in this job, which has a:0, b:0"
    made.expect(Expect((WorkerAddress("c:0"),)))
    assert isinstance(only(made.lookup(A, lookup("c:0"))), Wait)
    made.register(B, register("d:0"))  # who is not expected may come all the same, and is known from then on
    made.unregister(B, Unregister(2))
    assert isinstance(only(made.lookup(A, lookup("d:0", 10))), Wait)


def test_a_new_life_has_the_next_number() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    made.drop(A, "gone")
    answer = made.register(B, register("a:0"))[0]
    assert isinstance(answer, Reply)
    assert answer.body["incarnation"] == 2
    made.check()


def test_a_taken_address_is_probed_and_then_refused_with_the_holder() -> None:
    made = make(A, B)
    made.register(A, register("a:0", pid=4242))
    request = register("a:0", 5)
    assert made.register(B, request) == [Probe(B, request, A)]
    error = refusal(made.register(B, request, holder="alive"))
    assert error.message == "a:0 is registered already, by process 4242 at 127.0.0.1:7000 on node, which is alive"
    assert "address of its own" in str(error.hint)
    made.drop(A, "it was dead after all")
    assert isinstance(made.register(B, request, holder="alive")[0], Reply)
    made.check()


def test_who_wants_the_address_of_a_silent_worker_gets_it_when_that_is_lost() -> None:
    made = make(A, B, C)
    made.register(A, register("a:0"))
    assert made.register(B, register("a:0", 5), holder="silent") == []
    assert made.register(C, register("a:0", 6), holder="silent") == []
    made.drop(C, "it gave up")
    out = ticks(made, SILENT)
    assert out[:2] == [
        Tell(A, {"event": "dead", "detail": "nothing was heard of it for too long"}),
        Cut(A, "a:0#1 was declared dead: nothing was heard of it for too long"),
    ]
    answer = out[2]
    assert isinstance(answer, Reply)
    assert (answer.session, answer.request, answer.body["incarnation"]) == (B, 5, 2)
    made.check()


def test_who_wants_the_address_of_a_silent_worker_is_refused_when_that_says_a_word() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    made.register(B, register("a:0", 5), holder="silent")
    assert "which is alive" in refusal(made.heard(A)).message
    assert made.heard(A) == []
    assert ticks(made, SILENT - 1) == []


def test_who_wants_the_address_of_a_silent_worker_gets_it_when_its_connection_is_gone() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    made.register(B, register("a:0", 5), holder="silent")
    answer = only(made.drop(A, "gone"))
    assert isinstance(answer, Reply)
    assert answer.body["incarnation"] == 2
    made.check()


def test_a_connection_registers_once() -> None:
    made = make(A)
    made.register(A, register("a:0"))
    assert "already registered a:0#1" in refusal(made.register(A, register("b:0"))).message
    made.unregister(A, Unregister(2))
    assert isinstance(made.register(A, register("b:0"))[0], Reply)
    made.check()


def test_leaving_twice_is_harmless() -> None:
    made = make(A)
    made.register(A, register("a:0"))
    assert made.unregister(A, Unregister(2)) == [Reply(A, 2, {})]
    assert made.unregister(A, Unregister(3)) == [Reply(A, 3, {})]
    assert made.drop(A, "x") == made.drop(A, "x") == []


def test_a_wildcard_is_no_address_to_tell_peers() -> None:
    made = make(A)
    assert "cannot be reached at 0.0.0.0" in refusal(made.register(A, register("a:0", host="0.0.0.0"))).message


# ----------------------------------------------------------------------------------------------------------------- news


def test_both_ends_of_a_link_hear_of_the_others_death() -> None:
    made = make(A, B, C)
    for session, address in ((A, "a:0"), (B, "b:0"), (C, "c:0")):
        made.register(session, register(address))
    made.lookup(A, lookup("b:0"))
    event = {"event": "gone", "address": "b:0", "incarnation": 1, "reason": "lost", "detail": "why", "silent": False}
    assert made.drop(B, "why") == []
    assert ticks(made, CLOSED) == [Tell(A, event)]
    made.join(B, "127.0.0.1")
    joined = made.register(B, register("b:0"))
    assert joined[1:] == [Tell(A, {"event": "joined", "address": "b:0", "incarnation": 2})]
    made.lookup(B, lookup("a:0"))
    left = made.unregister(A, Unregister(4))
    assert left[0] == Tell(B, {**event, "address": "a:0", "reason": "left", "detail": "it closed"})
    made.check()


def test_a_worker_may_look_itself_up_and_hears_nothing_of_itself() -> None:
    made = make(A)
    made.register(A, register("a:0"))
    assert isinstance(only(made.lookup(A, lookup("a:0"))), Reply)
    assert made.drop(A, "x") == []


# ------------------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(("host", "seen"), [(None, "127.0.0.1"), ("localhost", "10.0.0.9"), (None, "::1")])
def test_loopback_is_not_handed_to_another_host(host: str | None, seen: str) -> None:
    made = Directory(job="j", config={})
    made.join(A, seen)
    made.join(B, "10.0.0.7")
    made.register(A, register("a:0", host=host))
    made.register(B, register("b:0"))
    error = refusal(made.lookup(B, lookup("a:0")))
    assert isinstance(error, RendezvousError)
    assert "leads nowhere from 10.0.0.7" in error.message
    assert "cluster.network.advertise_host" in str(error)
    answer = only(made.lookup(A, lookup("b:0")))
    assert isinstance(answer, Reply)
    assert answer.body["worker"]["host"] == "10.0.0.7"


def test_a_waiting_lookup_gets_the_same_refusal() -> None:
    made = make(A)
    made.join(B, "10.0.0.7")
    made.lookup(B, lookup("a:0"))
    assert isinstance(made.register(A, register("a:0"))[-1], Refuse)
    made.check()


# --------------------------------------------------------------------------------------------------------------- bounds


def test_too_many_waiting_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_WAITING", 2)
    made = make(A)
    made.lookup(A, lookup("a:0", 1))
    made.lookup(A, lookup("a:1", 2))
    assert "2 look-ups of this connection wait already" in refusal(made.lookup(A, lookup("a:2", 3))).message
    assert "under way already" in refusal(made.lookup(A, lookup("a:2", 2))).message


def test_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "PAGE", 2)
    made = make(*map(SessionId, range(3)))
    for number, address in enumerate(["w:10", "w:9", "a:0"]):
        made.register(SessionId(number), register(address))
    first = only(made.workers(SessionId(0), ListWorkers(1, None)))
    assert isinstance(first, Reply)
    assert [worker["address"] for worker in first.body["workers"]] == ["a:0", "w:9"]
    assert first.body["more"] is True
    rest = only(made.workers(SessionId(0), ListWorkers(1, WorkerAddress("w:9"))))
    assert isinstance(rest, Reply)
    assert [worker["address"] for worker in rest.body["workers"]] == ["w:10"]
    assert rest.body["more"] is False


# ------------------------------------------------------------------------------------------------------------ any order

SESSIONS = st.integers(0, 4).map(SessionId)
ADDRESSES = st.sampled_from(["a:0", "a:1", "b:0"])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: the invariants hold, lives count up, each look-up is answered at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(job="j", config={})
        self.directory._watchers.FEW = 1
        self.there: set[SessionId] = set()
        self.numbers = 0
        self.open: set[tuple[SessionId, int]] = set()  # look-ups without an answer
        self.lives: dict[str, int] = {}

    def obey(self, instructions: list[Instruction], *, asked: tuple[SessionId, int] | None = None) -> None:
        for item in instructions:
            assert item.session in self.there or isinstance(item, Tell)
            if isinstance(item, (Reply, Refuse)) and (item.session, item.request) != asked:
                self.open.remove((item.session, item.request))
            if isinstance(item, Tell):
                assert item.session in self.there

    @rule(session=SESSIONS, host=st.sampled_from(["127.0.0.1", "10.0.0.1"]))
    def join(self, session: SessionId, host: str) -> None:
        if session not in self.there:
            self.there.add(session)
            self.directory.join(session, host)

    @rule(session=SESSIONS)
    def drop(self, session: SessionId) -> None:
        self.there.discard(session)
        self.open = {entry for entry in self.open if entry[0] != session}
        self.obey(self.directory.drop(session, "test"))

    @precondition(lambda self: self.there)
    @rule(data=st.data(), address=ADDRESSES)
    def register(self, data: st.DataObject, address: str) -> None:
        session = data.draw(st.sampled_from(sorted(self.there)))
        self.numbers += 1
        out = self.directory.register(session, register(address, self.numbers), holder="alive")
        (first,) = [item for item in out if isinstance(item, (Reply, Refuse)) and (item.session, item.request) == (session, self.numbers)]
        if isinstance(first, Reply):
            self.lives[address] = self.lives.get(address, 0) + 1
            assert first.body["incarnation"] == self.lives[address]
        self.obey(out, asked=(session, self.numbers))

    @rule(count=st.integers(1, SILENT))
    def pass_time(self, count: int) -> None:
        for _ in range(count):
            self.obey(self.directory.tick())

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        self.obey(self.directory.heard(data.draw(st.sampled_from(sorted(self.there)))))

    @precondition(lambda self: self.there)
    @rule(data=st.data(), address=ADDRESSES)
    def go_on(self, data: st.DataObject, address: str) -> None:
        session = data.draw(st.sampled_from(sorted(self.there)))
        if self.directory.name(session) is not None or not self.lives.get(address):
            return
        life = data.draw(st.integers(1, self.lives[address]))
        lived = Identity(WorkerAddress(address), Incarnation(life)) in self.directory.living
        self.numbers += 1
        out = self.directory.register(session, register(address, self.numbers, life=Incarnation(life)))
        answers = [item for item in out if isinstance(item, (Reply, Refuse)) and (item.session, item.request) == (session, self.numbers)]
        assert [type(item) for item in answers] == [Reply if lived else Refuse], "a life that is over stays over"
        self.obey(out, asked=(session, self.numbers))

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.there)))
        self.numbers += 1
        self.obey(self.directory.unregister(session, Unregister(self.numbers)), asked=(session, self.numbers))

    @precondition(lambda self: self.there)
    @rule(data=st.data(), address=ADDRESSES)
    def lookup(self, data: st.DataObject, address: str) -> None:
        session = data.draw(st.sampled_from(sorted(self.there)))
        self.numbers += 1
        (answer,) = self.directory.lookup(session, lookup(address, self.numbers))
        if isinstance(answer, Wait):
            self.open.add((session, self.numbers))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), forget=st.booleans())
    def end_lookup(self, data: st.DataObject, forget: bool) -> None:
        session, number = data.draw(st.sampled_from(sorted(self.open)))
        if forget:
            self.directory.forget(session, number)
            self.open.discard((session, number))
        else:
            self.obey(self.directory.expire(session, number, 1.0))
        assert (session, number) not in self.open

    @invariant()
    def consistent(self) -> None:
        self.directory.check()

    @invariant()
    def who_waits_hears_of_it(self) -> None:
        for session, _, question in self.directory.waiting:
            if isinstance(question.key, WorkerAddress):
                assert session in self.directory._watchers.of(question.key)


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_who_is_refused_because_of_a_worker_of_his_own_process_is_told() -> None:
    made = make(A, B)
    made.register(A, register("a:0", process="this one"))
    request = register("a:0", 5, process="this one")
    assert made.register(B, request) == [Probe(B, request, A)]
    error = refusal(made.register(B, request, holder="alive"))
    assert "that is this process" in str(error.hint)
    assert "close()" in str(error.hint)
    made.check()
