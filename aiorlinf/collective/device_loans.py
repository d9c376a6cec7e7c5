"""A broadcast from an accelerator to members that can read the lender's devices themselves: one copy for each, from device to device.

The root exports its tensors once and says to each of them where they lie (HEAD with a `loan`). What lies in CPU memory comes with that if
it is little, and otherwise as any large object does (a HEAD that says `aside`). The member copies into memory of its own, or into the
tensors that it was called with, behind the root's events and behind what its own streams were given; what is on devices does not pass
through host memory. Then the root looks whether anybody has written to the tensors meanwhile (TAKEN), and only when it says that all is
well (DONE) does the member have the object. Who cannot read it says AGAIN, and is sent it as everybody else is.

A member that has got it may be a lender in turn, for those who share its device (`device_shares`); they answer the root all the same.

What is lent is kept until the member's device is through with it, whatever becomes of the two operations: the link sees to that (COPIED).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.backends.cuda_ipc import HANDLES_MAX_BYTES, decode_handles
from aiorlinf.collective.bulk import Bulk, split
from aiorlinf.collective.spread import Relay
from aiorlinf.device.registry import accelerator
from aiorlinf.errors import AiorlinfError, UnsupportedObject, UsageError, WireError
from aiorlinf.link.device_in import device_positions
from aiorlinf.link.device_out import EXPORT_INLINE, Loan, device_leaves, exported
from aiorlinf.link.link import LinkState
from aiorlinf.link.memory import byte_tensor, byte_view, fresh_bytes
from aiorlinf.link.placement import packed_size
from aiorlinf.link.staging import IN, Landing
from aiorlinf.wire.frames import FrameType
from aiorlinf.wire.tree import assemble, rebuild

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.collective.circle import Circle
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.collective.into import Target
    from aiorlinf.collective.notes import Note
    from aiorlinf.collective.operation import Operation
    from aiorlinf.collective.route import Route
    from aiorlinf.device.runtime import Runtime, Shared
    from aiorlinf.link.device_in import DeviceIn, Read
    from aiorlinf.link.device_out import DeviceOut
    from aiorlinf.link.link import Link
    from aiorlinf.link.staging import Departure, Ready
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.leaves import Leaf, LeafSpec
    from aiorlinf.wire.manifest import Manifest

__all__ = ["Lender", "Unreadable", "acquainted", "give_up", "read_loan"]

BESIDE_MAX_BYTES = 1 << 20
"""So much in CPU memory comes in one note with the loan."""


async def acquainted(circle: Circle, members: Sequence[WorkerAddress]) -> dict[WorkerAddress, DeviceOut]:
    """Our links to those of these members who have said what devices they have. Raises the cause if one of the links ends."""
    for member in members:
        circle.exchange.table.obtain(member)  # they connect side by side
    links = [(member, (await circle.link_to(member)).sender.devices) for member in members]
    known = []
    for _, devices in links:
        if devices is not None:
            answer: asyncio.Future[None] = circle.exchange.home.loop.create_future()
            devices.when_known(lambda answer=answer: None if answer.done() else answer.set_result(None))  # type: ignore[misc]
            known.append(answer)
    for answer in known:
        await answer
    return {member: devices for member, devices in links if devices is not None}


class Lender:
    """At one who has the object: it is lent to some members, who read it themselves. Home thread only.

    Args:
        root, root_life, facts: as for a `Relay`.
    """

    def __init__(self, operation: Operation, root: WorkerAddress, root_life: int, facts: dict[str, Any]) -> None:
        self._operation = operation
        self._exchange: Exchange = operation.circle.exchange
        self._root = root
        self._root_life = root_life
        self._facts = facts
        self._aside: Relay | None = None
        self._away: set[WorkerAddress] = set()
        self._ended: Link | None = None

    async def lend(self, flat: Flat, departure: Departure, manifest: bytes, members: Sequence[Route]) -> None:
        """Tell them all where it is. What is large and in CPU memory follows.

        Args:
            departure: of this object, whose tensors on devices are to be read behind it.

        Raises:
            RuntimeError: its memory cannot be shared; nobody was told anything.
        """
        leaves = device_leaves(flat)
        if len(leaves) > EXPORT_INLINE:
            events, handles = await self._exchange.home.submit(exported, departure, leaves)
        else:
            events, handles = exported(departure, leaves)
        if len(handles) > HANDLES_MAX_BYTES:
            raise RuntimeError(f"{len(leaves)} tensors are too many to tell of")
        here = [leaf for leaf in flat.leaves if leaf.memory is None or leaf.memory.is_cpu]
        total = sum(leaf.nbytes for leaf in here)
        much = total > BESIDE_MAX_BYTES
        beside = b"" if much else b"".join([leaf.tobytes() for leaf in here])
        facts = {"handles": len(handles), "beside": len(beside)}
        if much:
            facts["aside"] = packed_size([leaf.nbytes for leaf in here])
        told = Relay(self._operation, self._root, self._root_life, (), {**self._facts, **facts}, b"".join((handles, beside, manifest)))
        loan = Loan(departure, leaves, events)
        lent = [route for route in members if self._lend(loan, told, route)]
        if much and lent:
            await self._hand_aside(here, facts["aside"], lent)

    def _lend(self, loan: Loan, relay: Relay, route: Route) -> bool:
        link = self._exchange.table.peek(route.address)
        if link is None or link.sender.devices is None:
            return False  # the end of its link is ours, too

        def over() -> None:
            self._away.discard(route.address)
            if link.state is LinkState.ENDED:
                self._ended = link
            self._operation.nudge()

        self._away.add(route.address)
        relay.head(route, {"loan": link.sender.devices.lend(loan, over)})
        return True

    async def _hand_aside(self, leaves: Sequence[Leaf], total: int, members: Sequence[Route]) -> None:
        """To everybody from one memory, if the host has room for it."""
        bulk = await Bulk.make(self._exchange.table, total, shared=True)
        await bulk.pack(self._exchange.home, leaves)
        facts = {"root": self._root, "aside": True, "total": total}
        self._aside = Relay(self._operation, self._root, self._root_life, members, facts, b"")
        self._aside.pass_bulk(bulk)

    def answer(self, sender: WorkerAddress, note: Note) -> None:
        """A member says whether it could use what was lent to it in CPU memory."""
        if self._aside is not None:
            self._aside.answer(sender, note)

    @property
    def busy(self) -> bool:
        """Somebody is not through with it. Raises the cause if the link to one who was not has ended."""
        if self._ended is not None and self._ended.cause is not None:
            raise self._ended.cause()
        return bool(self._away) or (self._aside is not None and self._aside.busy)


def give_up(circle: Circle, member: WorkerAddress, why: str) -> None:
    """This member cannot read our devices: nobody tries again on its link."""
    link = circle.exchange.table.peek(member)
    if link is not None and link.sender.devices is not None:
        link.sender.devices.give_up(why.strip().partition("\n")[0])


_NOTHING = torch.empty(0, dtype=torch.uint8)


class Unreadable(Exception):
    """The loan is of no use here. The text, if there is one, says why nobody need try again."""


async def read_loan(
    circle: Circle,
    sender: WorkerAddress,
    note: Note,
    manifest: tuple[memoryview, Manifest],
    aside: Any,
    into: Target | None,
    wanted: torch.device | None,
    partial: bool,
) -> tuple[Any, list[torch.Tensor] | None]:
    """At a member: copy what is lent.

    Args:
        manifest: of the object, and what comes before it in the body.
        aside: the leaves in CPU memory, packed, if they have not come with the note.
        into: where it goes; None: into new memory.
        wanted: device of new memory.

    Returns:
        The object, and its leaves as they are here; None if some have become something else in `into`.

    Raises:
        Unreadable: it has to be had another way.
        Mismatch: it does not fit `into`.

    Cancelling does not stop the copying; the root hears of its end all the same.
    """
    key = note.number("loan")
    link = circle.exchange.table.peek(sender)
    devices, runtime = None if link is None else link.receiver.devices, accelerator()
    if link is None or devices is None:
        raise Unreadable  # the link has ended, and the loan with it
    returned = False

    def give_back() -> None:
        nonlocal returned
        if not returned:
            returned = True
            link.receiver.reply(FrameType.COPIED, key)

    try:
        if runtime is None:
            raise Unreadable("the member has no accelerator")
        reading = _Reading(circle, runtime, note, *manifest, aside)
        if into is None:
            reading.into_new_memory(Landing(circle.exchange.home).target(wanted))
        else:
            reading.into_tensors(into, partial)
        copied = reading.begin(devices, give_back)
    except BaseException:
        give_back()
        raise
    await copied
    leaves = reading.leaves
    return await reading.finish(into), leaves


class _Reading:
    """What a member makes of a loan."""

    def __init__(self, circle: Circle, runtime: Runtime, note: Note, before: memoryview, manifest: Manifest, aside: Any) -> None:
        self._exchange = circle.exchange
        self._runtime = runtime
        self._manifest = manifest
        specs = manifest.specs
        positions = device_positions(specs)
        handles, beside = note.number("handles"), note.number("beside")
        here = [spec.nbytes for spec in specs if not spec.device]
        if len(before) != handles + beside or (sum(here) != beside if aside is None else packed_size(here) != len(aside)):
            raise WireError(f"a loan of {len(before)} bytes does not fit its description")
        self._events, leaves = decode_handles(before[:handles], [specs[position].nbytes for position in positions])
        self._leaves: dict[int, Shared] = dict(zip(positions, leaves, strict=True))
        if aside is None:
            self._buffers: dict[int, torch.Tensor] = self._beside(specs, before[handles:])
        else:
            places = [position for position, spec in enumerate(specs) if not spec.device]
            self._buffers = dict(zip(places, split(aside, here), strict=True))
        self._index = 0
        self._reads: list[Read] = []
        self._users: list[Ready] = []
        self._written: list[torch.Tensor] = []
        self._rest: tuple[list[Any], list[Any]] = ([], [])

    def _beside(self, specs: Sequence[LeafSpec], view: memoryview) -> dict[int, torch.Tensor]:
        """What has come with the note: a copy of its own for each leaf."""
        buffers = {}
        at = 0
        for position, spec in enumerate(specs):
            if not spec.device:
                buffer = buffers[position] = fresh_bytes(spec.nbytes, self._exchange.table.pool)
                byte_view(buffer)[:] = view[at : at + spec.nbytes]
                at += spec.nbytes
        return buffers

    def into_new_memory(self, device: torch.device) -> None:
        """Of this device."""
        runtime = self._runtime
        if device.type != runtime.kind:
            raise Unreadable
        index = self._index = device.index or 0
        stream, user = runtime.side_stream(index, IN), runtime.current_stream(index)
        for position, spec in enumerate(self._manifest.specs):
            if not spec.device:
                continue
            try:
                memory = self._buffers[position] = runtime.empty(spec.nbytes, index, stream)
            except RuntimeError as error:  # there is no memory left on the device; perhaps there is in the host
                raise Unreadable from error
            if spec.nbytes:
                runtime.hold(memory, user)
                self._reads.append((memory, self._leaves[position], None))

    def into_tensors(self, into: Target, partial: bool) -> None:
        """Tensors on one of our devices. If others belong to it, all go the way through host memory."""
        specs = self._manifest.specs
        stand_ins = {
            position: torch.empty(spec.nbytes, dtype=torch.uint8, device="meta") for position, spec in enumerate(specs) if spec.device
        }
        stores: list[Any] = [
            stand_ins[position] if spec.device else byte_view(self._buffers[position]).obj for position, spec in enumerate(specs)
        ]
        try:
            value = assemble(self._manifest, stores, allow_pickle=self._exchange.config.allow_pickle)
        except Exception as error:  # a class that does more with its tensors than keep them; the other way shows what it is
            raise Unreadable from error
        where = {stand_in.untyped_storage()._cdata: position for position, stand_in in stand_ins.items()}
        near, abroad = into.match(value, partial)
        if any(source.is_meta for _, source in near):
            raise Unreadable
        devices = set()
        for target, source, ready in abroad:
            if not source.is_meta:
                self._rest[1].append((target, source, ready))
                continue
            position = where.get(source.untyped_storage()._cdata)
            if position is None or position not in self._leaves or source.nbytes != specs[position].nbytes:
                raise Unreadable
            if target.device.type != self._runtime.kind:
                raise Unreadable
            devices.add(target.device.index or 0)
            if source.dtype is target.dtype:
                self._reads.append((byte_tensor(target), self._leaves[position], None))
            else:
                self._reads.append((target.detach().reshape(-1), self._leaves[position], source.dtype))
            self._users.append(ready)
            self._written.append(target)
        if len(devices) != 1:
            raise Unreadable
        self._index = devices.pop()
        self._rest[0].extend(near)

    def begin(self, devices: DeviceIn, give_back: Any) -> asyncio.Future[None]:
        """Copy. `give_back` is called when the root's memory is free again."""
        copied: asyncio.Future[None] = self._exchange.home.loop.create_future()

        def over(error: BaseException | None) -> None:
            give_back()
            if copied.done():
                return
            if error is None:
                copied.set_result(None)
            else:
                copied.set_exception(Unreadable(str(error).strip().partition("\n")[0] or type(error).__name__))

        devices.read(self._runtime, self._index, self._reads, self._events, self._users, over)
        return copied

    @property
    def leaves(self) -> list[torch.Tensor] | None:
        """See `read_loan`."""
        found = dict(self._buffers)
        whole = {id(leaf): position for position, leaf in self._leaves.items()}
        found.update({whole[id(leaf)]: target for target, leaf, dtype in self._reads if dtype is None})
        specs = self._manifest.specs
        if any(spec.nbytes and position not in found for position, spec in enumerate(specs)):
            return None
        return [found.get(position, _NOTHING) for position in range(len(specs))]

    async def finish(self, into: Target | None) -> Any:
        """All is there: the object."""
        self._reads.clear()
        if into is not None:
            return await into.finish(self._exchange.home, *self._rest, self._written)
        manifest = self._manifest
        buffers = [self._buffers[position] for position in range(len(manifest.specs))]
        self._buffers.clear()
        try:
            return rebuild(manifest, buffers, allow_pickle=self._exchange.config.allow_pickle)
        except (UsageError, WireError, AiorlinfError):
            raise
        except Exception as error:  # the classes' own code runs here and may raise anything
            text = f"the object cannot be rebuilt here: {type(error).__name__}: {error}"
            raise UnsupportedObject(text, hint="its class must be importable on all members") from error
