"""Broadcast: one object to all members.

The root knows where everybody is, plans the way and sends it along. Who gets the object hands it on, and tells the root that he has it;
the root's work is done when all have. A large payload is copied once at the root, once for each further host, and on the way into a
receiver's own tensors (`into`). What lies on an accelerator is not even that where a receiver can read it there (`device_loans`), and it
comes once to any other accelerator, however many receivers share that (`device_shares`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.backends.shm.regions import ALIGNMENT
from aiorlinf.collective.bulk import Bulk, split
from aiorlinf.collective.device_loans import Lender, Unreadable, give_up, read_loan
from aiorlinf.collective.device_shares import lend_on, lent_through, on_devices, set_apart, survey
from aiorlinf.collective.devices import brought_home, landed, wanted_device
from aiorlinf.collective.into import Target
from aiorlinf.collective.notes import ROOT, Key, Note, Step
from aiorlinf.collective.operation import Operation
from aiorlinf.collective.route import Route, routes_of, routes_to_list
from aiorlinf.collective.spread import Relay, receive_pieces
from aiorlinf.errors import UnsupportedObject, UsageError, WireError
from aiorlinf.link.placement import packed_size
from aiorlinf.plans.broadcast import Place, plan_broadcast
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.manifest import Limits, Manifest, decode_manifest, encode_manifest
from aiorlinf.wire.tree import rebuild

if TYPE_CHECKING:
    import torch

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
        self._lent: dict[WorkerAddress, Route] = {}  # who reads our devices, or a keeper's, until he says how that went

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
        hosts = {member: place.host for member, place in zip(circle.members, places, strict=True)}
        facts: dict[str, Any] = {"root": circle.local, "partial": self._partial}
        total = 0
        if flat is not None:
            facts["total"] = total = _packed([leaf.nbytes for leaf in flat.leaves])
        lender = await self._lend(flat, facts, hosts, [Route(*member) for member in members])
        rest = [other for other in range(len(members)) if members[other][0] not in self._lent]
        plan = plan_broadcast([places[other] for other in rest], rest.index(rank), bulk=flat is not None)
        routes = Route.plan(plan, [members[other] for other in rest])
        if small is not None:
            relay = Relay(self, circle.local, circle.life, routes, facts, small)
            relay.pass_small()
        else:
            assert flat is not None
            relay = Relay(self, circle.local, circle.life, routes, facts, encode_manifest(flat))
            if routes or not self._lent:
                relay.pass_bulk(await self._pack(flat, total, list(hosts.values()).count(places[rank].host) > 1))
        message = None
        while self._missing:
            if not self._lent:
                flat = self._departure = None
            told = await self.next()
            if told is None:
                continue
            sender, note = told
            if note.step == Step.DONE:
                self._missing.discard(sender)
            if note.facts.get("aside"):
                lender.answer(sender, note)
                continue
            if "for" in note.facts:  # a keeper cannot lend it to them
                for taken in self._taken_back(note):
                    if flat is not None:
                        await self._otherwise(relay, taken, flat)
                continue
            route = self._lent.pop(sender, None) if note.step in (Step.TAKEN, Step.AGAIN) else None
            if route is None or flat is None:
                relay.answer(sender, note)
            elif note.step == Step.TAKEN:
                lender.answer(sender, note)
                self._check(flat)
                self.tell(sender, Step.DONE)
            else:
                self._blame(sender, note)
                await self._otherwise(relay, route, flat)
        if self._noted is not None:
            circle.changes.remember(self._noted)
        self.finish(self._value)

    # ---- to those who read devices

    async def _lend(self, flat: Flat | None, facts: dict[str, Any], hosts: dict[WorkerAddress, str], members: Sequence[Route]) -> Lender:
        """To those who can read it, here or at a keeper: they are `_lent` from then on."""
        circle, departure = self.circle, self._departure
        lender = Lender(self, circle.local, circle.life, facts)
        if flat is None or departure is None:
            return lender
        found = await survey(circle, flat, departure, hosts)
        self._lent = {route.address: route for route in members if route.address in found.others or route.address in found.readers}
        if found.shares:
            facts["shares"] = {str(keeper): routes_to_list([self._lent[each] for each in share]) for keeper, share in found.shares.items()}
        if found.readers:
            try:
                await lender.lend(flat, departure, encode_manifest(flat), [self._lent[member] for member in found.readers])
            except RuntimeError as error:
                for member in found.readers:
                    give_up(circle, member, str(error))
                    del self._lent[member]
        return lender

    def _taken_back(self, note: Note) -> list[Route]:
        named = note.facts["for"]
        return [self._lent.pop(member) for member in list(self._lent) if isinstance(named, list) and member in named]

    def _blame(self, member: WorkerAddress, note: Note) -> None:
        """It says why nobody need try again, if that is so."""
        why = note.text("why")
        if why and "lender" in note.facts:
            set_apart(self.circle, note.text("lender"), member, why)
        elif why:
            give_up(self.circle, member, why)

    async def _otherwise(self, relay: Relay, route: Route, flat: Flat) -> None:
        """It cannot read it: it gets it as everybody else."""
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
        self._followers: tuple[Route, ...] = ()  # they share our device, and have the object from us

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
            if note.facts.get("aside") is True:  # it belongs to what could not be read
                self.circle.dispose(sender, note)
                continue
            self._followers = lent_through(note, self.circle.local)
            routes = routes_of(note.facts.get("way"))
            partial = note.facts.get("partial") is True
            relay = Relay(
                self, self._root, note.lives.get(self._root, 0), routes, {k: note.facts[k] for k in _KEPT if k in note.facts}, note.body
            )
            if "loan" in note.facts:
                try:
                    value, lendable, manifest_bytes = await self._read(sender, note, partial)
                except Unreadable as reason:
                    self.tell(self._root, Step.AGAIN, {"why": str(reason), **({} if sender == self._root else {"lender": sender})})
                    continue  # the root sends it otherwise
                self.tell(self._root, Step.TAKEN)
                while told is None or told[1].step != Step.DONE:  # only now is it known that nobody has written to it meanwhile
                    told = await self.next()
                await self._have_all(relay, note, value, lendable, manifest_bytes)
                del lendable
                break
            if "total" not in note.facts:
                relay.pass_small()
                value = self._decode_small(note)
                self._have(value if self._into is None else await self._into.fill(self.circle.exchange.home, value, partial))
                break
            manifest, total = self._manifest(note)
            if "place" in note.facts:
                array = await self._borrow(sender, note, total)
                self._answer(sender, note, Step.AGAIN if array is None else Step.TAKEN)
                if array is None:
                    continue  # the sender tries otherwise
            else:
                array = await self._take_pieces(sender, note, total, relay, bool(routes))
            await self._give(relay, note, manifest, array, partial)
            del array
            break
        while relay.busy:
            told = await self.next()
            if told is not None:
                relay.answer(*told)

    # ---- the ways it may come

    async def _read(self, sender: WorkerAddress, note: Note, partial: bool) -> tuple[Any, Flat | None, bytes]:
        """From the lender's devices. Gives also what can be lent to others, and the encoded manifest."""
        before = note.number("handles") + note.number("beside")
        body = memoryview(note.body)
        told = bytes(body[before:])
        try:
            manifest = self._described(told)
            aside = await self._take_aside(sender) if "aside" in note.facts else None
        except BaseException:
            self.circle.dispose(sender, note)
            raise
        described = (body[:before], manifest)
        value, leaves = await read_loan(self.circle, sender, note, described, aside, self._into, self._device, partial)
        return value, on_devices(manifest, leaves) if self._followers else None, told

    async def _take_aside(self, sender: WorkerAddress) -> Any:
        """What the lender has in CPU memory."""
        while True:
            told = await self.next()
            if told is None:
                continue
            other, note = told
            if other != sender or note.step != Step.HEAD or note.facts.get("aside") is not True:
                self.circle.dispose(other, note)
                continue
            total = note.number("total")
            if "place" not in note.facts:
                return await self._take_pieces(sender, note, total, None, False)
            array = await self._borrow(sender, note, total)
            self._answer(sender, note, Step.AGAIN if array is None else Step.TAKEN)
            if array is not None:
                return array

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

    async def _take_pieces(self, sender: WorkerAddress, note: Note, total: int, relay: Relay | None, hands_on: bool) -> Any:
        circle = self.circle
        try:
            bulk = await Bulk.make(circle.exchange.table, total, shared=hands_on)
        except BaseException:
            circle.dispose(sender, note)
            raise
        if relay is not None:
            relay.pass_bulk(bulk)
        await receive_pieces(circle, sender, note.number("slot"), max(1, note.number("piece")), bulk)
        if bulk.region is None and relay is not None:
            # What the user gets is the memory that is being handed on.
            while relay.busy:
                told = await self.next()
                if told is not None:
                    relay.answer(*told)
        return bulk.own() if self._into is None else bulk.array

    def _answer(self, sender: WorkerAddress, note: Note, step: str) -> None:
        facts = {"aside": True} if note.facts.get("aside") else {}
        if sender == self._root:
            if step != Step.TAKEN:  # the root is told that we have everything
                self.tell(sender, step, facts)
            return
        key = note.facts.get("answer")
        if not isinstance(key, list) or len(key) != 4:
            raise WireError("a broadcast came from a neighbour who does not say how to answer")
        self.circle.tell(sender, Note(Key(*key), step, {}, {"op": self.name, "of": self.circle.digest, **facts}))

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

    async def _rebuild(self, manifest: Manifest, array: Any) -> tuple[Any, list[torch.Tensor]]:
        exchange = self.circle.exchange
        leaves = split(array, [spec.nbytes for spec in manifest.specs])
        if manifest.on_devices and self._into is None:
            leaves = await landed(exchange.home, manifest, leaves, self._device)

        def build() -> Any:
            return rebuild(manifest, leaves, allow_pickle=exchange.config.allow_pickle)

        if manifest.codec_bytes <= _HEAVY_SKELETON_BYTES:
            return _decoded(build), leaves
        return await exchange.home.submit(_decoded, build), leaves

    async def _give(self, relay: Relay, note: Note, manifest: Manifest, array: Any, partial: bool) -> None:
        """All bytes of the object are here."""
        value, leaves = await self._rebuild(manifest, array)
        lendable = on_devices(manifest, leaves, self._into, value, partial) if self._followers else None
        if self._into is not None:
            value = await self._into.fill(self.circle.exchange.home, value, partial)
        await self._have_all(relay, note, value, lendable, bytes(note.body))

    async def _have_all(self, relay: Relay, note: Note, value: Any, lendable: Flat | None, manifest: bytes) -> None:
        """The object is here; those who share our device get it before we have it."""
        if self._followers:
            root = (self._root, note.lives.get(self._root, 0))
            facts = {k: note.facts[k] for k in ("root", "partial", "total")}
            await lend_on(self, root, self._followers, lendable, manifest, facts, relay.answer)
        self._have(value)

    def _have(self, value: Any) -> None:
        self._has = True
        self.tell(self._root, Step.DONE)
        self.give(value)


_KEPT = ("root", "partial", "total", "shares")


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
