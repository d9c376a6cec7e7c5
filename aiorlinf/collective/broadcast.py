"""Broadcast: one object to all members.

The root knows where everybody is, plans the way and sends it along. Who gets the object hands it on, and tells the root that he has it;
the root's work is done when all have. A large payload is copied once at the root, once for each further host, and on the way into a
receiver's own tensors (`into`). What lies on an accelerator is not even that where a receiver can read it there (`device_loans`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.backends.shm.regions import ALIGNMENT
from aiorlinf.collective.bulk import Bulk, split
from aiorlinf.collective.device_loans import Offer, Unreadable, give_up, read_loan, readers
from aiorlinf.collective.devices import brought_home, landed, wanted_device
from aiorlinf.collective.into import Target
from aiorlinf.collective.notes import ROOT, Key, Note, Step
from aiorlinf.collective.operation import Operation
from aiorlinf.collective.route import Route, routes_of
from aiorlinf.collective.spread import Relay, receive_pieces
from aiorlinf.errors import UnsupportedObject, UsageError, WireError
from aiorlinf.link.placement import packed_size
from aiorlinf.plans.broadcast import Place, plan_broadcast
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.manifest import Limits, Manifest, decode_manifest, encode_manifest
from aiorlinf.wire.tree import rebuild

if TYPE_CHECKING:
    from aiorlinf.collective.circle import Circle
    from aiorlinf.link.staging import Departure
    from aiorlinf.wire.flat import Flat

__all__ = ["BroadcastMember", "BroadcastRoot"]

_HEAVY_SKELETON_BYTES = 64 * 1024


class BroadcastRoot(Operation):
    """At the one who has the object.

    Args:
        value: what the work gives: the object itself.
        message: the object, taken apart.
        partial: it holds only what has changed.
        noted: what `Changes` is to remember once all have it.
        departure: those of its leaves that are on accelerators, None if there are none.
    """

    name = "broadcast"
    domain = ROOT
    coordinates = True

    def __init__(
        self,
        circle: Circle,
        timeout: float | None,
        value: Any,
        message: bytes | Flat | None,
        partial: bool = False,
        noted: Any = None,
        departure: Departure | None = None,
    ) -> None:
        super().__init__(circle, timeout)
        self._value = value
        self._message = message
        self._partial = partial
        self._noted = noted
        self._departure = departure
        self._versions = None if message is None or isinstance(message, bytes) else message.versions()
        self._missing = set(circle.others)
        self._lent: dict[WorkerAddress, Route | None] = {}  # who reads our devices, until he says how that went

    def peers(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        return self.circle.local, peer

    def waits_for(self) -> Iterable[WorkerAddress]:
        return [member for member in self.circle.others if member in self._missing]

    def audience(self) -> Iterable[WorkerAddress]:
        return self.circle.others

    async def run(self) -> None:
        circle = self.circle
        message, self._message = self._message, None
        assert message is not None
        circle.changes.clear()  # until all have what is sent now
        records = await circle.records()
        members = [
            (member, records[member].incarnation, 0 if member == circle.local else self.keys[member].number) for member in circle.members
        ]
        places = [Place(records[member].host_id, records[member].labels.get("rack", "")) for member in circle.members]
        rank = circle.members.index(circle.local)
        small, flat = (message, None) if isinstance(message, bytes) else (None, message)
        near = [member for member, place in zip(circle.members, places, strict=True) if place.host == places[rank].host]
        offer = None if flat is None else await self._offer(flat, [member for member in near if member != circle.local])
        rest = [other for other in range(len(members)) if members[other][0] not in self._lent]
        plan = plan_broadcast([places[other] for other in rest], rest.index(rank), bulk=flat is not None)
        routes = Route.plan(plan, [members[other] for other in rest])
        facts: dict[str, Any] = {"root": circle.local, "partial": self._partial}
        if small is not None:
            relay = Relay(self, circle.local, circle.life, routes, facts, small)
            relay.pass_small()
        else:
            assert flat is not None
            total = _packed([leaf.nbytes for leaf in flat.leaves])
            relay = Relay(self, circle.local, circle.life, routes, {**facts, "total": total}, encode_manifest(flat))
            if offer is not None:
                self._lend(relay, offer, members)
            if routes or offer is None:
                relay.pass_bulk(await self._pack(flat, total, len(near) > 1))
        offer = message = None
        while self._missing:
            if not self._lent:
                flat = self._departure = None
            told = await self.next()
            if told is None:
                continue
            sender, note = told
            if note.step == Step.DONE:
                self._missing.discard(sender)
            route = self._lent.pop(sender, None) if note.step in (Step.TAKEN, Step.AGAIN) else None
            if route is None or flat is None:
                relay.answer(sender, note)
            elif note.step == Step.TAKEN:
                self._check(flat)
                self.tell(sender, Step.DONE)
            else:
                await self._otherwise(relay, route, note, flat)
        if self._noted is not None:
            circle.changes.remember(self._noted)
        self.finish(self._value)

    # ---- to those who read the root's devices

    async def _offer(self, flat: Flat, near: Sequence[WorkerAddress]) -> Offer | None:
        """What is lent to those of our host who can read it, who are `_lent` from then on."""
        circle, departure = self.circle, self._departure
        able = [] if departure is None else await readers(circle, flat, departure, near)
        if departure is None or not able:
            return None
        try:
            offer = Offer(flat, departure, encode_manifest(flat))
        except RuntimeError as error:
            for member in able:
                give_up(circle, member, str(error))
            return None
        self._lent = dict.fromkeys(able)
        return offer

    def _lend(self, relay: Relay, offer: Offer, members: Sequence[tuple[WorkerAddress, int, int]]) -> None:
        for address, life, number in members:
            if address not in self._lent:
                continue
            route = self._lent[address] = Route(address, life, number)
            lent = offer.lend(self.circle, address)
            if lent is not None:  # else the end of its link is ours, too
                relay.head(route, lent, offer.body)

    async def _otherwise(self, relay: Relay, route: Route, note: Note, flat: Flat) -> None:
        """It cannot read it: it gets it as everybody else."""
        if note.facts.get("why"):
            give_up(self.circle, route.address, note.text("why"))
        if relay.bulk is None:
            relay.pass_bulk(await self._pack(flat, _packed([leaf.nbytes for leaf in flat.leaves]), shared=True))
        relay.add(route)

    # ---- to all others

    async def _pack(self, flat: Flat, total: int, shared: bool) -> Bulk:
        exchange, departure = self.circle.exchange, self._departure
        leaves = flat.leaves if departure is None else (await brought_home(exchange.home, departure)).leaves
        bulk = await Bulk.make(exchange.table, total, shared=shared)
        await bulk.pack(exchange.home, leaves)
        self._check(flat)
        return bulk

    def _check(self, flat: Flat) -> None:
        if flat.versions() != self._versions:
            raise UsageError("a tensor was written to while it was being broadcast", hint="wait for the broadcast before you go on")


class BroadcastMember(Operation):
    """At one who gets it."""

    name = "broadcast"
    domain = ROOT

    def __init__(self, circle: Circle, timeout: float | None, root: WorkerAddress, into: Target | None) -> None:
        super().__init__(circle, timeout)
        self._root = root
        self._into = into
        self._device = wanted_device(circle.exchange)
        self._has = False

    def peers(self) -> Iterable[WorkerAddress]:
        return (self._root,)

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        return self._root, self.circle.local

    def waits_for(self) -> Iterable[WorkerAddress]:
        return () if self._has else (self._root,)

    def audience(self) -> Iterable[WorkerAddress]:
        return (self._root,)

    async def run(self) -> None:
        while True:
            told = await self.next()
            if told is None:
                continue
            sender, note = told
            if note.step != Step.HEAD:
                continue
            routes = routes_of(note.facts.get("way"))
            partial = note.facts.get("partial") is True
            relay = Relay(
                self, self._root, note.lives.get(self._root, 0), routes, {k: note.facts[k] for k in _KEPT if k in note.facts}, note.body
            )
            if "loan" in note.facts:
                try:
                    value = await self._read(sender, note, partial)
                except Unreadable as reason:
                    self.tell(sender, Step.AGAIN, {"why": str(reason)})
                    continue  # the root sends it otherwise
                self.tell(sender, Step.TAKEN)
                while told is None or told[1].step != Step.DONE:  # only now is it known that nobody has written to it meanwhile
                    told = await self.next()
                self._have(value)
                break
            if "total" not in note.facts:
                relay.pass_small()
                await self._give(self._decode_small(note), partial)
                break
            manifest, total = self._manifest(note)
            if "place" in note.facts:
                array = await self._borrow(sender, note, total)
                self._answer(sender, note, Step.AGAIN if array is None else Step.TAKEN)
                if array is None:
                    continue  # the sender tries otherwise
                await self._give(await self._rebuild(manifest, array), partial)
            else:
                await self._take_pieces(sender, note, manifest, total, relay, bool(routes), partial)
            break
        while relay.busy:
            told = await self.next()
            if told is not None:
                relay.answer(*told)

    # ---- the ways it may come

    async def _read(self, sender: WorkerAddress, note: Note, partial: bool) -> Any:
        """From the root's devices."""
        before = note.number("handles") + note.number("beside")
        body = memoryview(note.body)
        try:
            manifest = self._described(bytes(body[before:]))
        except WireError:
            self.circle.dispose(sender, note)
            raise
        return await read_loan(self.circle, sender, note, (body[:before], manifest), self._into, self._device, partial)

    async def _borrow(self, sender: WorkerAddress, note: Note, total: int) -> Any:
        """The sender's memory, None if it cannot be used. What is only copied from need not be our own."""
        link = self.circle.exchange.table.peek(sender)
        shared = None if link is None else link.receiver.shared
        if shared is None:
            return None
        found: asyncio.Future[Any] = self.circle.exchange.home.loop.create_future()

        def placed(views: Any) -> None:
            if not found.done():
                found.set_result(None if views is None else views[0].numpy())

        try:
            place = memoryview(bytes.fromhex(note.text("place")))
        except ValueError:
            raise WireError("the place of a broadcast in shared memory is malformed") from None
        shared.place([total], place, placed, private=self._into is None)
        return await found

    async def _take_pieces(
        self, sender: WorkerAddress, note: Note, manifest: Manifest, total: int, relay: Relay, hands_on: bool, partial: bool
    ) -> None:
        circle = self.circle
        try:
            bulk = await Bulk.make(circle.exchange.table, total, shared=hands_on)
        except BaseException:
            circle.dispose(sender, note)
            raise
        relay.pass_bulk(bulk)
        await receive_pieces(circle, sender, note.number("slot"), max(1, note.number("piece")), bulk)
        if bulk.region is None:
            # What the user gets is the memory that is being handed on.
            while relay.busy:
                told = await self.next()
                if told is not None:
                    relay.answer(*told)
        array = bulk.own() if self._into is None else bulk.array
        del bulk
        await self._give(await self._rebuild(manifest, array), partial)

    def _answer(self, sender: WorkerAddress, note: Note, step: str) -> None:
        if sender == self._root:
            if step != Step.TAKEN:  # the root is told that we have everything
                self.tell(sender, step)
            return
        key = note.facts.get("answer")
        if not isinstance(key, list) or len(key) != 4:
            raise WireError("a broadcast came from a neighbour who does not say how to answer")
        self.circle.tell(sender, Note(Key(*key), step, {}, {"op": self.name, "of": self.circle.digest}))

    # ---- making the object

    def _decode_small(self, note: Note) -> Any:
        config = self.circle.exchange.config
        return _decoded(lambda: decode_inline(memoryview(note.body), allow_pickle=config.allow_pickle))

    def _manifest(self, note: Note) -> tuple[Manifest, int]:
        manifest = self._described(bytes(note.body))
        total = note.number("total")
        if total != _packed([spec.nbytes for spec in manifest.specs]):
            raise WireError(f"a broadcast of {total} bytes does not fit its description")
        return manifest, total

    def _described(self, body: bytes) -> Manifest:
        config = self.circle.exchange.config
        return decode_manifest(
            body, limits=Limits(max_manifest_bytes=config.max_manifest_bytes, max_message_bytes=config.max_message_bytes)
        )

    async def _rebuild(self, manifest: Manifest, array: Any) -> Any:
        exchange = self.circle.exchange
        leaves = split(array, [spec.nbytes for spec in manifest.specs])
        if manifest.on_devices and self._into is None:
            leaves = await landed(exchange.home, manifest, leaves, self._device)

        def build() -> Any:
            return rebuild(manifest, leaves, allow_pickle=exchange.config.allow_pickle)

        if manifest.codec_bytes <= _HEAVY_SKELETON_BYTES:
            return _decoded(build)
        return await exchange.home.submit(_decoded, build)

    async def _give(self, value: Any, partial: bool) -> None:
        """The object is here."""
        if self._into is not None:
            value = await self._into.fill(self.circle.exchange.home, value, partial)
        self._have(value)

    def _have(self, value: Any) -> None:
        self._has = True
        self.tell(self._root, Step.DONE)
        self.give(value)


_KEPT = ("root", "partial", "total")


def _packed(sizes: Sequence[int]) -> int:
    """Bytes of the payload; there is always something to send."""
    return max(ALIGNMENT, packed_size(sizes))


def _decoded(make: Any) -> Any:
    try:
        return make()
    except (UsageError, WireError):
        raise
    except Exception as error:  # the classes' own code runs here and may raise anything
        raise UnsupportedObject(
            f"the object cannot be rebuilt here: {type(error).__name__}: {error}", hint="its class must be importable on all members"
        ) from error
