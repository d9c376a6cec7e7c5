"""Gather: everybody's object to the root. All-to-all: an object from everybody to everybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.devices import wanted_device
from aiorlinf.collective.notes import ALL, ROOT, Cause, Note, Step
from aiorlinf.collective.operation import Operation
from aiorlinf.collective.spread import give_up
from aiorlinf.errors import AiorlinfError, PeerError, UnsupportedObject, UsageError, WireError
from aiorlinf.plans.exchange import Transfer, plan_all_to_all, plan_gather
from aiorlinf.wire.inline import decode_inline

if TYPE_CHECKING:
    from aiorlinf.collective.circle import Circle
    from aiorlinf.link.staging import Departure
    from aiorlinf.wire.flat import Flat
    from aiorlinf.work.base import AsyncWork

__all__ = ["AllToAll", "GatherMember", "GatherRoot", "Part"]


class Part(NamedTuple):
    """An object that goes to one member.

    Attributes:
        message: it, encoded if it is small, else taken apart and held.
        departure: how far the caller's streams had come, if some of its tensors are on accelerators.
        versions: the version counters of its tensors at the call, if it was taken apart.
    """

    message: bytes | Flat
    departure: Departure | None = None
    versions: tuple[int, ...] = ()


class _Exchange(Operation):
    """What gather and all-to-all have in common: parts that go straight from one member to another.

    Args:
        parts: ours, by receiver.
        own: what we keep for ourselves, if we are among the receivers.
        collect: the errors of members are results like others.
    """

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
        self._sends: list[tuple[int, AsyncWork[None]]] = []
        self._receiving: dict[WorkerAddress, tuple[int, AsyncWork[Any]]] = {}
        self._device = wanted_device(circle.exchange)

    def waits_for(self) -> Iterable[WorkerAddress]:
        return [member for member in self.circle.others if member in self._missing]

    def lost(self, peer: WorkerAddress, error: AiorlinfError) -> None:
        if peer in self._receiving:
            return  # it may all be here already; if it is not, the receive fails
        if self._collect and peer in self._missing and not any(sender == peer for sender, _ in self._notes):
            self._settle(peer, Cause.of(error, self.circle.local).error(self.name, self.circle.local), failed=True)
        else:
            super().lost(peer, error)

    def failed_elsewhere(self, sender: WorkerAddress, cause: Cause) -> None:
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

    def _send_parts(self) -> None:
        """All at once, in the order of the plan."""
        for target in self._targets:
            message, departure, versions = self._parts.pop(target)
            if isinstance(message, bytes):
                self.tell(target, Step.PART, {}, message)
                continue
            if message.versions() != versions:
                raise UsageError(f"a tensor was written to before its {self.name} was over", hint="wait for it before you go on")
            slot = self.circle.take_slot()
            self.tell(target, Step.PART, {"slot": slot})
            work = self.circle.exchange.send_flat(target, self.circle.context, slot, message, departure)
            self._sends.append((slot, work))
            work.add_done_callback(_look)

    async def _receive_parts(self) -> None:
        while self._missing:
            told = await self.next()
            if told is None:
                continue
            sender, note = told
            if note.step != Step.PART or sender not in self._missing:
                self.circle.dispose(sender, note)
            elif "slot" in note.facts:
                self._receive_large(sender, note.number("slot"))
            else:
                self._receive_small(sender, note)

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
        try:
            value = self._decode(note)
        except AiorlinfError as error:
            self._refuse(sender, error)
        else:
            self._settle(sender, value)

    def _refuse(self, sender: WorkerAddress, error: AiorlinfError) -> None:
        """What the member sent cannot be had."""
        if not self._collect:
            raise error
        if sender in self._missing:
            self._settle(sender, error, failed=True)

    def _decode(self, note: Note) -> Any:
        try:
            return decode_inline(memoryview(note.body), allow_pickle=self.circle.exchange.config.allow_pickle)
        except (UsageError, WireError):
            raise
        except Exception as error:  # the classes' own code runs here and may raise anything
            raise UnsupportedObject(
                f"the object cannot be rebuilt here: {type(error).__name__}: {error}", hint="its class must be importable on all members"
            ) from error

    async def _until_sent(self) -> None:
        """What was sent may be written to again."""
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

    def _leave(self) -> None:
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
            if told is not None and told[1].step == Step.DONE:
                self._missing.clear()
        await self._until_sent()


class AllToAll(_Exchange):
    """At everybody."""

    name = "all_to_all"
    domain = ALL

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


def _look(work: AsyncWork[Any]) -> None:
    if not work.cancelled():
        work.exception()
