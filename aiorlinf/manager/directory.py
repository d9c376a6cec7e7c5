"""Who lives where. Pure: sessions, requests and ticks in, instructions out; no sockets, no clock.

A session is one proven connection to the manager. A worker lives on while its session is heard of. When that is lost it has a moment
to come back with another one, as the same life; after that, or after too long a silence, it is declared lost, and stays so: the next to
register under its address is its next incarnation. Who looked a worker up, whom it looked up itself, and who has a link with it hears
when it goes or comes back.

A manager that was started anew begins by recovering: workers that live come back and say what they know of others (`learn`, `watch`,
`remember`); new ones wait until that is over, so that no number is given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.errors import DeclaredDead, InternalError, RendezvousError, UsageError, WireError
from aiorlinf.manager.answers import (
    gone,
    held,
    missing_name,
    missing_worker,
    no_such_worker,
    not_there,
    record_of,
    taken,
    unreachable,
)
from aiorlinf.manager.expected import Expected
from aiorlinf.manager.inspections import Inspections
from aiorlinf.manager.instructions import Cut, Instruction, Probe, Refuse, Reply, SessionId, Tell, Wait
from aiorlinf.manager.lives import End, Known, Lives
from aiorlinf.manager.names import Holding, Names
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.requests import (
    AskJob,
    Expect,
    Find,
    Inspect,
    Learn,
    ListWorkers,
    Lookup,
    Publish,
    Register,
    Remember,
    Subscribe,
    Told,
    Unregister,
    Watch,
    Withdraw,
)
from aiorlinf.manager.roster import Member, Patience, Roster
from aiorlinf.manager.waiting import Named, Question, Waiting, Watchers
from aiorlinf.rendezvous.hosts import is_loopback, is_wildcard

__all__ = ["Directory"]

PAGE = 1000
MAX_WAITING = 10_000
MAX_WATCHED = 200_000
MAX_NAMES = 10_000  # of one worker
_PATIENCE = Patience(60, 16, 2)


class _Session:
    __slots__ = ("member", "seen_host")

    def __init__(self, seen_host: str) -> None:
        self.seen_host = seen_host  # where its connection comes from
        self.member: Member | None = None  # the worker it registered


class Directory:
    """The manager's memory.

    Args:
        job: the job's id.
        config: the job's configuration as plain values, handed to every worker; None: to be learnt while recovering.
        expected: all workers the job will ever have, so that looking up any other fails at once; None: the job is open.
        patience: how long a worker may be silent.
        recovering: ticks that workers of a job that goes on have to come back; 0: the job is new.
        silence: `patience.silent` in words.
        lives: so many lives every worker has had already.
    """

    def __init__(
        self,
        *,
        job: str,
        config: Mapping[str, Any] | None,
        expected: Iterable[str] | None = None,
        patience: Patience = _PATIENCE,
        recovering: int = 0,
        silence: str = "too long",
        lives: int = 0,
    ) -> None:
        self.job = job
        self.config: Mapping[str, Any] | None = config
        self._silence = silence
        self._expected = Expected(expected)
        self._recovering = recovering
        self._postponed: list[tuple[SessionId, Register | AskJob | Publish]] = []  # until it has recovered
        self._sessions: dict[SessionId, _Session] = {}
        self._roster = Roster(patience)
        self._lives = Lives(lives)
        self._names = Names()
        self._waiting = Waiting()
        self._watchers = Watchers(self._worth_hearing_of)
        self._inspections = Inspections()

    # ------------------------------------------------------------------------------------------------- sessions and time

    def join(self, session: SessionId, seen_host: str) -> None:
        """A proven connection is there; ``seen_host`` is the address it comes from."""
        self._sessions[session] = _Session(seen_host)

    def heard(self, session: SessionId) -> list[Instruction]:
        """Something has come from it."""
        own = self._sessions.get(session)
        member = None if own is None else own.member
        if member is None:
            return []
        self._roster.heard(member)
        claimants, member.claimants = member.claimants, []
        return [Refuse(claimant, request.id, taken(member, "which is alive", request)) for claimant, request in claimants]

    def drop(self, session: SessionId, detail: str, *, broken: bool = False) -> list[Instruction]:
        """The connection is gone; ``broken``: otherwise than by being closed. Unknown sessions are ignored."""
        gone = self._sessions.pop(session, None)
        if gone is None:
            return []
        self._waiting.remove_all(session)
        self._watchers.remove(session)
        out: list[Instruction] = [Refuse(asked.asker, asked.request, not_there(detail)) for asked in self._inspections.drop(session)]
        member = gone.member
        if member is None:
            return out
        member.session, member.cause = None, detail
        patience = self._roster.patience
        self._roster.hasten(member, patience.broken if broken else patience.closed)
        return [*out, *self._let_in(member)]

    def tick(self) -> list[Instruction]:
        """Time passes."""
        out: list[Instruction] = []
        for member in self._roster.tick():
            silent = member.session is not None
            detail = f"nothing was heard of it for {self._silence}" if silent else member.cause
            out += self._end(member, End("lost", detail), silent=silent)
        if self._recovering:
            self._recovering -= 1
            if not self._recovering:
                out += self._recovered()
        return out

    def be_patient(self, patience: Patience, silence: str) -> None:
        """The limits have become known, while recovering. They count from when a worker is heard of next."""
        self._roster.patience, self._silence = patience, silence

    def _recovered(self) -> list[Instruction]:
        if self.config is None:
            self.config = {}
        out: list[Instruction] = []
        postponed, self._postponed = self._postponed, []
        for session, request in postponed:
            if session in self._sessions:
                match request:
                    case Register():
                        out += self.register(session, request)
                    case AskJob():
                        out += self.ask_job(session, request)
                    case Publish():
                        out += self.publish(session, request)
        return out

    # ------------------------------------------------------------------------------------------------------- registering

    def register(self, session: SessionId, request: Register, *, holder: str | None = None) -> list[Instruction]:
        """A worker says who and where it is. ``holder``: what a probe of the address's holder showed: ``alive`` or ``silent``."""
        own = self._sessions[session]
        address = request.address
        if own.member is not None:
            return [Refuse(session, request.id, UsageError(f"this connection already registered {own.member.identity}"))]
        host = own.seen_host if request.host is None else request.host
        if is_wildcard(host):
            error = UsageError(f"{address} cannot be reached at {host}", hint="cluster.network.advertise_host is an address to connect to")
            return [Refuse(session, request.id, error)]
        if request.life:
            return self._go_on(session, own, request, host)
        if self._recovering:
            self._postponed.append((session, request))
            return []
        out: list[Instruction] = []
        member = self._roster.get(address)
        if member is not None and member.session is not None:
            if holder is None:
                return [Probe(session, request, member.session)]
            if holder == "alive":
                return [Refuse(session, request.id, taken(member, "which is alive", request))]
            member.claimants.append((session, request))
            return []
        if member is not None:
            out += self._end(member, End("lost", f"{member.cause}; another process has registered under its address"))
        return out + self._enter(session, own, request, host, self._lives.next(address))

    def _go_on(self, session: SessionId, own: _Session, request: Register, host: str) -> list[Instruction]:
        """The worker had registered before, and has lost its connection or its manager."""
        identity = Identity(request.address, request.life)
        end = self._lives.end_of(identity)
        if end is not None:
            error = DeclaredDead(f"{identity} was declared dead: {end.detail}", local=str(identity.address))
            return [Refuse(session, request.id, error)]
        out: list[Instruction] = []
        member = self._roster.get(identity.address)
        if member is not None and member.identity == identity:
            if member.session is not None:
                self._sessions[member.session].member = None
                out.append(Cut(member.session, f"{identity} has made a new connection"))
            known = member.record is not None
            member.record, member.session, own.member = record_of(request, host, identity), session, member
            self._roster.heard(member)
            out.append(Reply(session, request.id, self._registration(member.record)))
            return out + self._appeared(member, session, news=not known)
        if member is not None:
            out += self._end(member, End("lost", f"{identity} goes on under its address"))
        return out + self._enter(session, own, request, host, identity)

    def _enter(self, session: SessionId, own: _Session, request: Register, host: str, identity: Identity) -> list[Instruction]:
        record = record_of(request, host, identity)
        own.member = self._roster.add(identity, record, session, "")
        self._lives.learn(identity)
        self._expected.add(identity.address)
        return [Reply(session, request.id, self._registration(record)), *self._appeared(own.member, session, news=True)]

    def _appeared(self, member: Member, session: SessionId, *, news: bool) -> list[Instruction]:
        address, life = member.identity
        out: list[Instruction] = []
        if news:
            out += self._news(address, session, {"event": "joined", "address": str(address), "incarnation": life})
        assert member.record is not None
        for asker, request in self._waiting.take(address, life):
            out.append(self._answer(asker, request, member.record))
        return out

    def unexpected(self, address: WorkerAddress) -> bool:
        """Nobody has said that this worker would come. It may join all the same."""
        return self._expected.excludes(address) and not self._recovering

    def unregister(self, session: SessionId, request: Unregister) -> list[Instruction]:
        """A worker leaves in an orderly way; its address is free at once."""
        member = self._sessions[session].member
        out = [] if member is None else self._end(member, End("left", "it closed"))
        out.append(Reply(session, request.id, {}))
        return out

    def _end(self, member: Member, end: End, *, silent: bool = False) -> list[Instruction]:
        """Its life is over. If it is still connected, and did not say so itself, it is told and cut."""
        identity, session = member.identity, member.session
        self._roster.remove(member)
        self._lives.learn(identity, end)
        self._names.drop(identity)
        out = self._news(identity.address, session, gone(Known(identity, end), silent))
        if session is not None:
            self._sessions[session].member = None
            if end.reason == "lost":
                out += [Tell(session, {"event": "dead", "detail": end.detail}), Cut(session, f"{identity} was declared dead: {end.detail}")]
        return out + self._let_in(member)

    def _let_in(self, member: Member) -> list[Instruction]:
        """Whoever wanted the address of a worker that is gone."""
        claimants, member.claimants = member.claimants, []
        out: list[Instruction] = []
        for session, request in claimants:
            if session in self._sessions:
                out += self.register(session, request)
        return out

    # ----------------------------------------------------------------------------------------------------- what others know

    def learn(self, request: Learn) -> list[Instruction]:
        """A worker tells what it knows of others."""
        out: list[Instruction] = []
        for known in request.lives:
            out += self._hear_of(known)
        return out

    def _hear_of(self, known: Known) -> list[Instruction]:
        identity, end = known
        if not self._lives.learn(identity, end):
            return []
        out: list[Instruction] = []
        member = self._roster.get(identity.address)
        if member is not None and member.identity != identity:
            out += self._end(member, End("lost", f"{identity} lives under its address, or has lived"))
            member = None
        if end is None:
            if member is None:
                self._roster.add(identity, None, None, "it did not come back to the manager")
        elif member is not None:
            out += self._end(member, end)
        return out

    def watch(self, session: SessionId, request: Watch) -> list[Instruction]:
        """A worker has links with these."""
        if self._watchers.count(session) + len(request.workers) > MAX_WATCHED:
            self._watchers.look_through(session)
        if self._watchers.count(session) + len(request.workers) > MAX_WATCHED:
            raise WireError(f"one connection wants the news of more than {MAX_WATCHED} workers")
        out: list[Instruction] = []
        for identity in request.workers:
            self._watchers.add(session, identity.address)
            out += self._hear_of(Known(identity, None))
            end = self._lives.end_of(identity)
            if end is not None:
                out.append(Tell(session, gone(Known(identity, end), silent=False)))
        return out

    def remember(self, request: Remember) -> None:
        """What the manager was told when the job began; counts while recovering, if it was not told anew."""
        if self._recovering:
            if self.config is None:
                self.config = request.config
            self._expected.learn(request.expected, (member.identity.address for member in self._roster))

    def _worth_hearing_of(self, session: SessionId, address: WorkerAddress) -> bool:
        """It lives, or the session waits for it. Of a life that is over it has heard."""
        return self._roster.get(address) is not None or self._waiting.waits(session, address)

    # ---------------------------------------------------------------------------------------------------------- questions

    def lookup(self, session: SessionId, request: Lookup) -> list[Instruction]:
        """A worker asks where another one is."""
        address = request.address
        member = self._roster.get(address)
        if member is not None and member.session is not None and member.record is not None and member.identity.incarnation > request.above:
            self._watchers.add(session, address)
            return [self._answer(session, request.id, member.record)]
        if self.unexpected(address):
            return [Refuse(session, request.id, no_such_worker(address, self._expected.all or (), self.name(session)))]
        return self._wait(session, request.id, Question(address, request.above), request.timeout)

    def find(self, session: SessionId, request: Find) -> list[Instruction]:
        """A worker asks for a named thing."""
        named = Named(request.kind, request.name)
        holding = self._names.get(named)
        if holding is not None:
            return [Reply(session, request.id, held(holding))]
        return self._wait(session, request.id, Question(named, 0), request.timeout)

    def _wait(self, session: SessionId, request: int, question: Question, timeout: float | None) -> list[Instruction]:
        if self._waiting.get(session, request) is not None:
            return [Refuse(session, request, UsageError(f"request {request} is under way already"))]
        if self._waiting.count(session) >= MAX_WAITING:
            return [Refuse(session, request, UsageError(f"{MAX_WAITING} look-ups of this connection wait already"))]
        if isinstance(question.key, WorkerAddress):
            self._watchers.add(session, question.key)
        self._waiting.add(session, request, question)
        return [Wait(session, request, timeout)]

    def forget(self, session: SessionId, request: int) -> None:
        """The answer is not wanted any more. Ignored when it does not wait."""
        self._waiting.remove(session, request)
        self._inspections.forget(session, request)

    def expire(self, session: SessionId, request: int, waited: float) -> list[Instruction]:
        """The question's time is over, after ``waited`` seconds. Ignored when it does not wait any more."""
        question = self._waiting.get(session, request)
        if question is None:
            return []
        if self._recovering:  # what it asks for may still come back
            return [Wait(session, request, 0.5, waited)]
        self._waiting.remove(session, request)
        key, local = question.key, self.name(session)
        if isinstance(key, Named):
            return [Refuse(session, request, missing_name(key, local, waited))]
        registered = {member.identity.address for member in self._roster if member.session is not None}
        error = missing_worker(key, self._state(key), registered, self._expected.all, local, waited)
        return [Refuse(session, request, error)]

    def workers(self, session: SessionId, request: ListWorkers) -> list[Instruction]:
        """One page of the living workers, in order of address."""
        records = [member.record for member in self._roster if member.record is not None]
        records.sort(key=lambda record: record.address.sort_key)
        if request.after is not None:
            after = request.after.sort_key
            records = [record for record in records if record.address.sort_key > after]
        return [Reply(session, request.id, {"workers": [record.to_dict() for record in records[:PAGE]], "more": len(records) > PAGE})]

    def subscribe(self, session: SessionId, request: Subscribe) -> list[Instruction]:
        """A worker wants the news of all."""
        self._watchers.add_all(session)
        return [Reply(session, request.id, {})]

    def ask_job(self, session: SessionId, request: AskJob) -> list[Instruction]:
        """A worker wants the job's configuration."""
        if self.config is None:
            self._postponed.append((session, request))
            return []
        return [Reply(session, request.id, {"job": self.job, "config": self.config})]

    def expect(self, request: Expect) -> None:
        """More workers will join, so that looking them up waits. Means nothing in an open job."""
        self._expected.add(*request.addresses)

    # ---------------------------------------------------------------------------------------------------------- inspecting

    def inspect(self, session: SessionId, request: Inspect) -> list[Instruction]:
        """Somebody wants to know what a worker is doing."""
        member = self._roster.get(request.worker.address)
        if member is None or member.identity != request.worker:
            return [Refuse(session, request.id, not_there(f"{request.worker} {self._state(request.worker.address)}"))]
        if member.session is None:
            return [Refuse(session, request.id, not_there(f"{request.worker} has lost its connection ({member.cause})"))]
        number = self._inspections.ask(session, request.id, member.session)
        if number is None:
            return [Refuse(session, request.id, UsageError(f"request {request.id} is under way already, or too many are"))]
        return [Tell(member.session, {"event": "inspect", "number": number})]

    def told(self, session: SessionId, request: Told) -> list[Instruction]:
        """It has answered. Ignored when nobody waits for it any more."""
        asked = self._inspections.answered(session, request.number)
        return [] if asked is None else [Reply(asked.asker, asked.request, {"report": request.report})]

    # -------------------------------------------------------------------------------------------------------- named things

    def publish(self, session: SessionId, request: Publish) -> list[Instruction]:
        """A worker holds a named thing."""
        if self._recovering and not request.again:
            self._postponed.append((session, request))
            return []
        member = self._sessions[session].member
        if member is None:
            return [Refuse(session, request.id, UsageError(f"only a registered worker can hold the {request.kind} {request.name!r}"))]
        if self._names.count(member.identity) >= MAX_NAMES:
            return [Refuse(session, request.id, UsageError(f"{member.identity} holds {MAX_NAMES} names already"))]
        named, holding = Named(request.kind, request.name), Holding(member.identity, request.value)
        other = self._names.put(named, holding)
        if other is not None:
            text = f"there is a {request.kind} {request.name!r} already, held by {other.owner}"
            error = RendezvousError(text, local=self.name(session), remote=str(other.owner.address))
            return [Refuse(session, request.id, error)]
        out: list[Instruction] = [Reply(session, request.id, {})]
        out += [Reply(asker, number, held(holding)) for asker, number in self._waiting.take(named)]
        return out

    def withdraw(self, session: SessionId, request: Withdraw) -> list[Instruction]:
        """A worker gives a named thing up. Ignored if it is not the one that holds it."""
        member = self._sessions[session].member
        if member is not None:
            self._names.withdraw(Named(request.kind, request.name), member.identity)
        return [Reply(session, request.id, {})]

    # ------------------------------------------------------------------------------------------------------------- outside

    @property
    def recovering(self) -> bool:
        """Workers of a job that goes on may still come back."""
        return self._recovering > 0

    @property
    def living(self) -> tuple[Identity, ...]:
        """The workers that live, as far as is known."""
        return tuple(member.identity for member in self._roster)

    @property
    def waiting(self) -> Waiting:
        """The questions that wait."""
        return self._waiting

    @property
    def lives(self) -> Lives:
        """All that is known of the lives of workers."""
        return self._lives

    def name(self, session: SessionId) -> str | None:
        """The worker that the session registered, for messages."""
        known = self._sessions.get(session)
        return None if known is None or known.member is None else str(known.member.identity.address)

    def check(self) -> None:
        """Verify every invariant; for tests. Raises InternalError."""
        for member in self._roster:
            identity, session = member.identity, member.session
            if session is not None and self._sessions[session].member is not member:
                raise InternalError(f"{identity} and its session disagree")
            if self._lives.newest(identity.address) != identity.incarnation or self._lives.end(identity.address) is not None:
                raise InternalError(f"{identity} is on the roster, but not the living one")
        if sum(end is None for _, end in self._lives) != len(self._roster):
            raise InternalError("somebody lives who is not on the roster")
        for _, _, question in self._waiting:
            there = self._roster.get(question.key) if isinstance(question.key, WorkerAddress) else None
            if there is not None and there.session is not None and there.identity.incarnation > question.above:
                raise InternalError("somebody waits for a worker that is there")
            if isinstance(question.key, Named) and self._names.get(question.key) is not None:
                raise InternalError("somebody waits for a named thing that is there")
        if not self._roster.check():
            raise InternalError("a worker would never be overdue")
        self._waiting.check()
        self._watchers.check()

    # ------------------------------------------------------------------------------------------------------------ internals

    def _registration(self, record: WorkerRecord) -> dict[str, Any]:
        expected, began = self._expected.told()
        return {
            "address": str(record.address),
            "incarnation": record.incarnation,
            "host": record.host,
            "config": self.config,
            "job": self.job,
            "expected": expected,
            "began": began,
        }

    def _state(self, address: WorkerAddress) -> str:
        """What is known of a worker that somebody waited for in vain."""
        member, end, life = self._roster.get(address), self._lives.end(address), self._lives.newest(address)
        if member is not None:
            return (
                f"whose life {life} has lost its connection ({member.cause})"
                if member.session is None
                else f"of which there is no life after {life}"
            )
        return "which never registered" if end is None else f"whose life {life} is over ({end.reason}: {end.detail})"

    def _news(self, address: WorkerAddress, source: SessionId | None, event: dict[str, Any]) -> list[Instruction]:
        return [Tell(watcher, event) for watcher in self._watchers.of(address) if watcher != source]

    def _answer(self, session: SessionId, request: int, record: WorkerRecord) -> Instruction:
        asker = self._sessions[session]
        if is_loopback(record.host) and not is_loopback(asker.seen_host):
            return Refuse(session, request, unreachable(record, asker.seen_host, self.name(session)))
        target = self._roster.get(record.address)
        if asker.member is not None and target is not None and target.session is not None:
            # they are about to have a link: either hears of the other
            self._watchers.add(target.session, asker.member.identity.address)
        return Reply(session, request, {"worker": record.to_dict()})
