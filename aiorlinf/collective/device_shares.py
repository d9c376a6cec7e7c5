"""One copy for each device in a broadcast: members whose tensors land on the same device have it from one of them.

The root knows from its links on which device each member's tensors land. Where several of one host land on the same one, and that is none
of the root's, only the first of them, the keeper, is sent the object, by whatever way it has. Once it is on the device the keeper lends it
to the others, as a root lends what is on its own (`device_loans`). So it comes to each device once, and inside the device it is copied at
the device's own speed.

The keeper has the object when those others are through with it: until then nobody may write to it. Whatever goes wrong with the lending,
the others get the object from the root as everybody does: the keeper says AGAIN `for` them, or they do so themselves. If the keeper dies,
so does the broadcast, for its own word is missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.device_loans import Lender, acquainted
from aiorlinf.collective.notes import Step
from aiorlinf.collective.route import Route, routes_of
from aiorlinf.errors import WireError
from aiorlinf.link.device_out import device_leaves
from aiorlinf.link.staging import Departure
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.leaves import Leaf

if TYPE_CHECKING:
    import torch

    from aiorlinf.collective.circle import Circle
    from aiorlinf.collective.into import Target
    from aiorlinf.collective.notes import Note
    from aiorlinf.collective.operation import Operation
    from aiorlinf.link.device_facts import DeviceFacts
    from aiorlinf.wire.manifest import Manifest

__all__ = ["Survey", "lend_on", "lent_through", "on_devices", "set_apart", "survey"]

log: logging.Logger = logging.getLogger("aiorlinf.collective")


class Survey:
    """Who gets an object how.

    Attributes:
        readers: those who read the root's devices themselves.
        shares: by keeper, those who have it from him.
    """

    def __init__(self, readers: Sequence[WorkerAddress], shares: Mapping[WorkerAddress, Sequence[WorkerAddress]]) -> None:
        self.shares: Mapping[WorkerAddress, Sequence[WorkerAddress]] = shares
        self.others: set[WorkerAddress] = {member for each in self.shares.values() for member in each}
        self.readers: list[WorkerAddress] = [member for member in readers if member not in self.others]


async def survey(circle: Circle, flat: Flat, departure: Departure, hosts: Mapping[WorkerAddress, str]) -> Survey:
    """At the root.

    Args:
        hosts: of all members.

    Raises the cause if the link to a member ends meanwhile.
    """
    if not device_leaves(flat):
        return Survey((), {})
    here = hosts[circle.local]
    count = Counter(hosts[member] for member in circle.others)
    # Who is alone on another host shares nothing: it need not look at its devices, which starts them.
    links = await acquainted(circle, [member for member in circle.others if hosts[member] == here or count[hosts[member]] > 1])
    readers = [member for member, devices in links.items() if hosts[member] == here and devices.reads(departure)]
    sources = {(here, runtime.kind, runtime.identity(index).uuid) for runtime, index, _ in departure.devices.values()}
    landings = {member: devices.landing for member, devices in links.items()}
    return Survey(readers, _shares(landings, hosts, sources, circle.apart))


def _shares(
    landings: Mapping[WorkerAddress, DeviceFacts | None],
    hosts: Mapping[WorkerAddress, str],
    sources: set[tuple[str, str, str]],
    apart: set[tuple[str, str]],
) -> dict[WorkerAddress, list[WorkerAddress]]:
    keepers: dict[tuple[str, str, str], tuple[WorkerAddress, DeviceFacts]] = {}
    shares: dict[WorkerAddress, list[WorkerAddress]] = {}
    for member, facts in landings.items():
        if facts is None or not facts.target:
            continue
        place = (hosts[member], facts.kind, facts.target)
        if place in sources:
            continue  # these copy from the root's own memory on that device
        keeper, his = keepers.setdefault(place, (member, facts))
        if keeper == member or (keeper, member) in apart:
            continue
        if his.way_to(facts, his.target, same_host=True).name == "cuda_ipc":
            shares.setdefault(keeper, []).append(member)
    return shares


def set_apart(circle: Circle, keeper: str, member: WorkerAddress, why: str) -> None:
    """This member cannot read what that one lends: nobody tries again."""
    if (keeper, member) not in circle.apart:
        circle.apart.add((keeper, member))
        log.warning("%s: %s cannot copy from the memory of %s, which is on its device: %s", circle.local, member, keeper, why)


def lent_through(note: Note, local: WorkerAddress) -> tuple[Route, ...]:
    """Those whom we are to lend the object. Raises WireError on anything malformed."""
    told = note.facts.get("shares")
    if told is None:
        return ()
    if not isinstance(told, dict):
        raise WireError("a broadcast says in a malformed way who shares a device")
    return routes_of(told.get(local, []))


def on_devices(
    manifest: Manifest, leaves: Sequence[torch.Tensor] | None, into: Target | None = None, value: Any = None, partial: bool = False
) -> Flat | None:
    """The object as it lies here, to be lent; None if not all of it that comes from devices is on one, as it was sent.

    Args:
        leaves: as they are here.
        into, value: before these leaves, taken together as `value`, are copied into that.

    Raises:
        Mismatch: it does not fit `into`.
    """
    if leaves is None:
        return None
    found = list(leaves)
    if into is not None:
        where = {leaf.data_ptr(): position for position, leaf in enumerate(leaves) if leaf.numel()}
        for target, source, _ in into.match(value, partial)[1]:
            position = where.get(source.data_ptr())
            same = source.dtype is target.dtype and source.is_contiguous()
            if position is not None and same and source.nbytes == leaves[position].nbytes:
                found[position] = target
    for spec, leaf in zip(manifest.specs, found, strict=True):
        if spec.nbytes and leaf.is_cpu == bool(spec.device):
            return None
    return Flat(manifest.kind, (), [Leaf(spec, None, leaf, None) for spec, leaf in zip(manifest.specs, found, strict=True)])


async def lend_on(
    operation: Operation,
    root: tuple[WorkerAddress, int],
    members: Iterable[Route],
    flat: Flat | None,
    manifest: bytes,
    facts: dict[str, Any],
    otherwise: Callable[[WorkerAddress, Note], object],
) -> None:
    """At a keeper, which has the object: lend it to these members, and return when they are through.

    Args:
        root: and its life.
        flat: the object; None: it cannot be lent.
        manifest: of the object, encoded.
        facts: as for a `Relay`.
        otherwise: gets the notes that are about something else.

    Raises the cause if the link to one of them ends.
    """
    waiting = {route.address: route for route in members}
    departure = None if flat is None else Departure.of(flat)
    lender = Lender(operation, *root, facts)
    if flat is not None and departure is not None:
        links = await acquainted(operation.circle, list(waiting))
        able = [waiting[member] for member, devices in links.items() if devices.reads(departure)]
        try:
            await lender.lend(flat, departure, manifest, able)
        except RuntimeError as error:
            log.info("%s: what others on the same device need cannot be lent: %s", operation.circle.local, error)
        else:
            for route in able:
                del waiting[route.address]
    if waiting:
        operation.tell(root[0], Step.AGAIN, {"for": list(waiting)})
    while lender.busy:
        told = await operation.next()
        if told is None:
            continue
        if told[1].facts.get("aside"):
            lender.answer(*told)
        else:
            otherwise(*told)
