"""Two workers and one between them that passes their messages on, as a model: what the test does, and what must hold.

Producers b and c send to a, which receives parcels and hands them on to b or c. All have shared memory, moved by hand. What must hold:

- nothing is torn: who receives a message finds what was sent, and it stays so until he writes to it himself;
- nothing is lost: a message whose send is done, and that nobody threw away, is received, or is in a parcel that is whole, or was handed to
  one whose link has ended since, or was a small one of such a one (small sends are done once written);
- nothing comes twice, unless the parcel said that it is uncertain;
- in the end nobody holds memory of anybody, no descriptor is open, and every operation is over.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from aiorlinf.backends.shm.arena import Arena
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import ClosedError, PeerLost, UsageError
from aiorlinf.link.link import LinkState
from aiorlinf.link.loan import Keeper
from aiorlinf.link.parcel import Parcel
from aiorlinf.link.ways import SharedWay
from aiorlinf.testing import procfs
from aiorlinf.work.base import AsyncWork
from tests.link.planned_memory import SEGMENT, PlannedMemory
from tests.link.stage import Gone, Side, StepHome, StepLoop, join

__all__ = ["SMALL", "Relay"]

THRESHOLD = 64
SMALL = 3
NAMES = ("b", "c")


class Message:
    """What was sent.

    Attributes:
        thrown_away: by the one in the middle.
        again: it may come twice, because a parcel was kept or uncertain.
        changed: who had it first may have changed what the next one gets, because a parcel was uncertain.
        handed: to whom, each time that the send was done.
        got: how often it was received.
    """

    def __init__(self, source: str, number: int, size: int, sent: AsyncWork[None]) -> None:
        self.source = source
        self.number = number
        self.size = size
        self.sent = sent
        self.withdrawn = False
        self.thrown_away = False
        self.again = False
        self.changed = False
        self.handed: list[str] = []
        self.got = 0


class Received:
    """What one got: `expected` is what must be there."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.expected = tensor.clone()


class Relay:
    """See the module. Each method is one thing that can happen."""

    def __init__(self, *, keep: bool) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        self.descriptors = len(procfs.open_descriptors())
        config = CollectiveConfig(inline_max_bytes=THRESHOLD, window_bytes=2000, chunk_bytes=500)
        to_b = Side(self.home, "a:0", "b:0", config)
        self.near = {"b": to_b, "c": Side(self.home, "a:0", "c:0", config, of=to_b)}
        self.far = {name: Side(self.home, f"{name}:0", "a:0", config) for name in NAMES}
        self.arena = Arena(self.home, 2 * SEGMENT, SEGMENT)
        self.arena.on_drop = self._dropped
        self.keeper = Keeper(self.home, self.arena.new_number, self._dropped)
        self.keeper.wanted = keep
        self.memories: list[PlannedMemory] = []
        for name in NAMES:
            near, far = self.near[name], self.far[name]
            join(self.loop, near, far)
            there = PlannedMemory(self.home, far.link, near.link, keeper=self.keeper)
            back = PlannedMemory(self.home, near.link, far.link, arena=self.arena)
            self.memories += [there, back]
            for side, memory in ((near, back), (far, there)):
                side.link.sender.ways.append(SharedWay(side.link.sender, memory.out, THRESHOLD))
                side.up()
        self.messages: list[Message] = []
        self.asked: list[tuple[str, AsyncWork[Parcel]]] = []
        self.parcels: list[tuple[Message, Parcel]] = []
        self.passing: list[tuple[Message, Parcel, str, bool, AsyncWork[None]]] = []
        self.receives: list[tuple[str, AsyncWork[Any]]] = []
        self.kept: list[Received] = []
        self._numbers = itertools.count()

    def _dropped(self, number: int) -> None:
        for side in self.near.values():
            side.link.forget_segment(number)

    # ---- what can happen

    def send(self, name: str, size: int) -> None:
        """A producer sends."""
        side = self.far[name]
        number = next(self._numbers)
        try:
            work = side.exchange.send(side.other, 0, [number, torch.full((size,), float(number))], 0, None)
        except Gone:
            return
        self.messages.append(Message(name, number, size, work))

    def cancel_send(self, index: int) -> None:
        """A producer thinks better of it."""
        pending = [message for message in self.messages if not message.sent.done()]
        if pending:
            message = pending[index % len(pending)]
            message.withdrawn = message.sent.cancel()

    def ask(self, name: str) -> None:
        """The one in the middle wants a parcel."""
        side = self.near[name]
        try:
            self.asked.append((name, side.exchange.recv_parcel(side.other, 0, 0)))
        except Gone:
            pass

    def cancel_ask(self, index: int) -> None:
        """It wants one less."""
        if self.asked:
            name, work = self.asked.pop(index % len(self.asked))
            if not work.cancel():
                self._collect(name, work)

    def collect(self) -> None:
        """It takes the parcels that are there."""
        asked, self.asked = self.asked, []
        for name, work in asked:
            if work.done():
                self._collect(name, work)
            else:
                self.asked.append((name, work))

    def _collect(self, name: str, work: AsyncWork[Parcel]) -> None:
        error = work.exception()
        if error is not None:
            assert isinstance(error, PeerLost)
            assert self.near[name].link.state is LinkState.ENDED
            return
        parcel = work.result()
        number = int(_number_in(parcel))
        (message,) = [message for message in self.messages if message.number == number]
        assert all(message is not other for other, _ in self.parcels), "it came twice"
        self.parcels.append((message, parcel))

    def hand_on(self, index: int, name: str, keep: bool) -> None:
        """It sends one of its parcels on."""
        if not self.parcels:
            return
        message, parcel = self.parcels[index % len(self.parcels)]
        side = self.near[name]
        try:
            work = side.exchange.send_parcel(side.other, 0, 0, parcel, keep=keep)
        except Gone:
            assert not parcel.closed
            return
        except UsageError:
            assert any(other is parcel for _, other, _, _, _ in self.passing)
            return
        message.again |= keep
        self.passing.append((message, parcel, name, keep, work))
        self.settle()

    def cancel_handing_on(self, index: int) -> None:
        """It thinks better of it."""
        if self.passing:
            self.passing[index % len(self.passing)][-1].cancel()
            self.settle()

    def throw_away(self, index: int) -> None:
        """It does not want one of its parcels."""
        whole = [(message, parcel) for message, parcel in self.parcels if all(other is not parcel for _, other, *_ in self.passing)]
        if whole:
            message, parcel = whole[index % len(whole)]
            parcel.close()
            message.thrown_away = True
            self.settle()

    def receive(self, name: str) -> None:
        """A consumer asks for the next."""
        side = self.far[name]
        try:
            self.receives.append((name, side.exchange.recv(side.other, 0, 0, None)))
        except Gone:
            pass

    def take(self) -> None:
        """The consumers take what is there."""
        receives, self.receives = self.receives, []
        for name, work in receives:
            if not work.done():
                self.receives.append((name, work))
            elif work.exception() is not None:
                assert isinstance(work.exception(), PeerLost)
            else:
                self._check(name, *work.result())

    def _check(self, name: str, number: int, tensor: torch.Tensor) -> None:
        (message,) = [message for message in self.messages if message.number == number]
        message.got += 1
        assert tensor.shape == (message.size,)
        assert message.got == 1 or message.again, f"{number} came twice"
        if message.got == 1 or not message.changed:
            assert bool((tensor == number).all()), f"{name} got something else"
        self.kept.append(Received(name, tensor))

    def write(self, index: int, value: int) -> None:
        """A consumer changes what it has."""
        if self.kept:
            received = self.kept[index % len(self.kept)]
            received.tensor.fill_(-value - 1)
            received.expected.fill_(-value - 1)

    def let_go(self, index: int) -> None:
        """A consumer needs it no more."""
        if self.kept:
            self.kept.pop(index % len(self.kept))

    def kill(self, name: str) -> None:
        """One of the two is gone; what it received is still looked at, as by a process that lives on without its link."""
        link = self.far[name].link
        if link.state is LinkState.UP:
            link.end(lambda: PeerLost("killed"))

    def read(self, name: str, near: bool, count: int) -> None:
        """Bytes move."""
        (self.near if near else self.far)[name].socket.read(count)

    def step_memory(self, index: int, step: str) -> None:
        """A descriptor moves, or is lost."""
        self.memories[index % len(self.memories)].step(step)

    def trim(self, index: int) -> None:
        """Somebody gives unused memory back to the system."""
        self.memories[index % len(self.memories)].arena.trim()

    def turn(self) -> None:
        """The loop turns."""
        self.loop.turn()

    def thread(self) -> None:
        """A private thread has done something."""
        self.home.run_thread()

    def tick(self) -> None:
        """Time passes."""
        self.loop.to_next_timer()

    def flow(self, rounds: int) -> None:
        """Everything moves for a while."""
        for _ in range(rounds):
            for memory in self.memories:
                memory.step("pass")
            self.home.run_thread()
            for name in NAMES:
                self.near[name].socket.read(1 << 20)
                self.far[name].socket.read(1 << 20)
            self.loop.turn()

    def trip(self, index: int, name: str, keep: bool) -> None:
        """A parcel goes all the way."""
        self.hand_on(index, name, keep)
        self.receive(name)
        self.flow(6)
        self.take()

    # ---- what must hold

    def settle(self) -> None:
        """Look at what has ended."""
        passing, self.passing = self.passing, []
        for entry in passing:
            message, parcel, name, keep, work = entry
            if not work.done():
                self.passing.append(entry)
            elif work.cancelled() or work.exception() is not None:
                assert work.cancelled() or isinstance(work.exception(), PeerLost)
                assert not parcel.closed
                message.again |= parcel.uncertain or keep
                message.changed |= parcel.uncertain
            else:
                assert parcel.closed or keep
                message.handed.append(name)
        self.parcels = [(message, parcel) for message, parcel in self.parcels if not parcel.closed]

    def check(self) -> None:
        """At any moment."""
        self.settle()
        for received in self.kept:
            assert torch.equal(received.tensor, received.expected), f"{received.name} sees what it did not write"
        assert self.loop.problems == []

    def come_to_rest(self) -> None:
        """Let everything happen that happens by itself, without failures."""
        for _ in range(5000):
            moved = False
            for side in (*self.near.values(), *self.far.values()):
                if side.socket.readable():
                    side.socket.read(1 << 30)
                    moved = True
            for memory in self.memories:
                moved |= memory.go_on()
            moved |= self.home.run_thread() or self.loop.busy()
            if not moved and not self.loop.to_next_timer():
                return
            self.loop.turn()
            self.check()
        raise AssertionError("it does not come to rest")

    def finish(self) -> None:
        """Everything that is on its way arrives; then nothing may be missing and nothing left."""
        self.come_to_rest()
        self.collect()
        for _ in range(len(self.messages) + 1):
            for name in NAMES:
                self.ask(name)
            self.come_to_rest()
            self.collect()
        for _, work in self.asked:
            assert work.cancel()
        self.asked.clear()
        for _, work in list(self.receives):
            assert work.done() or self.far[_].link.state is LinkState.UP
        for _ in range(2 * len(self.messages) + 1):
            for name in NAMES:
                self.receive(name)
            self.come_to_rest()
            self.take()
        self.settle()
        assert self.passing == []
        for _, work in self.receives:
            assert work.cancel()
        self.receives.clear()
        whole = {name for name in NAMES if self.far[name].link.state is LinkState.UP}
        for message in self.messages:
            if message.sent.cancelled() or message.sent.exception() is not None:
                continue
            lost = any(name not in whole for name in message.handed) or (message.size == SMALL and message.source not in whole)
            here = any(other is message for other, _ in self.parcels)
            assert message.got or here or message.thrown_away or lost, f"{message.number} is lost"
        self.check()
        for _, parcel in self.parcels:
            parcel.close()
        self.parcels.clear()
        self.kept.clear()
        self.messages.clear()
        self.come_to_rest()
        for memory in self.memories:
            assert memory.incoming.held_bytes == 0 or whole != set(NAMES)
            assert memory.arena.stats().used_bytes == 0
            assert memory.out.lent_bytes == 0

    def free(self) -> None:
        """End everything that the run has made."""
        for side in (*self.near.values(), *self.far.values()):
            side.link.end(lambda: ClosedError("the test is over"))
        self.loop.turn()
        for _, work in (*self.asked, *self.receives):
            work.cancel()
        for entry in self.passing:
            entry[-1].cancel()
        self.asked.clear()
        self.receives.clear()
        self.passing.clear()
        self.parcels.clear()
        self.kept.clear()
        self.messages.clear()
        self.loop.turn()
        for memory in self.memories:
            memory.free()
        while self.home.run_thread():
            self.loop.turn()
        for _ in range(3):
            self.loop.turn()
        self.home.close_nowait()
        self.loop.close()


def _number_in(parcel: Parcel) -> float:
    """The pattern of its tensor, without emptying it."""
    body = parcel._body
    if body is not None:
        return float(torch.frombuffer(bytearray(body[-4:]), dtype=torch.float32)[0])
    return float(parcel.memory[-1][-4:].view(torch.float32)[0])
