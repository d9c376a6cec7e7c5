"""The driver: starts the workers, does things to them, and now and then has all come to rest to see whether anything is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiorlinf
from aiorlinf.errors import AiorlinfError, ChannelEmpty
from aiorlinf.testing import procfs
from aiorlinf.testing.leaks import LeakError, check_leaks
from aiorlinf.testing.spawned import LoopKind, SpawnedCluster, SpawnedWorker, WorkerFailed, spawned_cluster
from scripts.chaoses.ledger import SLACK_S, Ledger
from scripts.chaoses.life import Settings, live

__all__ = ["KINDS", "Asked", "Outcome", "run_chaos"]

KINDS = {"kill": 0.24, "cut": 0.42, "freeze": 0.16, "freeze to death": 0.03, "leave": 0.09, "manager": 0.03, "kill channel worker": 0.03}
"""What is done, and how often of all."""

LEASES, PLAIN = ("leased",), ("plain",)
FEWEST = 3
ROUND_S = 45.0
REST_S = 45.0
REMEMBERED_S = 60.0
OWNER = "driver:0"
IN_HAND = 8
"""Items that one consumer may have got, or be getting, at a moment: of one batch."""
_ORDINARY_ERRORS = r"(?:Peer|Declared|Deadline|Closed|Channel|Rendezvous|Link|Remote)\w+"
ORDINARY = re.compile(
    rf"^.*(?: failed after it was given up|was never looked at: {_ORDINARY_ERRORS}:.*)\n"
    r"(?:Traceback .*\n(?:.*\n)*?aiorlinf\.errors\.\w+: .*\n)?",  # what failed at its call has no traceback
    re.MULTILINE,
)
"""What was cancelled at the moment when it failed, because somebody was killed. It is logged, for nobody has seen it."""
COMPLAINTS = ("Traceback (most recent call last)", "never retrieved", "never looked at", "InternalError", "was destroyed but it is pending")


@dataclass(frozen=True)
class Asked:
    """How it is run.

    Attributes:
        workers: how many processes.
        seconds, faults: it ends after one of the two; None: no limit.
        seed: of what is done.
        rate: things done in a second, on average.
        heartbeat_s: the limit of silence.
        pause_s: of each of a worker's loops.
    """

    workers: int = 8
    seconds: float | None = 60.0
    faults: int | None = None
    seed: int = 1
    rate: float = 2.0
    heartbeat_s: float = 4.0
    pause_s: float = 0.08
    say: Callable[[str], None] = lambda line: None


@dataclass
class Outcome:
    """What was done, and what came of it."""

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slowest: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rests: int = 0
    seconds: float = 0.0


class _Slot:
    """One worker's address, and the process that has it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.process: SpawnedWorker | None = None
        self.ready = asyncio.Event()
        self.life = 0
        self.held = False  # something is being done to it
        self.states: dict[int, tuple[Any, ...]] = {}


class _Conductor:
    def __init__(self, asked: Asked, cluster: SpawnedCluster, outcome: Outcome) -> None:
        self.asked = asked
        self.cluster = cluster
        self.outcome = outcome
        self.chance = random.Random(asked.seed)
        self.ledger = Ledger()
        self.ledger.wrong = outcome.wrong
        self.ledger.counts = outcome.counts
        self.slots = {f"w:{number}": _Slot(f"w:{number}") for number in range(asked.workers)}
        self.names = tuple(self.slots)
        self.starts = 0
        self.doing: set[asyncio.Task[None]] = set()
        self.manager_away = False
        self.channels: dict[str, aiorlinf.Channel[Any]] = {}
        self.resting = False
        self.collectives = 0
        self.channel_lives = 0
        self.expecting: dict[int, tuple[set[str], float, tuple[str, ...]]] = {}
        self.suspects: deque[tuple[int, tuple[str, ...], float, float, str]] = deque()
        self.mixed: set[int] = set()  # collectives that met another one at one of their members
        self.bound_s = 2 * asked.heartbeat_s + 20.0
        self.comm: aiorlinf.Worker

    # ---- workers

    async def start(self, slot: _Slot) -> None:
        """Its next process."""
        self.starts += 1
        others = tuple(name for name in self.names if name != slot.address)
        settings = Settings(self.asked.seed * 1000 + self.starts, others, self.bound_s, LEASES, PLAIN, self.asked.pause_s)
        slot.ready.clear()
        kind: LoopKind = "uvloop" if self.chance.random() < 0.5 else "asyncio"
        host = self.chance.choice([None, "elsewhere"])
        slot.process = await self.cluster.start(slot.address, live, settings, loop=kind, host=host, join=False)

    def living(self) -> list[_Slot]:
        return [slot for slot in self.slots.values() if slot.process is not None and slot.process.alive and slot.ready.is_set()]

    def free(self) -> list[_Slot]:
        """Those to which something may be done."""
        return [slot for slot in self.living() if not slot.held]

    def read(self) -> None:
        """All that the processes have said."""
        for slot in self.slots.values():
            process = slot.process
            if process is None:
                continue
            for said in process.heard():
                self.take(slot, said)

    def take(self, slot: _Slot, said: tuple[Any, ...]) -> None:
        if said[0] == "events":
            for event in said[1]:
                self.take_event(slot, *event)
        elif said[0] == "state":
            slot.states[said[1]] = said[2:]
            for kind, slowest in said[5].items():
                self.outcome.slowest[kind] = max(self.outcome.slowest[kind], slowest)
        elif said[0] == "could not join":
            self.outcome.counts["attempts to join that failed"] += 1

    def take_event(self, slot: _Slot, what: str, *details: Any) -> None:
        *rest, when = details
        ledger = self.ledger
        if what == "sends":
            ledger.sends(rest[0], when)
        elif what == "sent":
            ledger.sent(rest[0], when, rest[1], rest[2])
        elif what == "received":
            ledger.received(rest[0])
        elif what == "puts":
            ledger.puts(rest[0], rest[1])
        elif what == "was put":
            ledger.was_put(rest[0], rest[1], rest[2], when)
        elif what == "got":
            ledger.got(rest[0], rest[1])
        elif what == "joined":
            slot.life = rest[1]
            ledger.lives.joined(slot.address, slot.life, when)
            slot.ready.set()
        elif what == "declared dead":
            ledger.lives.ends(slot.address, when)
            slot.ready.clear()
        elif what == "cut":
            self.cut_was_made(rest[0], rest[1], rest[2], when)
        elif what == "restored":
            self.outcome.counts["links between hosts restored"] += 1
        elif what == "not restored":
            one, other, begin = rest
            text = f"the link of {one} to {other} was cut by the network and not restored, and nothing was done to either"
            self.suspects.append((0, (one, other), begin, when, text))
        elif what == "error":
            self.outcome.errors[rest[0]] += 1
        elif what == "collective":
            self.collective_over(*rest)
        elif what == "wrong":
            self.outcome.wrong.append(rest[0])

    def cut_was_made(self, one: str, other: str, comes_back: bool, when: float) -> None:
        """Only a link in one host ends with its connection; one between hosts comes back, so its cut explains no loss and no error."""
        if comes_back:
            self.outcome.counts["links between hosts cut"] += 1
            return
        self.outcome.counts["links in one host cut"] += 1
        self.ledger.lives.cut(one, other, when)
        if other.startswith("channel."):
            self.consumer_lost()

    async def read_all(self) -> None:
        shown = 0
        while True:
            self.read()
            self.judge(time.monotonic())
            for wrong in self.outcome.wrong[shown:]:
                self.asked.say(f"WRONG: {wrong}")
            shown = len(self.outcome.wrong)
            await asyncio.sleep(0.02)

    # ---- what is done to them

    def do(self, kind: str) -> bool:
        """Begin it; False if it cannot be done now."""
        free = self.free()
        if kind == "manager":
            if self.manager_away:
                return False
            self.spawn(self.restart_manager())
            return True
        if kind == "kill channel worker":
            self.spawn(self.kill_channel_worker())
            return True
        if len(free) <= FEWEST:
            return False
        slot = self.chance.choice(free)
        action: dict[str, Callable[[_Slot], Coroutine[Any, Any, None]]] = {
            "kill": self.kill,
            "cut": self.cut,
            "freeze": self.freeze,
            "freeze to death": self.freeze_to_death,
            "leave": self.leave,
        }
        self.spawn(action[kind](slot))
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.doing.add(task)
        task.add_done_callback(self.doing.discard)
        task.add_done_callback(self.failed)

    def failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.outcome.wrong.append(f"the driver: {type(error).__name__}: {error}")

    def consumer_lost(self) -> None:
        for channel in PLAIN:
            self.ledger.may_lose(channel, IN_HAND)

    async def kill(self, slot: _Slot) -> None:
        slot.held = True
        self.ledger.lives.ends(slot.address, time.monotonic())
        self.consumer_lost()
        assert slot.process is not None
        await slot.process.kill()
        await self.next_life(slot)

    async def next_life(self, slot: _Slot) -> None:
        """After a while its address lives again."""
        assert slot.process is not None
        for said in slot.process.heard():
            self.take(slot, said)
        self.ledger.lives.ends(slot.address, time.monotonic())  # it may have joined in its last moment
        slot.ready.clear()
        self.complaints(slot.process)
        await slot.process.close()
        await asyncio.sleep(self.chance.random())
        await self.start(slot)
        await self.until_ready(slot)
        slot.held = False

    async def until_ready(self, slot: _Slot) -> None:
        try:
            async with asyncio.timeout(60):
                await slot.ready.wait()
        except TimeoutError:
            assert slot.process is not None
            self.outcome.wrong.append(f"{slot.address} does not join within 60 s:\n{slot.process.printed()[-2000:]}")
            slot.ready.set()

    async def cut(self, slot: _Slot) -> None:
        assert slot.process is not None
        other = self.chance.choice([None, None, self.chance.choice(self.names)])
        with contextlib.suppress(OSError):
            slot.process.say(("cut", None if other == slot.address else other))

    async def freeze(self, slot: _Slot) -> None:
        slot.held = True
        assert slot.process is not None
        slot.process.freeze()
        await asyncio.sleep(0.3 * self.asked.heartbeat_s * self.chance.random())
        slot.process.thaw()
        slot.held = False

    async def freeze_to_death(self, slot: _Slot) -> None:
        slot.held = True
        assert slot.process is not None
        self.ledger.lives.ends(slot.address, time.monotonic())
        self.consumer_lost()
        slot.process.freeze()
        await asyncio.sleep(self.asked.heartbeat_s + 2.0 + self.chance.random())
        life = slot.life
        slot.process.thaw()
        end = time.monotonic() + self.bound_s
        while slot.life == life or not slot.ready.is_set():
            await asyncio.sleep(0.05)
            if time.monotonic() > end and slot.ready.is_set():
                # The manager was started anew meanwhile, and has given it all of the time again.
                self.outcome.counts["long freezes that nobody noticed"] += 1
                self.ledger.lives.joined(slot.address, life, time.monotonic())
                break
            if time.monotonic() > end + 40:
                self.outcome.wrong.append(f"{slot.address} does not join again after a freeze:\n{slot.process.printed()[-2000:]}")
                break
        slot.held = False

    async def leave(self, slot: _Slot) -> None:
        """It closes, and another process joins under its address later."""
        slot.held = True
        assert slot.process is not None
        self.ledger.lives.ends(slot.address, time.monotonic())
        with contextlib.suppress(OSError):
            slot.process.say(("end",))
        await self.ended_well(slot.process)
        await self.next_life(slot)

    async def ended_well(self, process: SpawnedWorker) -> None:
        """It ends by itself, and leaves nothing behind."""
        try:
            result = await process.result(self.bound_s + 20)
        except WorkerFailed as error:
            self.outcome.wrong.append(f"{process.address} did not end well: {error}")
        else:
            self.outcome.wrong += [f"{process.address} has left behind: {leak}" for leak in result["left"]]
            self.outcome.counts["processes that ended and left nothing"] += not result["left"]

    async def restart_manager(self) -> None:
        self.manager_away = True
        await self.cluster.kill_manager()
        await asyncio.sleep(1.5 * self.chance.random())
        await self.cluster.start_manager()
        await asyncio.sleep(8.0)  # it lets new ones in after some seconds; before that nobody could
        self.manager_away = False

    async def kill_channel_worker(self) -> None:
        name = self.chance.choice([*LEASES, *PLAIN])
        channel = self.channels.pop(name, None)
        if channel is None or self.resting:
            return
        address = f"channel.{name}:0"
        for peer in await self.comm.peers():
            if peer.address == address:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)
        self.ledger.lives.ends(address, time.monotonic())
        self.ledger.channel_lost(name)
        await asyncio.sleep(0.5)
        await self.make_channel(name)

    async def make_channel(self, name: str) -> None:
        """The driver is a producer of each, so that none ends."""
        end = time.monotonic() + 60
        while True:
            try:
                self.channels[name] = await self.comm.create_channel(name, maxsize=32, producer=True)
                self.channel_lives += 1
                self.ledger.lives.joined(f"channel.{name}:0", self.channel_lives, time.monotonic())
                return
            except AiorlinfError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)

    def complaints(self, process: SpawnedWorker) -> None:
        """What it has printed that nobody should have to read."""
        printed = ORDINARY.sub("", process.printed())
        for complaint in COMPLAINTS:
            if complaint in printed:
                at = printed.index(complaint)
                self.outcome.wrong.append(f"{process.address} has printed: {printed[max(0, at - 300) : at + 1500]}")
                return

    # ---- collectives

    def begin_collective(self) -> None:
        """Some of those that live."""
        free = self.free()
        if len(free) < 2:
            return
        slots = self.chance.sample(free, self.chance.randrange(2, min(5, len(free)) + 1))
        members = tuple(sorted(slot.address for slot in slots))
        number = self.collectives = self.collectives + 1
        kind = self.chance.choice(["broadcast", "gather", "all_to_all"])
        self.expecting[number] = (set(members), time.monotonic(), members)
        for slot in slots:
            assert slot.process is not None
            try:
                slot.process.say(("collective", number, kind, members, members[number % len(members)]))
            except OSError:
                self.expecting[number][0].discard(slot.address)

    def collective_over(self, number: int, member: str, outcome: str, why: str) -> None:
        self.outcome.counts[f"collectives {outcome}"] += 1
        entry = self.expecting.get(number)
        if entry is None:
            return
        entry[0].discard(member)
        begun, members = entry[1], entry[2]
        if outcome == "mixed":
            self.mixed.add(number)
            self.asked.say(f"collective {number} of {', '.join(members)} met another one at {member}: {why}")
        if outcome in ("mixed", "failed"):
            what = f"collective {number} of {', '.join(members)} was {outcome} at {member}, and nobody was disturbed: {why}"
            self.suspects.append((number, members, begun, time.monotonic(), what))
        if not entry[0]:
            del self.expecting[number]

    def judge(self, now: float) -> None:
        """Look at what went wrong some time ago: by now all has been told that could be the reason."""
        self.ledger.judge(now)
        while self.suspects and self.suspects[0][3] < now - SLACK_S:
            number, members, begin, end, what = self.suspects.popleft()
            # A call that began before a member was killed may meet the first of that member's next life, which then fails at the others.
            if self.undisturbed(members, begin - REMEMBERED_S if number in self.mixed else begin, end):
                self.outcome.wrong.append(what)

    def undisturbed(self, members: tuple[str, ...], begin: float, end: float) -> bool:
        lives = self.ledger.lives
        pairs = [(one, other) for one in members for other in members if one < other]
        return all(lives.steady(member, begin, end) for member in members) and not any(
            lives.cut_between(one, other, begin, end) for one, other in pairs
        )

    # ---- rest

    async def rest(self) -> None:
        """Nothing more is begun; what is under way comes to its end; is anything missing?"""
        self.resting = True
        try:
            while self.doing:
                await asyncio.wait(self.doing, timeout=1.0)
            for slot in self.slots.values():
                if slot.process is not None and slot.process.alive:
                    slot.process.say(("pause",))
            await asyncio.gather(self.quiet(), self.drain())  # who waits to put into a full channel comes to rest only as somebody takes
            await self.drain()
            await self.quiet()
            await asyncio.sleep(0.3)
            self.read()
            now = time.monotonic()
            self.judge(now + SLACK_S)
            self.ledger.all_at_rest(now)
            self.ledger.lives.forget_before(now - 60)
            for name in (*LEASES, *PLAIN):
                self.ledger.drained(name, leased=name in LEASES)
            self.expecting.clear()
            self.mixed.clear()
            self.outcome.rests += 1
            for slot in self.slots.values():
                if slot.process is not None and slot.process.alive:
                    slot.process.say(("go on",))
        finally:
            self.resting = False

    async def quiet(self) -> None:
        """Until no worker has anything under way that must end."""
        end = time.monotonic() + REST_S
        token = 0
        busy: dict[str, Any] = {}
        calm = 0
        while time.monotonic() < end:
            token += 1
            asked = self.living()
            for slot in asked:
                assert slot.process is not None
                slot.states.clear()
                with contextlib.suppress(OSError):
                    slot.process.say(("state", token))
            until = time.monotonic() + 5
            while time.monotonic() < until and not all(token in slot.states for slot in asked):
                await asyncio.sleep(0.02)
            busy = {slot.address: slot.states[token][0] if token in slot.states else "says nothing" for slot in asked}
            calm = calm + 1 if not any(busy.values()) else 0
            if calm >= 2:
                return
            await asyncio.sleep(0.2)
        self.outcome.wrong.append(f"not at rest after {REST_S:g} s: " + "; ".join(f"{who} {what}" for who, what in busy.items() if what))

    async def drain(self) -> None:
        """Take what is left in the channels."""
        for name, channel in list(self.channels.items()):
            end = time.monotonic() + 20
            empty = 0
            while empty < 3:
                try:
                    content = await asyncio.wait_for(channel.get_nowait(), 20)
                    self.ledger.got(name, content[0])
                    empty = 0
                except ChannelEmpty:
                    empty += 1
                    await asyncio.sleep(0.1)
                except (AiorlinfError, TimeoutError) as error:
                    self.outcome.wrong.append(f"the driver cannot empty {name}: {type(error).__name__}: {error}")
                    break
                if time.monotonic() > end:
                    self.outcome.wrong.append(f"{name} does not get empty")
                    break

    # ---- the run

    async def run(self) -> None:
        asked = self.asked
        begin = time.monotonic()
        self.comm = await self.cluster.join(OWNER)
        reading = asyncio.create_task(self.read_all())
        try:
            for name in (*LEASES, *PLAIN):
                await self.make_channel(name)
            await asyncio.gather(*(self.start(slot) for slot in self.slots.values()))
            for slot in self.slots.values():
                await self.until_ready(slot)
            kinds, weights = list(KINDS), list(KINDS.values())
            told = rested = time.monotonic()
            while True:
                now = time.monotonic()
                total = self.outcome.faults.total()
                over = (asked.seconds is not None and now - begin >= asked.seconds) or (asked.faults is not None and total >= asked.faults)
                if over or now - rested > ROUND_S:
                    await self.rest()
                    rested = time.monotonic()
                if now - told > 10 or over:
                    told = now
                    asked.say(self.progress(now - begin))
                if over:
                    break
                kind = self.chance.choices(kinds, weights)[0]
                if self.do(kind):
                    self.outcome.faults[kind] += 1
                if self.chance.random() < 0.7:
                    self.begin_collective()
                await asyncio.sleep(self.chance.expovariate(asked.rate))
            for slot in self.slots.values():
                self.ledger.lives.ends(slot.address, time.monotonic())
            await asyncio.gather(*(self.finish(slot) for slot in self.slots.values()))
        finally:
            reading.cancel()
            for task in self.doing:
                task.cancel()
            await asyncio.gather(reading, *self.doing, return_exceptions=True)
            self.outcome.seconds = time.monotonic() - begin

    async def finish(self, slot: _Slot) -> None:
        process = slot.process
        if process is None or not process.alive:
            self.outcome.wrong.append(f"{slot.address} has ended by itself: {process and process.printed()[-2000:]}")
            return
        process.say(("end",))
        await self.ended_well(process)
        self.complaints(process)

    def progress(self, seconds: float) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcome.faults.items()))
        return (
            f"{seconds:6.0f} s  {self.outcome.faults.total():5} faults ({done})  {self.outcome.counts['received']:,} messages, "
            f"{self.outcome.counts['gets']:,} items, {self.outcome.counts['collectives done']:,} collectives  "
            f"{len(self.outcome.wrong)} wrong"
        )


async def _run(asked: Asked) -> Outcome:
    outcome = Outcome()
    config = {"cluster": {"network": {"heartbeat_timeout_s": asked.heartbeat_s, "rendezvous_timeout_s": 15.0, "connect_timeout_s": 8.0}}}
    procfs.make_process_globals()
    try:
        async with check_leaks(grace=10.0), spawned_cluster(config) as cluster:
            conductor = _Conductor(asked, cluster, outcome)
            await conductor.run()
    except LeakError as error:
        outcome.wrong += [f"the driver has left behind: {leak}" for leak in error.leaks]
    return outcome


def run_chaos(asked: Asked) -> Outcome:
    """Run it to its end."""
    return asyncio.run(_run(asked))
