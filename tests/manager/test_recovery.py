"""A manager that was started anew, without any I/O: it comes to know what its workers know."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import DeclaredDead, WireError
from aiorlinf.manager import directory as directory_module
from aiorlinf.manager.directory import Directory
from aiorlinf.manager.instructions import Cut, Instruction, Refuse, Reply, SessionId, Tell, Wait
from aiorlinf.manager.lives import End, Known
from aiorlinf.manager.mirror import Mirror
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.requests import (
    AskJob,
    Find,
    Learn,
    ListWorkers,
    Lookup,
    Publish,
    Register,
    Remember,
    Subscribe,
    Unregister,
    Watch,
    Withdraw,
)
from aiorlinf.manager.roster import Patience
from aiorlinf.manager.waiting import Watchers

SILENT, BROKEN, CLOSED, RECOVERY = 12, 6, 2, 8
A, B, C, D = map(SessionId, range(1, 5))


def make(*sessions: SessionId, recovering: int = 0, config: dict[str, Any] | None = None) -> Directory:
    made = Directory(job="j", config=config, patience=Patience(SILENT, BROKEN, CLOSED), recovering=recovering)
    for session in sessions:
        made.join(session, "127.0.0.1")
    return made


def register(address: str, life: int = 0, number: int = 1) -> Register:
    return Register(number, WorkerAddress(address), None, 7000, ("cpu",), {}, "h", 42, life=Incarnation(life))


def who(address: str, life: int = 1) -> Identity:
    return Identity(WorkerAddress(address), Incarnation(life))


def ticks(directory: Directory, count: int) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(count):
        out += directory.tick()
        directory.check()
    return out


def lost(instructions: list[Instruction]) -> list[str]:
    """Whom the news calls lost."""
    return [item.event["address"] for item in instructions if isinstance(item, Tell) and item.event["event"] == "gone"]


def answers(instructions: list[Instruction]) -> list[tuple[SessionId, int]]:
    return [(item.session, item.body.get("incarnation", 0)) for item in instructions if isinstance(item, Reply)]


# ------------------------------------------------------------------------------------------------------- silence and return


def test_silence_is_death_and_a_word_in_time_is_life() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    made.subscribe(B, Subscribe(2))
    for _ in range(5):
        assert ticks(made, SILENT - 1) == []
        made.heard(A)
    out = ticks(made, SILENT)
    told = out[0]
    assert isinstance(told, Tell)
    assert (told.session, told.event["reason"], told.event["silent"]) == (B, "lost", True)
    assert out[1:] == [
        Tell(A, {"event": "dead", "detail": "nothing was heard of it for too long"}),
        Cut(A, "a:0#1 was declared dead: nothing was heard of it for too long"),
    ]
    (refused,) = made.register(A, register("a:0", life=1))
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, DeclaredDead)
    assert "a:0#1 was declared dead: nothing was heard of it" in str(refused.error)


@pytest.mark.parametrize(("broken", "patience"), [(False, CLOSED), (True, BROKEN)])
def test_a_connection_that_is_lost_is_no_death_at_once(broken: bool, patience: int) -> None:
    made = make(A, B, C)
    made.register(A, register("a:0"))
    made.subscribe(C, Subscribe(2))
    assert made.drop(A, "it broke", broken=broken) == []
    assert ticks(made, patience - 1) == []
    assert isinstance(made.lookup(C, Lookup(9, WorkerAddress("a:0"), 5.0))[0], Wait), "it may be dead"
    back = made.register(B, register("a:0", life=1))
    assert answers(back) == [(B, 1), (C, 0)], "the same life, and whoever asked for it is answered"
    assert lost(ticks(made, SILENT - 1)) == []
    made.drop(B, "it broke", broken=broken)
    out = ticks(made, patience)
    assert lost(out) == ["a:0"]
    assert isinstance(out[0], Tell)
    assert (out[0].event["detail"], out[0].event["silent"]) == ("it broke", False)


def test_a_second_connection_of_the_same_life_takes_the_place_of_the_first() -> None:
    made = make(A, B, C)
    made.register(A, register("a:0"))
    made.subscribe(C, Subscribe(2))
    out = made.register(B, register("a:0", life=1))
    assert out[0] == Cut(A, "a:0#1 has made a new connection")
    assert answers(out) == [(B, 1)]
    assert lost(out) == []
    assert made.drop(A, "cut") == []
    made.heard(B)
    assert lost(ticks(made, SILENT - 1)) == []
    made.check()


def test_an_address_that_is_taken_over_ends_the_life_that_had_it() -> None:
    made = make(A, B, C)
    made.register(A, register("a:0"))
    made.subscribe(C, Subscribe(2))
    made.drop(A, "it broke")
    out = made.register(B, register("a:0"))
    assert [item.event["event"] for item in out if isinstance(item, Tell)] == ["gone", "joined"]
    assert answers(out) == [(B, 2)]
    made.join(A, "127.0.0.1")
    (refused,) = made.register(A, register("a:0", life=1))
    assert isinstance(refused, Refuse)
    assert "#2 lives under its address" in str(refused.error)


def test_an_overdue_tick_is_only_one() -> None:
    """A manager that stood still hears of nobody meanwhile, and must not take that for their silence."""
    made = make(A)
    made.register(A, register("a:0"))
    assert ticks(made, 1) == []
    made.heard(A)
    assert made.living == (who("a:0"),)


# ----------------------------------------------------------------------------------------------------------------- recovery


def test_new_workers_wait_until_those_that_live_have_come_back() -> None:
    made = make(A, B, C, recovering=RECOVERY)
    assert made.register(A, register("a:0")) == []
    assert made.ask_job(A, AskJob(5)) == []
    assert answers(made.register(B, register("a:0", life=3))) == [(B, 3)]
    assert made.learn(Learn((Known(who("c:0", 7), End("lost", "x")),))) == []
    assert made.register(C, register("c:0")) == []
    made.remember(Remember({"cluster": {}}, None))
    made.remember(Remember({"cluster": {"other": 1}}, None))
    out = ticks(made, RECOVERY - 1)
    assert out == []
    assert (made.recovering, out := ticks(made, 1), made.recovering)[::2] == (True, False)
    assert made.config == {"cluster": {}}
    assert answers(out) == [(A, 0), (C, 8)], "the configuration, and a number above all that anybody knew"
    made.check()


def test_without_anybody_who_remembers_the_defaults_are_used() -> None:
    made = make(A, recovering=RECOVERY)
    ticks(made, RECOVERY)
    assert made.config == {}
    made.remember(Remember({"cluster": {}}, (WorkerAddress("a:0"),)))
    assert made.config == {}, "it is too late for that"


def test_a_closed_job_is_closed_again() -> None:
    made = make(A, B, recovering=RECOVERY)
    made.remember(Remember({}, (WorkerAddress("a:0"), WorkerAddress("b:0"))))
    made.remember(Remember({}, (WorkerAddress("a:0"), WorkerAddress("c:0"))))
    assert isinstance(made.lookup(A, Lookup(1, WorkerAddress("x:0"), 0.0))[0], Wait)
    assert made.expire(A, 1, 0.0) == [Wait(A, 1, 0.5, 0.0)]
    ticks(made, RECOVERY)
    (refused,) = made.expire(A, 1, 0.5)
    assert isinstance(refused, Refuse)
    (refused,) = made.lookup(A, Lookup(2, WorkerAddress("x:0"), 0.0))
    assert isinstance(refused, Refuse)
    assert "which has a:0, b:0, c:0" in str(refused.error)


def test_who_is_only_known_from_others_and_does_not_come_back_is_lost() -> None:
    made = make(A, recovering=RECOVERY)
    made.register(A, register("a:0", life=1))
    assert made.watch(A, Watch((who("b:0", 4),))) == []
    assert made.living == (who("a:0"), who("b:0", 4))
    assert isinstance(made.lookup(A, Lookup(9, WorkerAddress("b:0"), None))[0], Wait)
    seen: list[Instruction] = []
    for _ in range(SILENT):
        made.heard(A)
        seen += made.tick()
    (told,) = seen
    assert isinstance(told, Tell)
    assert told.session == A
    assert (told.event["address"], told.event["incarnation"], told.event["detail"]) == ("b:0", 4, "it did not come back to the manager")


def test_who_was_declared_lost_is_told_so_by_whatever_manager_there_is() -> None:
    made = make(A, B, recovering=RECOVERY)
    made.register(B, register("b:0", life=1))
    out = made.learn(Learn((Known(who("b:0"), End("lost", "it was frozen")),)))
    assert out == [Tell(B, {"event": "dead", "detail": "it was frozen"}), Cut(B, "b:0#1 was declared dead: it was frozen")]
    made.check()
    other = make(A, B, recovering=RECOVERY)
    other.learn(Learn((Known(who("b:0"), End("lost", "it was frozen")),)))
    (refused,) = other.register(B, register("b:0", life=1))
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, DeclaredDead)


def test_watching_somebody_who_is_gone_is_answered_at_once() -> None:
    made = make(A, B)
    made.register(B, register("b:0"))
    made.unregister(B, Unregister(2))
    (told,) = made.watch(A, Watch((who("b:0"),)))
    assert isinstance(told, Tell)
    assert (told.event["event"], told.event["reason"]) == ("gone", "left")


def test_a_later_life_that_others_know_of_ends_the_earlier_one() -> None:
    made = make(A, B)
    made.register(A, register("a:0"))
    out = made.learn(Learn((Known(who("a:0", 3), None),)))
    assert isinstance(out[-1], Cut)
    assert made.living == (who("a:0", 3),)
    assert answers(made.register(B, register("a:0", life=3))) == [(B, 3)]
    made.check()


def test_too_many_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_WATCHED", 1)
    made = make(A)
    with pytest.raises(WireError, match="more than 1 workers"):
        made.watch(A, Watch((who("b:0"), who("b:1"))))


def test_workers_that_are_gone_do_not_count_as_watched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_WATCHED", 3)
    made = make(A)
    for number in range(20):  # one after the other
        made.watch(A, Watch((who(f"c:{number}"),)))
        assert lost(made.learn(Learn((Known(who(f"c:{number}"), End("left", "it closed")),)))) == [f"c:{number}"]
        made.check()


def test_a_session_that_asks_without_end_is_not_remembered_for_all_of_it() -> None:
    made = make(A, B)
    made.register(B, register("b:0"))
    asked = [WorkerAddress(f"b:{number}") for number in range(20 * Watchers.FEW)]
    for number, address in enumerate(asked):
        made.lookup(A, Lookup(number, address, 5.0))
        if number >= 2:  # those of 0 and 1 wait on
            made.expire(A, number, 5.0)
    assert made._watchers.count(A) <= Watchers.FEW + 3
    made.check()
    assert [tell for tell in made.drop(B, "gone") + ticks(made, CLOSED) if isinstance(tell, Tell)] != []
    made.join(C, "127.0.0.1")  # what it waits for it hears of
    assert (A, 0) in answers(made.register(C, register("b:1")))
    assert [tell.session for tell in made.unregister(C, Unregister(2)) if isinstance(tell, Tell)] == [A]


# -------------------------------------------------------------------------------------------------------------- named things


def publish(name: str, number: int = 5, *, again: bool = False, value: str = "v") -> Publish:
    return Publish(number, "channel", name, {"key": value}, again)


def test_named_things_are_found_and_go_with_their_holder() -> None:
    made = make(A, B, C)
    made.register(A, register("a:0"))
    made.register(B, register("b:0"))
    assert made.find(C, Find(1, "channel", "traj", 5.0)) == [Wait(C, 1, 5.0)]
    out = made.publish(A, publish("traj"))
    assert out == [Reply(A, 5, {}), Reply(C, 1, {"owner": "a:0", "incarnation": 1, "value": {"key": "v"}})]
    made.check()
    made.publish(A, publish("traj", value="w"))
    (found,) = made.find(C, Find(2, "channel", "traj", 5.0))
    assert isinstance(found, Reply)
    assert found.body["value"] == {"key": "w"}
    assert made.find(C, Find(3, "group", "traj", 5.0)) == [Wait(C, 3, 5.0)], "of another kind"
    (refused,) = made.publish(B, publish("traj"))
    assert isinstance(refused, Refuse)
    assert "there is a channel 'traj' already, held by a:0#1" in str(refused.error)
    made.withdraw(B, Withdraw(6, "channel", "traj"))
    assert isinstance(made.find(C, Find(4, "channel", "traj", None))[0], Reply), "it is not b:0's to withdraw"
    made.drop(A, "gone")
    ticks(made, CLOSED)
    assert isinstance(made.find(C, Find(5, "channel", "traj", None))[0], Wait)
    made.publish(B, publish("traj"))
    made.withdraw(B, Withdraw(6, "channel", "traj"))
    assert isinstance(made.find(C, Find(6, "channel", "traj", None))[0], Wait)
    (refused,) = made.expire(C, 6, 1.0)
    assert isinstance(refused, Refuse)
    assert "a client waited for the channel 'traj', which nobody holds" in str(refused.error)


def test_a_holder_must_be_registered_and_modest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_NAMES", 1)
    made = make(A)
    (refused,) = made.publish(A, publish("traj"))
    assert isinstance(refused, Refuse)
    assert "only a registered worker" in str(refused.error)
    made.register(A, register("a:0"))
    assert isinstance(made.publish(A, publish("one"))[0], Reply)
    (refused,) = made.publish(A, publish("two"))
    assert isinstance(refused, Refuse)
    assert "a:0#1 holds 1 names already" in str(refused.error)


def test_what_was_held_before_is_held_again_before_anything_new() -> None:
    made = make(A, B, recovering=RECOVERY)
    made.register(B, register("b:0", life=1))
    assert made.publish(B, publish("traj")) == []
    made.register(A, register("a:0", life=1))
    assert answers(made.publish(A, publish("traj", again=True))) == [(A, 0)]
    (refused,) = [item for item in ticks(made, RECOVERY) if isinstance(item, Refuse)]
    assert refused.session == B
    assert "held by a:0#1" in str(refused.error)


# ------------------------------------------------------------------------------------------------- rebuilding, in any order

ADDRESSES = [WorkerAddress(f"w:{rank}") for rank in range(5)]


class Job:
    """A job under its first manager, with the mirror of each worker that lives."""

    def __init__(self) -> None:
        self.directory = make(config={})
        self.mirrors: dict[SessionId, Mirror] = {}
        self.registers: dict[SessionId, Register] = {}
        self._numbers = 0

    def obey(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            mirror = self.mirrors.get(item.session)
            if mirror is not None and isinstance(item, Tell) and item.event["event"] in ("joined", "gone"):
                mirror.take(item.event)
            if mirror is not None and isinstance(item, Reply) and "worker" in item.body:
                mirror.saw(WorkerRecord.from_dict(item.body["worker"]))

    def start(self, address: WorkerAddress) -> None:
        if any(register.address == address for register in self.registers.values()):
            return
        self._numbers += 1
        session = SessionId(self._numbers)
        self.directory.join(session, "127.0.0.1")
        request = register(address)
        out = self.directory.register(session, request)
        mirror = self.mirrors[session] = Mirror()
        registration = next(item for item in out if isinstance(item, Reply) and (item.session, item.request) == (session, request.id))
        life = registration.body["incarnation"]
        mirror.own = who(address, life)
        self.registers[session] = replace(request, life=Incarnation(life))
        self.obey(out)

    def end(self, session: SessionId, how: str) -> None:
        if how == "left":
            self.obey(self.directory.unregister(session, Unregister(1)))
        del self.mirrors[session], self.registers[session]
        self.obey(self.directory.drop(session, "killed"))
        for _ in range(CLOSED):
            self.obey(self.directory.tick())
            for other in self.mirrors:
                self.directory.heard(other)

    def look_up(self, session: SessionId, address: WorkerAddress, *, link: bool) -> None:
        self._numbers += 1
        self.obey(self.directory.lookup(session, Lookup(self._numbers, address, None)))
        record = self.mirrors[session].find(address)
        if link and record is not None:
            self.mirrors[session].linked(record.identity)


def told(mirror: Mirror, request: Register) -> list[Any]:
    """What a worker says to a manager that was started anew, in single pieces."""
    pieces: list[Any] = [request, *(Learn((known,)) for known in mirror.told()), *(Watch((identity,)) for identity in mirror.links())]
    return pieces


def rebuilt(job: Job, sessions: list[SessionId], random: Random) -> Directory:
    """A manager that these workers have come back to, their words mixed."""
    made = make(*sessions, recovering=RECOVERY)
    words = [(session, word) for session in sessions for word in told(job.mirrors[session], job.registers[session])]
    random.shuffle(words)
    for session, word in words:
        match word:
            case Register():
                made.register(session, word)
            case Learn():
                made.learn(word)
            case Watch():
                made.watch(session, word)
        made.check()
        if random.random() < 0.2:
            made.tick()
    return made


STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "start", "look", "link", "left", "killed"]), st.integers(0, 4), st.integers(0, 4)), max_size=40
)


@given(steps=STEPS, data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_directory_is_rebuilt_from_any_workers_in_any_order(steps: list[tuple[str, int, int]], data: st.DataObject, seed: int) -> None:
    job = Job()
    for what, one, other in steps:
        sessions = sorted(job.mirrors)
        if what == "start":
            job.start(ADDRESSES[one])
        elif sessions:
            session = sessions[one % len(sessions)]
            if what in ("left", "killed"):
                job.end(session, what)
            else:
                job.look_up(session, ADDRESSES[other], link=what == "link")
    truth = dict(job.directory.lives)
    back = [session for session in sorted(job.mirrors) if data.draw(st.booleans())]
    random = Random(seed)
    first, second = rebuilt(job, back, random), rebuilt(job, back, random)
    assert dict(first.lives) == dict(second.lives), "the order does not matter"
    assert sorted(first.living) == sorted(second.living)
    for identity, end in first.lives:
        known = truth[identity]
        assert known == end or end is None, "nothing is believed that was not so"
    for session in back:
        own = job.mirrors[session].own
        assert own is not None
        assert own in first.living, "whoever lives and comes back is there"
        for heard in job.mirrors[session].told():
            assert first.lives.newest(heard.identity.address) >= heard.identity.incarnation, "no number goes back"
    if len(back) == len(job.mirrors):
        asked = {identity.address for session in back for identity, _ in job.mirrors[session].told()} | {
            job.registers[session].address for session in back
        }
        assert {identity: end for identity, end in first.lives if end is None}.keys() == set(job.directory.living)
        assert {identity.address for identity, _ in first.lives} == asked
    for _ in range(SILENT + RECOVERY):
        for session in back:
            first.heard(session)
        first.tick()
        first.check()
    assert set(first.living) == {job.mirrors[session].own for session in back}, "who did not come back is lost"
    page = first.workers(back[0], ListWorkers(1, None))[0] if back else None
    if page is not None:
        assert isinstance(page, Reply)
        assert [worker["address"] for worker in page.body["workers"]] == sorted(job.registers[session].address for session in back)
