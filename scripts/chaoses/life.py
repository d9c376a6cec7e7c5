"""What one worker's process does: it sends, receives, puts, gets, takes part in collectives, and tells the driver all of it.

The driver says by a tuple what shall be done next; what happens by itself here is chosen by a seed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import socket
import time
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import torch

import aiorlinf
from aiorlinf.errors import AiorlinfError, ChannelError, ClosedError, DeclaredDead, LinkError, PeerError, WireError
from aiorlinf.link.link import Link, LinkState
from aiorlinf.testing.leaks import LeakError, check_leaks
from aiorlinf.testing.spawned import Talk, talk
from scripts.chaoses.messages import Head, Stream, look, make, some_size

__all__ = ["Settings", "live"]

TAGS = (0, 1, 2)
"""0 is received by an inbox, 1 from each sender, 2 from each sender by receives that are given up again and again."""

LOOK_S = 0.25
GRACE_S = 5.0
"""What a process has left behind when it has closed must be gone by then: also a thread that makes a pair with a peer that has died."""
ORDINARY = (PeerError, LinkError, ChannelError)
"""What may happen when others are killed; each is counted by its kind."""

NEVER = (WireError,)
"""What may not, although it is of one of those kinds."""


@dataclass(frozen=True)
class Settings:
    """What a life needs to know.

    Attributes:
        seed: of its choices.
        others: whom it talks to.
        bound_s: an operation that takes longer, while this process is running, hangs.
        leases, plain: channels whose items are taken with leases, and without.
        pause_s: of each of its loops, on average.
    """

    seed: int
    others: tuple[str, ...]
    bound_s: float
    leases: tuple[str, ...]
    plain: tuple[str, ...]
    pause_s: float


class _Over(Exception):
    """This life is over: others took it for dead."""


async def live(settings: Settings) -> dict[str, Any]:
    """Join, again if others have given this worker up, until the driver says ``("end",)``; what was left behind."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    told = talk()
    await _first_stream()
    checker = check_leaks(grace=GRACE_S)
    await checker.__aenter__()
    lives = 0
    while True:
        lives += 1
        try:
            if await _one_life(told, settings, lives):
                break
        except (LinkError, ClosedError) as error:  # while the manager is away, it may last
            told.say(("could not join", str(error)))
            await asyncio.sleep(0.2)
    left: list[str] = []
    gc.collect()
    try:
        await checker.__aexit__(None, None, None)
    except LeakError as error:
        # In /dev/shm there may be what processes have made that are not ours.
        left = [str(leak) for leak in error.leaks if "/sem.mp-" not in str(leak)]
    return {"left": left, "lives": lives}


async def _first_stream() -> None:
    """The first stream of a loop makes libuv open a descriptor that it keeps."""
    one, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        transport.abort()


async def _one_life(told: Talk, settings: Settings, turn: int) -> bool:
    """Whether the driver has ended it; otherwise it was declared dead."""
    async with aiorlinf.init() as comm:
        life = _Life(comm, told, settings, turn)
        return await life.run()


class _Life:
    def __init__(self, comm: aiorlinf.Worker, told: Talk, settings: Settings, turn: int) -> None:
        self.comm = comm
        self.told = told
        self.settings = settings
        self.me = str(comm.address)
        self.number = int(comm.incarnation)
        self.chance = random.Random(f"{settings.seed} {self.me} {self.number} {turn}")
        self.events: list[tuple[Any, ...]] = []
        self.paused = False
        self.busy: Counter[str] = Counter()
        self.ended = asyncio.get_running_loop().create_future()
        self.numbers: Counter[Stream] = Counter()
        self.seen: dict[tuple[str, int], tuple[int, int]] = {}
        self.lives_seen: dict[str, int] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.items = 0
        self.slowest: Counter[str] = Counter()

    # ---- its frame

    async def run(self) -> bool:
        loop = asyncio.get_running_loop()
        descriptor = self.told._connection.fileno()
        loop.add_reader(descriptor, self._take_orders)
        self.event("joined", self.me, self.number)
        try:
            self.spawn(self._flush_all())
            for _ in range(2):
                self.spawn(self._send_all())
            self.spawn(self._take_inbox())
            for other in self.settings.others:
                self.spawn(self._receive(other))
                self.spawn(self._receive_restlessly(other))
            for channel in (*self.settings.leases, *self.settings.plain):
                self.spawn(self._use_channel(channel))
            self.spawn(self._listen())
            self.spawn(self._look_around())
            try:
                await self.ended
            except _Over:
                self.event("declared dead", self.me, self.number)
                return False
            return True
        finally:
            loop.remove_reader(descriptor)
            while self.tasks:
                for task in self.tasks:
                    task.cancel()
                await asyncio.wait(self.tasks, timeout=1.0)
            self.flush()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, (DeclaredDead, ClosedError)):
            self.end(_Over())
            return
        self.event("wrong", f"{self.me}#{self.number}: " + "".join(traceback.format_exception(error)))

    def end(self, error: _Over | None = None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def event(self, *event: Any) -> None:
        self.events.append((*event, time.monotonic()))

    def note(self, error: BaseException) -> None:
        """One of those that may be; and some that look like it."""
        self.event("error", type(error).__name__)
        if isinstance(error, NEVER):
            self.event("wrong", f"{self.me}#{self.number}: {type(error).__name__}: {error}")

    def flush(self) -> None:
        events, self.events = self.events, []
        if events:
            self.told.say(("events", events))

    async def _flush_all(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.flush()

    async def bounded(self, work: Any, what: str) -> Any:
        """Its value. It hangs if it takes too long, while this process runs: time that it stood still does not count."""
        self.busy[what] += 1
        begin = time.monotonic()
        task = asyncio.ensure_future(_waited(work))
        try:
            looks = 0
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                looks += 1
                if looks * LOOK_S == self.settings.bound_s:
                    self.event("wrong", f"{self.me}#{self.number}: {what} hangs\n{self.comm.dump()}")
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                raise
            return task.result()  # it was over: then it has happened, and its caller has to know
        finally:
            self.busy[what] -= 1
            kind = what.split()[0]
            self.slowest[kind] = max(self.slowest[kind], int(1000 * (time.monotonic() - begin)))

    async def pause(self) -> None:
        """Between two things; as long as the driver wants quiet."""
        await asyncio.sleep(self.chance.expovariate(1 / self.settings.pause_s))
        while self.paused:
            await asyncio.sleep(0.02)

    # ---- what the driver says

    def _take_orders(self) -> None:
        connection = self.told._connection
        try:
            while connection.poll():
                self._obey(*connection.recv())
        except EOFError:
            self.end()

    def _obey(self, order: str, *arguments: Any) -> None:
        if order == "end":
            self.end()
        elif order == "pause":
            self.paused = True
        elif order == "go on":
            self.paused = False
        elif order == "cut":
            self._cut(*arguments)
        elif order == "collective":
            number, kind, members, root = arguments
            self.spawn(self._collective(number, kind, members, root, self._begin(number, kind, members, root)))
        elif order == "state":
            self._tell_state(*arguments)

    def _tell_state(self, token: int) -> None:
        busy = {what: count for what, count in self.busy.items() if count > 0}
        self.flush()
        self.told.say(("state", token, busy, len(self.comm.stats().links), len(os.listdir("/proc/self/fd")), dict(self.slowest)))

    def _cut(self, other: str | None) -> None:
        """Shut the socket of a link, as if the network had. A link between hosts has to come back with all that was under way."""
        links = [link for link in self.comm._table.links() if link.state is LinkState.UP and link.remote != self.me]
        links = [link for link in links if other is None or link.remote == other]
        if not links:
            self.event("no link to cut", self.me, other)
            return
        link = self.chance.choice(links)
        transport = getattr(link._conn, "transport", None)
        own = None if transport is None else transport.get_extra_info("socket")
        if own is None:
            self.event("no link to cut", self.me, other)
            return
        comes_back = getattr(link._conn, "ledger", None) is not None
        before = link.reconnects
        with socket.socket(fileno=os.dup(own.fileno())) as sock:
            try:
                sock.shutdown(self.chance.choice([socket.SHUT_RDWR, socket.SHUT_WR, socket.SHUT_RD]))
            except OSError:  # it has just ended
                pass
        self.event("cut", self.me, str(link.remote), comes_back)
        if comes_back:
            self.spawn(self._see_it_restored(link, before))

    async def _see_it_restored(self, link: Link, before: int) -> None:
        begin = time.monotonic()
        while link.reconnects == before and link.state is LinkState.UP and time.monotonic() < begin + self.settings.bound_s:
            await asyncio.sleep(0.02)
        restored = link.reconnects > before
        if restored:
            self.slowest["restored"] = max(self.slowest["restored"], int(1000 * (time.monotonic() - begin)))
        self.event("restored" if restored else "not restored", self.me, str(link.remote), begin)

    # ---- messages

    async def _send_all(self) -> None:
        while True:
            await self.pause()
            other = self.chance.choice(self.settings.others)
            stream = Stream(self.me, self.number, other, self.chance.choice(TAGS))
            head = Head(stream, self.numbers[stream])
            self.numbers[stream] += 1
            message = make(head, some_size(self.chance))
            turns = self.chance.randrange(60) if self.chance.random() < 0.08 else None
            self.event("sends", head)
            work = self.comm.send(message, other, tag=stream.tag)
            del message
            if turns is not None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                if work.cancel():
                    self.event("sent", head, "cancelled", "")
                    continue
            try:
                await self.bounded(work, f"send to {other} tag {stream.tag}")
            except ORDINARY as error:
                self.note(error)
                self.event("sent", head, "failed", f"{type(error).__name__}: {error}")
            else:
                self.event("sent", head, "done", "")

    def _take(self, sender: str, message: Any) -> None:
        head, wrong = look(message)
        stream = head.stream
        if wrong or stream.sender != sender or stream.receiver != self.me:
            self.event("wrong", f"{self.me}#{self.number} got {head} from {sender}: {wrong or 'it is not for us, or not from there'}")
        newest = self.lives_seen.get(sender, 0)
        if stream.life < newest:
            self.event("wrong", f"{self.me}#{self.number} got a message of {sender}#{stream.life} after one of #{newest}")
        self.lives_seen[sender] = max(newest, stream.life)
        life, number = self.seen.get((sender, stream.tag), (0, -1))
        if life == stream.life and head.number <= number:
            self.event("wrong", f"{self.me}#{self.number} got {head} after number {number}")
        self.seen[sender, stream.tag] = (stream.life, head.number)
        self.event("received", head)

    async def _take_inbox(self) -> None:
        async for sender, message in self.comm.inbox(tag=0):
            self._take(str(sender), message)

    async def _receive(self, other: str) -> None:
        while True:
            try:
                self._take(other, await self.comm.recv(other, tag=1))
            except ORDINARY as error:
                self.note(error)
                await asyncio.sleep(0.05)

    async def _receive_restlessly(self, other: str) -> None:
        """Given up again and again: each time the message stays, or is there."""
        while True:
            work = self.comm.recv(other, tag=2)
            over = asyncio.Event()
            work.add_done_callback(lambda _, over=over: over.set())  # type: ignore[misc]  # its own
            try:
                async with asyncio.timeout(0.2 * self.chance.random()):
                    await over.wait()
            except TimeoutError:
                if not work.done() and work.cancel():
                    continue
            try:
                self._take(other, await work)
            except ORDINARY as error:
                self.note(error)
                await asyncio.sleep(0.05)

    # ---- channels

    async def _use_channel(self, name: str) -> None:
        leased = name in self.settings.leases
        while True:
            try:
                channel = await self.bounded(self.comm.connect_channel(name, consumer=True), f"connect_channel {name}")
                await self._until_one_fails(self._put_all(name, channel), self._get_all(name, channel, leased))
            except ORDINARY as error:
                self.note(error)
                await asyncio.sleep(0.1)

    async def _until_one_fails(self, *parts: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _put_all(self, name: str, channel: aiorlinf.Channel[Any]) -> None:
        while True:
            await self.pause()
            self.items += 1
            item = f"{self.me}#{self.number}/{self.items}"
            self.event("puts", name, item)
            work = channel.put((item, torch.full((some_size(self.chance) // 4,), float(self.items % 100))), weight=self.chance.random())
            try:
                async with asyncio.timeout(0.02 * self.chance.random() if self.chance.random() < 0.1 else None):
                    await self.bounded(work, f"put into {name}")
            except TimeoutError:
                self.event("was put", name, item, "cancelled")
            except AiorlinfError:
                self.event("was put", name, item, "failed")
                raise
            else:
                self.event("was put", name, item, "done")

    async def _get_all(self, name: str, channel: aiorlinf.Channel[Any], leased: bool) -> None:
        while True:
            if self.paused:
                await asyncio.sleep(0.02)
                continue
            limit = 0.3 * self.chance.random()
            try:
                async with asyncio.timeout(limit):
                    if leased:
                        async with channel.lease() as content:
                            await asyncio.sleep(0.002 * self.chance.random())
                            self._has(name, content)
                    elif self.chance.random() < 0.3:
                        for content in await channel.get_batch(1.0 + self.chance.random()):
                            self._has(name, content)
                    else:
                        self._has(name, await channel.get())
            except TimeoutError:
                continue

    def _has(self, name: str, content: Any) -> None:
        item, tensor = content
        if len(tensor) and not bool((tensor == float(int(item.rpartition("/")[2]) % 100)).all()):
            self.event("wrong", f"{self.me}#{self.number} got {item} of {name}, and it is not what was put")
        self.event("got", name, item)
        if name in self.settings.leases:
            self.flush()  # before the lease is over: should this process be killed now, nobody else will get it

    # ---- collectives

    def _begin(self, number: int, kind: str, members: tuple[str, ...], root: str) -> Any:
        """Called in the order of the driver's words, as all members must."""
        value = torch.full((1 + number % 50_000,), float(number))
        group = self.comm.collective.create_collective_group(list(members))
        if kind == "broadcast":
            return group.broadcast((number, root, value) if root == self.me else None, root=root, timeout=self.settings.bound_s)
        if kind == "gather":
            return group.gather((number, self.me, value), root=root, timeout=self.settings.bound_s)
        return group.all_to_all([(number, self.me, member, value[:100]) for member in sorted_like(group)], timeout=self.settings.bound_s)

    async def _collective(self, number: int, kind: str, members: tuple[str, ...], root: str, work: Any) -> None:
        try:
            got = await self.bounded(work, f"{kind} {number} of {', '.join(members)}")
        except (AiorlinfError, TimeoutError) as error:
            if isinstance(error, (DeclaredDead, ClosedError)):
                raise
            self.note(error)
            self.event("collective", number, self.me, "failed", f"{type(error).__name__}: {error}")
            return
        wrong = self._check_collective(number, kind, members, root, got)
        self.event("collective", number, self.me, "mixed" if wrong else "done", wrong)

    def _check_collective(self, number: int, kind: str, members: tuple[str, ...], root: str, got: Any) -> str:
        """What is wrong with it, or of another one."""
        if kind == "broadcast":
            assert bool((got[2] == float(got[0])).all())
            return "" if tuple(got[:2]) == (number, root) else f"{got[:2]}"
        if kind == "gather":
            if self.me != root:
                return ""
            return (
                "" if [(each[0], each[1]) for each in got] == [(number, member) for member in members] else f"{[each[:2] for each in got]}"
            )
        wanted = [(number, member, self.me) for member in members]
        return "" if [tuple(each[:3]) for each in got] == wanted else f"{[each[:3] for each in got]}"

    # ---- who is there

    async def _listen(self) -> None:
        lives: dict[str, int] = {}
        async for event in self.comm.membership():
            if event.incarnation < lives.get(event.address, 0):
                self.event("wrong", f"{self.me}#{self.number} heard of {event} after #{lives[event.address]}")
            lives[event.address] = max(lives.get(event.address, 0), event.incarnation)

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(1.0 + self.chance.random())
            while self.paused:
                await asyncio.sleep(0.02)
            other = self.chance.choice(self.settings.others)
            try:
                if self.chance.random() < 0.5:
                    await self.bounded(self.comm.peers(), "peers")
                else:
                    await self.bounded(self.comm.wait_for(other, 0.5), f"wait_for {other}")
            except TimeoutError:
                continue
            except ORDINARY as error:
                self.note(error)


def sorted_like(group: aiorlinf.CollectiveGroup) -> list[str]:
    """The members in the order that the group has."""
    return [str(member) for member in group.members]


async def _waited(work: Any) -> Any:
    return await work
