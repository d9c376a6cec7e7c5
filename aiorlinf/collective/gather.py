"""Gather: everybody's object to the root. All-to-all: an object from everybody to everybody."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.devices import wanted_device
from aiorlinf.collective.notes import ALL, ROOT, Cause, Note, Step
from aiorlinf.collective.operation import Operation
from aiorlinf.collective.spread import give_up
from aiorlinf.errors import AiorlinfError, PeerError, UnsupportedObject, UsageError, WireError
from aiorlinf.link.lending import INLINE_BYTES, Stores, put_down, take_leaves
from aiorlinf.plans.exchange import Transfer, plan_all_to_all, plan_gather
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.tree import assemble

if TYPE_CHECKING:
    from aiorlinf.collective.circle import Circle
    from aiorlinf.link.staging import Departure
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.base import AsyncWork

__all__ = ["AllToAll", "GatherMember", "GatherRoot", "Part"]

_LENT_MAX_BYTES = 64 << 20
"""Parts are put down for a receiver who has not asked yet; no more, if he holds so much of our memory already."""


class Part(NamedTuple):
    """An object that goes to one member.

    Attributes:
        message: it, encoded if it is small, else taken apart and held.
        head: its description, if it was taken apart.
        departure: how far the caller's streams had come, if some of its tensors are on accelerators.
        versions: the version counters of its tensors at the call, if it was taken apart.
    """

    message: bytes | Flat
    head: bytes = b""
    departure: Departure | None = None
    versions: tuple[int, ...] = ()


class _Exchange(Operation):
    """What gather and all-to-all have in common: parts that go straight from one member to another.

    A small one rides in a note. One of middling size is put down where a receiver on the same host can see it, and the note says where; it
    is kept until he says that he could look at it, or that he has everything. All others are messages of their own.

    Attributes:
        confirms: who gives parts waits for a word about each.

    Args:
        parts: ours, by receiver.
        own: what we keep for ourselves, if we are among the receivers.
        collect: the errors of members are results like others.
    """

    confirms: ClassVar[bool] = False

    def __init__(
        self,
        circle: Circle,
        timeout: float | None,
        transfers: Sequence[Transfer],
        parts: Mapping[WorkerAddress, Part],
        own: Any,
        collect: bool,
    ) -> None:
        super().__init__(circle, timeout)
        rank = circle.members.index(circle.local)
        self._collect = collect
        self._parts = dict(parts)
        self._targets = [circle.members[transfer.target] for transfer in transfers if transfer.source == rank]
        self._missing = {circle.members[transfer.source] for transfer in transfers if transfer.target == rank}
        self._results: dict[WorkerAddress, Any] = {circle.local: own}
        self._errors: dict[WorkerAddress, AiorlinfError] = {}
        self._lent: dict[WorkerAddress, tuple[Flat, bytes]] = {}
        self._shown: deque[tuple[WorkerAddress, Any]] = deque()
        self._sends: list[tuple[int, AsyncWork[None]]] = []
        self._receiving: dict[WorkerAddress, tuple[int, AsyncWork[Any]]] = {}
        self._device = wanted_device(circle.exchange)

    def waits_for(self) -> Iterable[WorkerAddress]:
        return [member for member in self.circle.others if member in self._missing or member in self._lent]

    def lost(self, peer: WorkerAddress, error: AiorlinfError) -> None:
        if peer in self._receiving:
            return  # it may all be here already; if it is not, the receive fails
        if self._collect:
            self._not_wanted(peer)
        if self._collect and peer in self._missing and not any(sender == peer for sender, _ in self._notes):
            self._settle(peer, Cause.of(error, self.circle.local).error(self.name, self.circle.local), failed=True)
        else:
            super().lost(peer, error)

    def failed_elsewhere(self, sender: WorkerAddress, cause: Cause) -> None:
        if self._collect:
            self._not_wanted(sender)
        if self._collect and sender in self._missing:
            self._settle(sender, cause.error(self.name, self.circle.local), failed=True)
        elif not self._collect or sender not in self._results:
            super().failed_elsewhere(sender, cause)

    def _settle(self, member: WorkerAddress, result: Any, *, failed: bool = False) -> None:
        self._missing.discard(member)
        self._results[member] = result
        if failed:
            self._errors[member] = result
        self.nudge()

    # ---- what we give

    def _send_parts(self) -> None:
        """All at once, in the order of the plan."""
        for target in self._targets:
            message, head, departure, versions = self._parts.pop(target)
            if isinstance(message, bytes):
                self.tell(target, Step.PART, {}, message)
                continue
            if message.versions() != versions:
                raise UsageError(f"a tensor was written to before its {self.name} was over", hint="wait for it before you go on")
            told = None if departure is not None else self._put_down(target, message, head)
            if told is None:
                self._send_large(target, message, head, departure)
            else:
                self._lent[target] = (message, head)
                self.tell(target, Step.PART, {"lent": True}, told)

    def _put_down(self, target: WorkerAddress, flat: Flat, head: bytes) -> bytes | None:
        total = flat.payload_bytes
        link = self.circle.exchange.table.peek(target)
        if link is None or link.shared_out is None or not 0 < total <= INLINE_BYTES or link.shared_out.lent_bytes + total > _LENT_MAX_BYTES:
            return None
        return put_down(link, flat, head, total)

    def _send_large(self, target: WorkerAddress, flat: Flat, head: bytes, departure: Departure | None) -> None:
        slot = self.circle.take_slot()
        self.tell(target, Step.PART, {"slot": slot})
        work = self.circle.exchange.send_flat(target, self.circle.context, slot, flat, head, departure)
        self._sends.append((slot, work))
        work.add_done_callback(_look)

    def _answered(self, sender: WorkerAddress, step: str) -> None:
        """Whether what we put down could be looked at."""
        lent = self._lent.pop(sender, None)
        if lent is not None and step == Step.AGAIN:
            self._send_large(sender, *lent, None)

    def _not_wanted(self, member: WorkerAddress) -> None:
        if self._lent.pop(member, None) is not None:
            self.nudge()

    async def _until_sent(self) -> None:
        """What was sent may be written to again."""
        while self._lent:
            told = await self.next()
            if told is not None:
                self._hear(*told)
        while self._sends:
            slot, work = self._sends[0]
            try:
                await work
            except AiorlinfError:
                # Whoever did not get it says so himself, or is gone.
                if not self._collect:
                    raise
            else:
                self.circle.give_slot(slot)
            del self._sends[0]

    # ---- what we get

    async def _receive_parts(self) -> None:
        while self._missing:
            told = await self.next()
            if told is not None:
                self._hear(*told)
            while self._shown:
                self._look()

    def _hear(self, sender: WorkerAddress, note: Note) -> None:
        if note.step in (Step.TAKEN, Step.AGAIN):
            self._answered(sender, note.step)
        elif note.step != Step.PART or sender not in self._missing:
            self.circle.dispose(sender, note)
        elif "slot" in note.facts:
            self._receive_large(sender, note.number("slot"))
        elif "lent" in note.facts:
            take_leaves(
                self.circle.exchange.table.peek(sender), bytes(note.body), lambda manifest, stores: self._see(sender, manifest, stores)
            )
        else:
            self._receive_small(sender, note)

    def _see(self, sender: WorkerAddress, manifest: Manifest, stores: Stores | None) -> None:
        """What was put down for us is before our eyes, or cannot be seen. At once or later."""
        if not self.over:
            allow_pickle = self.circle.exchange.config.allow_pickle
            make = None if stores is None else functools.partial(assemble, manifest, stores, allow_pickle=allow_pickle)
            self._shown.append((sender, make))
            self.nudge()

    def _look(self) -> None:
        # The payload has no name here: the frames of an error that its rebuilding raises would keep it for as long as the error is kept.
        sender = self._shown[0][0]
        if self._shown[0][1] is None:
            self._shown.popleft()
            self.tell(sender, Step.AGAIN)
            return
        if self.confirms:
            self.tell(sender, Step.TAKEN)
        self._settle_or_refuse(sender, self._shown.popleft()[1])

    def _receive_large(self, sender: WorkerAddress, slot: int) -> None:
        work = self.circle.exchange.recv_to(sender, self.circle.context, slot, None, self._device)
        self._receiving[sender] = (slot, work)
        self.spawn(self._await_large(sender, work), f"{self.name} from {sender}")

    async def _await_large(self, sender: WorkerAddress, work: AsyncWork[Any]) -> None:
        try:
            value = await work
        except AiorlinfError as error:
            del self._receiving[sender]
            self._refuse(sender, error)
        else:
            del self._receiving[sender]
            if sender in self._missing:
                self._settle(sender, value)

    def _receive_small(self, sender: WorkerAddress, note: Note) -> None:
        allow_pickle = self.circle.exchange.config.allow_pickle
        self._settle_or_refuse(sender, lambda: decode_inline(memoryview(note.body), allow_pickle=allow_pickle))

    def _settle_or_refuse(self, sender: WorkerAddress, make: Callable[[], Any]) -> None:
        try:
            value = _made(make)
        except AiorlinfError as error:
            del make
            for each in (error, error.__cause__):
                if each is not None:
                    clear_frames(each.__traceback__)  # as in `_look`
            self._refuse(sender, error)
        else:
            self._settle(sender, value)

    def _refuse(self, sender: WorkerAddress, error: AiorlinfError) -> None:
        """What the member sent cannot be had."""
        if not self._collect:
            raise error
        error.__traceback__ = error.__context__ = None  # as in `fail`
        if sender in self._missing:
            self._settle(sender, error, failed=True)

    def _leave(self) -> None:
        self._lent.clear()
        self._shown.clear()
        give_up([work for _, work in self._sends])
        give_up([work for _, work in self._receiving.values()])
        for sender, (slot, _) in self._receiving.items():
            self.circle.drain(sender, slot)  # what was waited for has gone back
        self._receiving.clear()
        super()._leave()

    def _in_order(self) -> list[Any]:
        results, self._results = self._results, {}
        return [results[member] for member in self.circle.members]


class GatherRoot(_Exchange):
    """At the one who gets everybody's object."""

    name = "gather"
    domain = ROOT
    coordinates = True

    def __init__(self, circle: Circle, timeout: float | None, own: Any, collect: bool) -> None:
        transfers = plan_gather(len(circle.members), circle.members.index(circle.local))
        super().__init__(circle, timeout, transfers, {}, own, collect)

    def peers(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        return self.circle.local, peer

    def audience(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    async def run(self) -> None:
        await self._receive_parts()
        for member in self.circle.others:
            error = self._errors.get(member)
            if error is None:
                self.tell(member, Step.DONE)
            elif not isinstance(error, PeerError):  # otherwise it is gone, or has failed itself
                self.tell(member, Step.FAIL, Cause.of(error, self.circle.local).facts())
        self.finish(self._in_order())


class GatherMember(_Exchange):
    """At one who gives his object."""

    name = "gather"
    domain = ROOT

    def __init__(self, circle: Circle, timeout: float | None, root: WorkerAddress, part: Part | None) -> None:
        transfers = plan_gather(len(circle.members), circle.members.index(root))
        super().__init__(circle, timeout, transfers, {} if part is None else {root: part}, None, False)
        self._root = root
        self._missing = {root}

    def peers(self) -> Iterable[WorkerAddress]:
        return (self._root,)

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        return self._root, self.circle.local

    def audience(self) -> Iterable[WorkerAddress]:
        return (self._root,)

    async def run(self) -> None:
        self._send_parts()
        while self._missing:
            told = await self.next()
            if told is None:
                continue
            sender, note = told
            if note.step == Step.DONE:
                self._missing.clear()
                self._lent.clear()
            else:
                self._hear(sender, note)
        await self._until_sent()


class AllToAll(_Exchange):
    """At everybody."""

    name = "all_to_all"
    domain = ALL
    confirms = True

    def __init__(self, circle: Circle, timeout: float | None, parts: Mapping[WorkerAddress, Part], own: Any, collect: bool) -> None:
        super().__init__(circle, timeout, plan_all_to_all(len(circle.members)), parts, own, collect)

    def peers(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        first, second = sorted((self.circle.local, peer))
        return first, second

    def audience(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    async def run(self) -> None:
        self._send_parts()
        await self._receive_parts()
        await self._until_sent()
        self.finish(self._in_order())


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (UsageError, WireError):
        raise
    except Exception as error:  # the classes' own code runs here and may raise anything
        raise UnsupportedObject(
            f"the object cannot be rebuilt here: {type(error).__name__}: {error}", hint="its class must be importable on all members"
        ) from error


def _look(work: AsyncWork[Any]) -> None:
    if not work.cancelled():
        work.exception()
