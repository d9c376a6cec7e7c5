"""The collectives of one set of workers, seen from one of them: who is meant by what comes, and who has gone.

Notes come from any member, over one inbox; it is only listened to while an operation is under way, so that what others send ahead stays
within the windows of the links. Whose life matters to an operation is watched by a receive that nothing is ever sent to: it fails when the
link ends. When it does, the numbers that the two have counted by begin anew.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import heapq
import itertools
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.changes import Changes
from aiorlinf.collective.inbox import Inbox
from aiorlinf.collective.notes import Key, Note, Step
from aiorlinf.errors import AiorlinfError, ClosedError, PeerError, WireError
from aiorlinf.link.lending import refuse
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.pending import PendingOperation, since
from aiorlinf.wire.frames import FrameType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.manager.protocol import WorkerRecord
    from aiorlinf.work.base import AsyncWork

__all__ = ["AHEAD", "DRAIN_SECONDS", "Circle"]

log: logging.Logger = logging.getLogger("aiorlinf.collective")

_NOTES = 0
_LIVES = 1
_FIRST_SLOT = 16
_SHOWN = 8

AHEAD = 4
"""Pieces of a large broadcast on their way at a time: the answers of some may take as long as others need."""

DRAIN_SECONDS = 60.0
"""What a sender has not withdrawn comes within this time, or is let go of with the link."""


class _UnderWay(Protocol):
    """What is needed of an operation; see `collective.operation`."""

    name: ClassVar[str]
    domain: ClassVar[str]
    keys: dict[WorkerAddress, Key]
    work: AsyncWork[Any] | None

    def peers(self) -> Iterable[WorkerAddress]: ...
    def pair(self, peer: WorkerAddress) -> tuple[str, str]: ...
    def waits_for(self) -> Iterable[WorkerAddress]: ...
    def begin(self) -> None: ...
    def take(self, sender: WorkerAddress, note: Note) -> None: ...
    def lost(self, peer: WorkerAddress, error: AiorlinfError) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Circle:
    """See the module. Home thread only, but for `begin` and the attributes.

    Attributes:
        members: all, in the order of their ranks.
        others: all but us.
        local: our address.
        context: keeps its messages apart from all others.
        digest: of the members, whatever their order.
        changes: what the last broadcast of ours has sent.
        apart: members that share a device, the second of which cannot read the first one's memory there.
        contexts: of its messages (see `link.pending.Reporter`).
    """

    def __init__(self, exchange: Exchange, members: Sequence[WorkerAddress], context: int) -> None:
        self.exchange = exchange
        self.members: tuple[WorkerAddress, ...] = tuple(members)
        self.local: WorkerAddress = exchange.local
        self.others: tuple[WorkerAddress, ...] = tuple(member for member in members if member != exchange.local)
        self.context = context
        self.digest: str = hashlib.blake2b("\n".join(sorted(members)).encode(), digest_size=6).hexdigest()
        self.changes: Changes = Changes()
        self.apart: set[tuple[str, str]] = set()
        self._operations: dict[Key, _UnderWay] = {}
        self._early: dict[Key, list[tuple[WorkerAddress, Note]]] = {}
        self._counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._lives: dict[str, int] = {}
        self._records: dict[WorkerAddress, WorkerRecord] = {}
        self._watches: dict[WorkerAddress, AsyncWork[Any]] = {}
        self._inbox = Inbox(exchange, _NOTES, context)
        self._listening: AsyncWork[Any] | None = None
        self._free_slots: list[int] = []
        self._next_slot = itertools.count(_FIRST_SLOT)
        self.contexts: tuple[int] = (context,)
        exchange.table.reporters.add(self)

    # ---- operations

    def begin(self, operation: _UnderWay, error: BaseException | None = None) -> None:
        """Start it; with an error, only to tell the others that it has failed here. Any thread."""
        self.exchange.home.call(contextvars.Context().run, self._begin, operation, error)

    def _begin(self, operation: _UnderWay, error: BaseException | None) -> None:
        for peer in operation.peers():
            pair = (operation.domain, *operation.pair(peer))
            key = operation.keys[peer] = Key(*pair, self._counts[pair])
            self._counts[pair] += 1
            self._operations[key] = operation
        if error is None and operation.work is None:  # cancelled on its way to this thread
            error = asyncio.CancelledError()
        try:
            self.exchange.table.check_open()
            for peer in operation.peers():  # also if it has failed already: whom we count with, for him we must hear when to begin anew
                self._watch(peer)
            if error is not None:
                operation.fail(error)
                return
            self.exchange.table.pass_on()
            if self.exchange.home.trace is not None and operation.work is not None:
                self.exchange.home.trace.call(operation.work, f"of {len(self.members)} workers")
            operation.begin()
        except AiorlinfError as failure:
            operation.fail(failure)
            return
        early = [told for key in operation.keys.values() for told in self._early.pop(key, ())]
        for sender, note in sorted(early, key=lambda told: told[1].step != Step.FAIL):
            operation.take(sender, note)
        self._listen()

    def forget(self, operation: _UnderWay) -> None:
        """It has ended."""
        for key in operation.keys.values():
            if self._operations.get(key) is operation:
                del self._operations[key]
        if not self._operations and self._listening is not None:
            listening, self._listening = self._listening, None
            listening.cancel()

    def pending(self) -> list[PendingOperation]:
        """What is under way, for diagnosis."""
        return [
            PendingOperation(
                operation=operation.name,
                peer=None,
                tag=0,
                context=self.context,
                stage=str(operation),
                bytes_done=None,
                bytes_expected=None,
                waits_for=tuple(map(str, operation.waits_for())),
                subject=f"of {', '.join(self.members[:_SHOWN])}{' and others' if len(self.members) > _SHOWN else ''}",
                **since(operation.work),
            )
            for operation in dict.fromkeys(self._operations.values())
            if operation.work is not None
        ]

    def closed_error(self) -> AiorlinfError:
        """What everything fails with at the end of the worker."""
        return ClosedError("the worker was closed", local=self.local)

    # ---- notes

    def tell(self, peer: WorkerAddress, note: Note) -> None:
        """Send a note. Raises as `Exchange.send`; if it cannot be delivered, that is the end of the link, which is watched."""
        life = self.life
        lives = {**note.lives, self.local: life} if life else note.lives
        data = Note(note.key, note.step, lives, note.facts, note.body).encode()
        work = self.exchange.send(peer, self.context, data, _NOTES, None)
        if not work.done():
            work.add_done_callback(_look)

    @property
    def life(self) -> int:
        """Our own, 0 before we have joined."""
        me = self.exchange.table.me
        return 0 if me is None else me.identity.incarnation

    def _listen(self) -> None:
        """Take all notes that are here before anything runs on: a failure is to be heard of before the success of what went before it."""
        while self._listening is None and self._operations:
            try:
                work: AsyncWork[Any] = self._inbox.recv()
            except AiorlinfError as error:
                self._fail_all(error)
                return
            if work.done():
                self._note_from(work)
            else:
                self._listening = work
                work.add_done_callback(self._heard)

    def _heard(self, work: AsyncWork[Any]) -> None:
        if work is self._listening:
            self._listening = None
        self._note_from(work)
        self._listen()

    def _note_from(self, work: AsyncWork[Any]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            self._take(*work.result())
        elif not isinstance(error, PeerError):  # the sender's end in the middle of a note is seen by whoever watches it
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        for operation in set(self._operations.values()):
            operation.fail(error)

    def _take(self, sender: WorkerAddress, data: object) -> None:
        try:
            note = Note.decode(data)
            if not self._of_present_lives(note):
                self.dispose(sender, note)
                return
            operation = self._operations.get(note.key)
            if operation is not None:
                operation.take(sender, note)
            elif note.key.number >= self._counts[note.key[:3]]:
                self._early.setdefault(note.key, []).append((sender, note))
            else:
                self.dispose(sender, note)
        except AiorlinfError as error:
            log.warning("%s: a note from %s is of no use: %s", self.local, sender, error)

    def _of_present_lives(self, note: Note) -> bool:
        for address, life in note.lives.items():
            if address == self.local:
                if life != self.life:
                    return False
                continue
            known = self._lives.get(address, 0)
            if life < known:
                return False
            if life > known:
                self._lives[address] = life
                for key in [key for key in self._early if address in key]:
                    for sender, early in self._early[key][:]:
                        if early.lives.get(address, 0) < life:
                            self._early[key].remove((sender, early))
                            self.dispose(sender, early)
        return True

    def dispose(self, sender: WorkerAddress, note: Note) -> None:
        """Nobody wants this note: let go of what is on its way for it."""
        try:
            if note.step == Step.HEAD and "loan" in note.facts:
                link = self.exchange.table.peek(sender)
                if link is not None:
                    link.receiver.reply(FrameType.COPIED, note.number("loan"))
            elif note.step == Step.HEAD and "place" in note.facts:
                link = self.exchange.table.peek(sender)
                if link is not None and link.receiver.shared is not None:
                    link.receiver.shared.refuse(memoryview(bytes.fromhex(note.text("place"))), [note.number("total")])
            elif note.step == Step.HEAD and "slot" in note.facts:
                self.drain(sender, note.number("slot"), min(AHEAD, -(-note.number("total") // max(1, note.number("piece")))))
            elif note.step == Step.PART and "lent" in note.facts:
                refuse(self.exchange.table.peek(sender), bytes(note.body))
            elif note.step == Step.PART and "slot" in note.facts:
                self.drain(sender, note.number("slot"))
        except (AiorlinfError, ValueError) as error:
            log.debug("%s: what %s sent for nobody could not be let go of: %s", self.local, sender, error)

    def drain(self, sender: WorkerAddress, slot: int, count: int = 1) -> None:
        """Take payloads that nobody wants any more, if they come; a tensor is refused.

        They do not come if the sender has withdrawn them. Then he does not use the slot again, so nothing else can be taken for them.
        """
        for _ in range(count):
            try:
                work = self.exchange.recv_parcel(sender, self.context, slot, DRAIN_SECONDS)
            except AiorlinfError:  # the end of the link, and of everything that was on it
                return
            work.add_done_callback(_close_parcel)

    # ---- lives

    def _watch(self, peer: WorkerAddress) -> None:
        if peer not in self._watches:
            work = self._watches[peer] = self.exchange.recv(peer, self.context, _LIVES, None)
            work.add_done_callback(functools.partial(self._gone, peer))

    def _gone(self, peer: WorkerAddress, work: AsyncWork[Any]) -> None:
        if self._watches.get(peer) is work:
            del self._watches[peer]
        if work.cancelled():
            return
        error = work.exception() or WireError(f"{peer} has sent something where nothing is ever sent", remote=peer)
        self._records.pop(peer, None)
        self.changes.clear()
        self.apart = {pair for pair in self.apart if peer not in pair}
        for pair in [pair for pair in self._counts if peer in pair]:
            del self._counts[pair]
        assert isinstance(error, AiorlinfError)
        for operation in set(self._operations.values()):
            if peer in operation.keys:
                operation.lost(peer, error)

    async def records(self) -> dict[WorkerAddress, WorkerRecord]:
        """Where all members are. Waits until they have joined the job.

        Raises RendezvousError when one has not within cluster.network.rendezvous_timeout_s.
        """
        me, manager = await self.exchange.table.joined()
        end = self.exchange.home.loop.time() + me.config.cluster.network.rendezvous_timeout_s
        found: dict[WorkerAddress, WorkerRecord] = {}
        for member in self.members:
            record = self._records.get(member)
            if record is None:
                record = await manager.lookup(member, max(0.001, end - self.exchange.home.loop.time()))
                if member == self.local or member in self._watches:  # else it is gone already
                    self._records[member] = record
            found[member] = record
        return found

    async def link_to(self, peer: WorkerAddress) -> Link:
        """The link, once it is up. Raises its cause if it ends before that."""
        link = self.exchange.table.obtain(peer)
        if link.state is LinkState.CONNECTING:
            await asyncio.wait([link.settled])
        if link.state is LinkState.ENDED and link.cause is not None:
            raise link.cause()
        return link

    # ---- streams of payloads

    def take_slot(self) -> int:
        """A tag of ours that no other operation uses."""
        return heapq.heappop(self._free_slots) if self._free_slots else next(self._next_slot)

    def give_slot(self, slot: int) -> None:
        """All that was sent under it has been received."""
        heapq.heappush(self._free_slots, slot)


def _look(work: AsyncWork[Any]) -> None:
    if not work.cancelled():
        work.exception()


def _close_parcel(work: AsyncWork[Any]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()
